"""Times a tower of dense layers with LayerNorm and swish: Flax against this library.

    python experiments/bench/tower.py --out tower.json

The tower is 512 -> 512 -> 512 -> 256 -> 256 and one logit. For each arm: wall clock of
queued inferences and training steps (binary cross entropy, Adam, state donated), and
the kernels they launch. Then the arms are trained from the same parameters on the same
batches of a task that can be learned, and their losses compared. Arms:

    flax bf16         Flax's layers, which the others are compared to
    flax fp8          the same with Flax's FP8 op
    PROVIDER RECIPE   ours; "auto" takes kernels where they serve

Flax's layers have no bias before the norm, as ours have none: it would have no effect
but its cost.

On a CPU: `--batch-size 64 --inputs 32 --features 16 --calls 2 --steps 4`.
"""

import dataclasses
import functools
import operator
import pathlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from experiments.bench import result as results
from experiments.bench.models import TOWER_FEATURES, FlaxMlp, WithHead
from experiments.bench.steps import Chain, chain_of
from loka_jax import nn
from loka_jax.measure.roofline import Roofline, measure_roofline
from loka_jax.measure.timing import profile_kernels, time_chains
from loka_jax.recipe import INITIALIZED, get_recipe
from loka_jax.site import PROVIDERS, Provider

FLAX, FLAX_FP8 = "flax bf16", "flax fp8"
ARMS = (
    FLAX,
    "auto fp8_tensorwise_delayed_bf16_drhs",
    "auto fp8_rowwise_bf16_drhs",
    "auto bf16",
    FLAX_FP8,
)
NUM_BATCHES = 4  # rotated; one alone exceeds the L2
LAST = 50  # steps whose losses are compared


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        out: where to write the JSON; printed only if None.
        arms: what to time.
        inputs: features of the batch.
        features: widths of the layers.
        batch_size: rows.
        calls: calls queued in one timing.
        steps: of the training whose losses are compared.
    """

    out: pathlib.Path | None = None
    arms: tuple[str, ...] = ARMS
    inputs: int = 512
    features: tuple[int, ...] = TOWER_FEATURES
    batch_size: int = 65536
    calls: int = 40
    steps: int = 500

    def __post_init__(self):
        """Raises ValueError if there is no such arm, or the first is not Flax's."""
        if self.arms[0] != FLAX:
            raise ValueError(
                f"--arms begins with {self.arms[0]!r}: put {FLAX!r} first, which the "
                "others are compared to."
            )
        for arm in self.arms:
            layers(arm, self.features)


class Batch(NamedTuple):
    """Rows and their labels."""

    x: jax.Array
    labels: jax.Array


class State(NamedTuple):
    """What a training step changes, and its loss."""

    variables: dict[str, Any]
    optimizer: optax.OptState
    loss: jax.Array


class Arm(NamedTuple):
    """Compiled functions of one arm.

    Attributes:
        init: from a key to the initial state.
        first_step: the training step that also sets delayed scales.
        step: the training step after some of those.
        infer: from variables and rows to logits.
    """

    init: Callable[..., State]
    first_step: Callable[[State, Batch], State]
    step: Callable[[State, Batch], State]
    infer: Callable[..., jax.Array]


def main(arguments: Arguments) -> dict[str, Any]:
    """Measures, prints a table, writes and returns the result."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    roofline = measure_roofline()
    print(f"{jax.devices()[0].device_kind}: {roofline}")
    arms = {
        name: make_arm(name, arguments.inputs, arguments.features)
        for name in arguments.arms
    }
    batch = make_batches(arguments)
    result = results.head("tower", arguments) | {
        "inputs": "N(0, 1); labels of a random two-layer network",
        "roofline": dataclasses.asdict(roofline),
        "inference_floor_us": inference_floor_us(arguments, roofline),
        "arms": measure(arms, batch, arguments.calls),
    }
    losses = {name: train(arm, batch, arguments.steps) for name, arm in arms.items()}
    result["losses"] = compare_losses(losses)
    _print(result)
    results.write(arguments.out, result)
    return result


def layers(arm: str, features: tuple[int, ...], *, scales_initialized: bool = False):
    """Returns the layers of an arm.

    Raises:
        ValueError: if there is no such arm.
    """
    if arm in (FLAX, FLAX_FP8):
        return FlaxMlp(
            features,
            norm="layer",
            activation="swish",
            use_bias=False,
            is_fp8=arm == FLAX_FP8,
        )
    provider, _, recipe = arm.partition(" ")
    providers: dict[str, Provider | None] = {name: name for name in PROVIDERS}
    providers["auto"] = None
    if provider not in providers:
        raise ValueError(
            f"arm {arm!r} is not Flax's, nor begins with one of {', '.join(providers)}."
        )
    if get_recipe(recipe).is_delayed and scales_initialized:
        recipe += INITIALIZED
    return nn.Mlp(
        features,
        recipe=recipe,
        norm="layer",
        activation="swish",
        implementation=providers[provider],
    )


def make_arm(name: str, inputs: int, features: tuple[int, ...]) -> Arm:
    """Returns the functions of an arm; every arm begins with the same kernels."""
    module = WithHead(layers(name, features))
    initialized = WithHead(layers(name, features, scales_initialized=True))
    optimizer = optax.adam(1e-3)

    def init(key):
        rows = jnp.zeros((16, inputs))
        variables = dict(module.init(key, rows))
        flax = WithHead(layers(FLAX, features)).init(key, rows)
        params = with_kernels_of(flax["params"], variables["params"])
        variables |= {"params": params}
        return State(variables, optimizer.init(params), jnp.zeros(()))

    def step(module, state: State, batch: Batch):
        def mean_loss(variables):
            logits = module.apply(variables, batch.x)
            return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, batch.labels))

        loss, grads = jax.value_and_grad(mean_loss)(state.variables)
        params = state.variables["params"]
        updates, opt_state = optimizer.update(grads["params"], state.optimizer, params)
        # The "gradient" of scaling state is its next value.
        variables = dict(grads) | {"params": optax.apply_updates(params, updates)}
        return State(variables, opt_state, loss)

    def jitted_step(module):
        return jax.jit(functools.partial(step, module), donate_argnums=0)

    first_step = jitted_step(module)
    return Arm(
        init=jax.jit(init),
        first_step=first_step,
        step=first_step if module == initialized else jitted_step(initialized),
        infer=jax.jit(initialized.apply),
    )


def with_kernels_of(source, params):
    """Returns `params` with the kernels of `source`, in the order of their paths.

    All other parameters begin with zeros or ones.
    """

    def is_kernel(path) -> bool:
        return path[-1].key == "kernel"

    with_paths = jax.tree_util.tree_leaves_with_path
    kernels = iter([x for path, x in with_paths(source) if is_kernel(path)])
    return jax.tree_util.tree_map_with_path(
        lambda path, x: next(kernels) if is_kernel(path) else x, params
    )


def make_batches(arguments: Arguments) -> Callable[[int], Batch]:
    """Returns the batches by number, made on the device.

    Labels are drawn with the odds that a random network of two layers gives.
    """
    inputs, hidden = arguments.inputs, 64
    key = jax.random.key(1, impl="rbg")
    first = jax.random.normal(key, (inputs, hidden)) / np.sqrt(inputs)
    second = jax.random.normal(jax.random.fold_in(key, 1), (hidden,))

    @jax.jit
    def make(number):
        keys = jax.random.split(jax.random.fold_in(key, number), 2)
        x = jax.random.normal(keys[0], (arguments.batch_size, inputs), jnp.bfloat16)
        logits = jnp.tanh(2.0 * (x.astype(jnp.float32) @ first)) @ second / 2.0
        draws = jax.random.uniform(keys[1], logits.shape)
        return Batch(x, (draws < jax.nn.sigmoid(logits)).astype(jnp.float32))

    return make


def measure(
    arms: dict[str, Arm], batch: Callable[[int], Batch], calls: int
) -> dict[str, Any]:
    """Returns a record an arm: wall clock and kernels of inference and of a step."""
    batches = [batch(number) for number in range(NUM_BATCHES)]
    inferences: dict[str, Chain] = {}
    steps: dict[str, Chain] = {}
    for name, arm in arms.items():
        state = arm.init(jax.random.key(0))
        for number in range(3):  # sets delayed scales
            state = arm.first_step(state, batches[number])
        variables = jax.tree.map(jnp.copy, state.variables)  # `state` is donated
        steps[name] = chain_of(arm.step, [state], batches, operator.attrgetter("loss"))
        inferences[name] = chain_of(
            lambda _, x, arm=arm, held=variables: arm.infer(held, x),
            [None],
            [rows for rows, _ in batches],
        )
    records: dict[str, Any] = {name: {} for name in arms}
    for part, chains in (("inference", inferences), ("step", steps)):
        times = time_chains(chains, calls=calls)
        for name, chain in chains.items():
            kernels = profile_kernels(chain)
            records[name][part] = {
                "wall": times[name]._asdict(),
                "kernels": None if kernels is None else kernels._asdict(),
                "vs_flax_bf16": times[FLAX].median_us / times[name].median_us,
            }
    return records


def inference_floor_us(arguments: Arguments, roofline: Roofline) -> float:
    """Returns the least time of the layers one after another.

    The batch is read in bfloat16, and FP8 handed on from layer to layer.
    """
    total, k, itemsize = 0.0, arguments.inputs, 2
    for n in arguments.features:
        num_bytes = arguments.batch_size * (itemsize * k + n) + k * n
        flops = 2.0 * arguments.batch_size * k * n
        total += roofline.floor_us(num_bytes, flops, "fp8")
        k, itemsize = n, 1
    return total + roofline.floor_us(arguments.batch_size * (k + 4), 0.0, "fp8")


def train(arm: Arm, batch: Callable[[int], Batch], num_steps: int) -> np.ndarray:
    """Returns the losses of the steps, all arms on the same batches."""
    state = arm.init(jax.random.key(0))
    losses = []
    for number in range(num_steps):
        step = arm.first_step if number < 3 else arm.step
        state = step(state, batch(number))
        losses.append(jnp.copy(state.loss))  # `state` is donated
    return np.asarray(jnp.stack(losses), np.float64)


def compare_losses(losses: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns, by arm, the mean of the last losses against bfloat16's.

    `noise` is how much bfloat16's own loss varies from step to step there.
    """
    base = losses[FLAX][-LAST:]
    noise = float(np.std(base))
    return {
        name: {
            "first": float(values[0]),
            "last_mean": float(np.mean(values[-LAST:])),
            "noise": noise,
            "difference": float(np.mean(values[-LAST:] - base)),
            "is_equal": bool(abs(np.mean(values[-LAST:] - base)) <= noise),
        }
        for name, values in losses.items()
    }


def _print(result: dict[str, Any]) -> None:
    for name, record in result["arms"].items():
        loss = result["losses"][name]
        for part, measured in record.items():
            kernels = measured["kernels"] or {"busy_us": np.nan, "count": np.nan}
            print(
                f"{name:42}{part:10}{measured['wall']['median_us']:9.1f} us, "
                f"{kernels['busy_us']:9.1f} us of {kernels['count']:.0f} kernels, "
                f"{measured['vs_flax_bf16']:6.2f}x"
            )
        print(
            f"{'':42}loss {loss['first']:.4f} -> {loss['last_mean']:.5f}, difference "
            f"{loss['difference']:+.5f} of noise {loss['noise']:.5f}"
        )
    print(f"floor of inference: {result['inference_floor_us']:.1f} us")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
