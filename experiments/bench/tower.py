"""Times a tower of dense layers with LayerNorm and swish: Flax against this library.

    python experiments/bench/tower.py --out tower.json

The tower is 512 -> 512 -> 512 -> 256 -> 256 and one logit. For each arm: wall clock of
queued inferences and training steps (binary cross entropy, Adam, state donated), and
the kernels they launch. Arms:

    flax bf16         Flax's layers, which the others are compared to
    flax fp8          the same with Flax's FP8 op
    PROVIDER RECIPE   ours; "auto" takes kernels where they serve

Flax's layers have no bias before the norm, as ours have none: it would have no effect
but its cost.

On a CPU: `--batch-size 64 --inputs 32 --features 16 --calls 2`.
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
from loka_jax.site import ALONE, Provider

FLAX, FLAX_FP8 = "flax bf16", "flax fp8"
ARMS = (
    FLAX,
    "auto fp8_tensorwise_delayed_bf16_drhs",
    "auto fp8_rowwise_bf16_drhs",
    "auto bf16",
    FLAX_FP8,
)
NUM_BATCHES = 4  # rotated; one alone exceeds the L2


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
    """

    out: pathlib.Path | None = None
    arms: tuple[str, ...] = ARMS
    inputs: int = 512
    features: tuple[int, ...] = TOWER_FEATURES
    batch_size: int = 65536
    calls: int = 40

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
    result = results.head("tower", arguments) | {
        "inputs": "N(0, 1); random labels",
        "roofline": dataclasses.asdict(roofline),
        "inference_floor_us": inference_floor_us(arguments, roofline),
        "arms": measure(arms, make_batches(arguments), arguments.calls),
    }
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
    providers: dict[str, Provider | None] = {name: name for name in ALONE}
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
    """Returns the functions of an arm."""
    module = WithHead(layers(name, features))
    initialized = WithHead(layers(name, features, scales_initialized=True))
    optimizer = optax.adam(1e-3)

    def init(key):
        variables = dict(module.init(key, jnp.zeros((16, inputs))))
        return State(variables, optimizer.init(variables["params"]), jnp.zeros(()))

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


def make_batches(arguments: Arguments) -> list[Batch]:
    """Returns the batches that are rotated."""

    @jax.jit
    def make(key):
        keys = jax.random.split(key)
        x = jax.random.normal(keys[0], (arguments.batch_size, arguments.inputs))
        labels = jax.random.bernoulli(keys[1], shape=(arguments.batch_size,))
        return Batch(x.astype(jnp.bfloat16), labels.astype(jnp.float32))

    return [make(key) for key in jax.random.split(jax.random.key(1), NUM_BATCHES)]


def measure(arms: dict[str, Arm], batches: list[Batch], calls: int) -> dict[str, Any]:
    """Returns a record an arm: wall clock and kernels of inference and of a step."""
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


def _print(result: dict[str, Any]) -> None:
    for name, record in result["arms"].items():
        for part, measured in record.items():
            kernels = measured["kernels"] or {"busy_us": np.nan, "count": np.nan}
            print(
                f"{name:42}{part:10}{measured['wall']['median_us']:9.1f} us, "
                f"{kernels['busy_us']:9.1f} us of {kernels['count']:.0f} kernels, "
                f"{measured['vs_flax_bf16']:6.2f}x"
            )
    print(f"floor of inference: {result['inference_floor_us']:.1f} us")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
