"""Times the dense part of HSTU, its optimizer included, and says its MFU.

    python experiments/bench/hstu.py --out hstu.json

As `wide_models`, from gathered embeddings of sequences to new parameters, without
dropout; kernel time, and wall clock of queued steps, of which are samples/s and the
share of the GPU's bfloat16 peak. FLOPs are those of the layers: of products, three
times forward, and of the pairs of rows that see each other (half of the square), 3.5
times forward. Every arm is compiled, timed and written by itself:

    xla bf16      XLA alone, the attention on jagged rows
    dense bf16    XLA alone, the attention as dense products of sequences, in training
                  computed again in the backward pass
    ours bf16     our kernels in bfloat16
    ours fp8      the same in FP8, and others of `wide_models`

The sequences of "m_quarter" have a mean length of a quarter, and no dense form: their
samples/s over those of "m" are what jagged rows gain over padding.

"ours fp8 attention" has the forward pass of the attention in FP8, too; so has any other
arm with that word.

Without a GPU times are wall clock: `--cases small`.
"""

import dataclasses
import gc
import itertools
from typing import Any, Literal, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments.bench import models, wide_models
from experiments.bench import result as results
from experiments.bench.wide_models import Inference, Training
from experiments.configs import find_config
from loka_jax import nn
from loka_jax.data import Events
from loka_jax.dispatch.attention import IN_FP8
from loka_jax.models import Hstu

_PEAK = 989e12  # FLOP/s of an H100 or H200 in bfloat16
_SETS = 2  # of inputs
_PROGRAMS = {"training": Training, "inference": Inference}


class Case(NamedTuple):
    """A configuration, and the sequences of a step.

    Attributes:
        share: the mean length of a sequence over the longest; below 1 lengths are drawn
            uniformly from 2 to twice the mean.
    """

    config: str
    batch: int
    share: float = 1.0

    def lengths(self, most: int) -> tuple[int, ...]:
        """Returns the rows of each sequence."""
        if self.share == 1:
            return (most,) * self.batch
        last = int(2 * self.share * most)
        generator = np.random.default_rng(self.batch)
        return tuple(generator.integers(2, last, self.batch, endpoint=True).tolist())


CASES = {
    "m": Case("fp8_hstu_m", 8),
    "m_quarter": Case("fp8_hstu_m", 32, 0.25),
    "s": Case("fp8_hstu_s", 64),
    "l": Case("fp8_hstu_l", 4),
    "small": Case("fp8_hstu", 2),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(results.Options):
    """Options of the benchmark.

    Attributes:
        cases: names of cases, in order.
        arms: of those above.
        recipe: of arms "fp8".
        kinds: of programs to time.
        calls: of a program in each of three profiles.
    """

    cases: tuple[str, ...] = ("m", "s")
    arms: tuple[str, ...] = (
        "ours bf16",
        "dense bf16",
        "ours fp8",
        "ours fp8 attention",
    )
    recipe: str = "fp8_tensorwise_delayed"
    kinds: tuple[Literal["training", "inference"], ...] = ("training",)
    calls: int = 5


class DenseLayer(nn.HstuLayer):
    """A layer whose attention is of whole sequences, as dense products."""

    def _attend(self, rows, offsets, rule):
        del rule  # of one row of a context, which sees the history
        q, k, v = (x.alone() for x in rows.parts())
        split = lambda x: x.reshape(len(offsets) - 1, -1, *x.shape[1:])  # noqa: E731

        @jax.checkpoint
        def attention(q, k, v):
            scores = self.qk_dim**-0.5 * jnp.einsum("bihd,bjhd->bhij", q, k)
            seen = jnp.tri(q.shape[1], dtype=q.dtype).at[0, :-1].set(1)
            weights = jax.nn.silu(scores) * seen[None, None] / self.max_length
            return jnp.einsum("bhij,bjhd->bihd", weights, v)

        return rows.u, attention(*map(split, (q, k, v))).reshape(v.shape)


class Sequences(Hstu):
    """HSTU of sequences of a context, a history and a candidate.

    Attributes:
        lengths: rows of each sequence.
        is_dense: the attention is XLA's dense one, of equally long sequences.
    """

    lengths: tuple[int, ...] = ()
    is_dense: bool = False

    def __call__(self, fields: jax.Array) -> jax.Array:
        """Returns the logits of fields [C, K, d] of the rows of all sequences."""
        # Not to be folded into the program: a batch is an input.
        events = jax.tree.map(jnp.asarray, events_of(self.lengths))
        events = jax.lax.optimization_barrier(events)
        context = fields[events.offsets[:-1]]
        none = jnp.zeros((len(context), 0))
        return super().__call__(none, (context, fields), events, train=False)

    def _layer(self, number: int) -> nn.HstuLayer:
        kind = DenseLayer if self.is_dense else nn.HstuLayer
        with mock.patch.object(nn, "HstuLayer", kind):
            return super()._layer(number)


def sequences_of(model: Hstu, lengths: tuple[int, ...]) -> Sequences:
    """Returns the model of sequences of these lengths."""
    names = {field.name for field in dataclasses.fields(Hstu)} - {"parent", "name"}
    own = {name: getattr(model, name) for name in names}
    return Sequences(**own, lengths=lengths)


def events_of(lengths: tuple[int, ...]) -> Events:
    """Returns sequences of these lengths, each with one row of a context."""
    offsets = np.cumsum([0, *lengths]).astype(np.int32)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    rows = np.arange(offsets[-1], dtype=np.int32)
    left = offsets[1:][sequence] - 1 - rows
    return Events(
        ids=np.zeros((len(rows), 1), np.int32),
        answers=1 + left[:, None] % 2,
        positions=left,
        ages=60.0 * left.astype(np.float32),
        offsets=offsets,
        targets=offsets[1:] - 1,
        contextual=np.ones(len(lengths), np.int32),
        candidates=np.ones(len(lengths), np.int32),
    )


def main(arguments: Arguments) -> None:
    """Measures, prints and writes the result."""
    result = results.head("hstu", arguments) | {"inputs": "N(0, 1)", "rows": []}
    cases = list(itertools.product(arguments.cases, arguments.arms, arguments.kinds))
    for name, arm, kind in results.in_time(cases, result, arguments):
        row: dict[str, Any] = {"case": name, "arm": arm, "kind": kind}
        row |= CASES[name]._asdict() | measure(CASES[name], arm, kind, arguments)
        result["rows"].append(row)
        print(f"{name}, {kind}, {arm}: {_in_short(row)}", flush=True)
        gc.collect()  # the next program needs the memory


def _in_short(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"failed: {row['failed'][:300]}"
    longest = [f"\n  {us:9.1f} us {n:4.0f}  {x[:90]}" for x, us, n in row["longest"]]
    return (
        f"{row['us']:.0f} us, {row['wall_us']:.0f} us wall, {row['kernels'] or 0:.0f} "
        f"kernels, {row['samples_per_s']:.0f} samples/s, MFU {row['mfu']:.1%}, "
        f"{row['memory_bytes'] / 1e9:.2f} GB" + "".join(longest)
    )


def measure(case: Case, arm: str, kind: str, arguments: Arguments) -> dict[str, Any]:
    """Returns the times of an arm, and what they mean."""
    config = find_config(case.config)
    assert isinstance(config.model, Hstu)
    lengths = case.lengths(config.model.max_length)
    model = sequences_of(config.model, lengths).clone(recipe="bf16")
    shape = sum(lengths), 1, config.embedding.dim
    sets = [models.make_inputs((shape,), seed) for seed in range(_SETS)]
    few = models.make_inputs(((lengths[0], *shape[1:]),), 0)
    program = _PROGRAMS[kind](*_planned(model, arm, arguments.recipe, sets, few))
    ((_, record),) = wide_models.compiled_and_timed({arm: program}, arguments.calls)
    if "failed" in record:
        return record
    seconds = record["wall_us"] / 1e6
    flops = flops_of(model, kind == "training")
    per_s = {"samples_per_s": case.batch / seconds, "tflops": flops / seconds / 1e12}
    return record | per_s | {"mfu": flops / seconds / _PEAK}


def _planned(model: Sequences, arm: str, recipe: str, sets, few):
    """Returns the model of an arm, its variables and its inputs."""
    is_fp8_attention = arm != (arm := arm.removesuffix(" attention"))
    if arm.startswith("dense"):
        if len({*model.lengths}) > 1:
            raise ValueError(f"--arms {arm!r} takes sequences of one length.")
        arm, model = arm.replace("dense", "xla"), model.clone(is_dense=True)
    planned = wide_models.arm_of(model, arm, recipe, sets[0])
    if is_fp8_attention:
        paths = (f"layer_{number}/attention" for number in range(model.num_layers))
        choices = *planned.choices, *((path, IN_FP8) for path in paths)
        planned = dataclasses.replace(planned, choices=choices)
    one = planned.model.clone(lengths=model.lengths[:1])
    by_xla = dataclasses.replace(planned, model=one).by_xla()
    variables = models.initialized(by_xla, few)
    if planned.is_delayed:
        planned = dataclasses.replace(planned, scales_initialized=True)
    return planned, variables, sets


def flops_of(model: Sequences, is_training: bool) -> float:
    """Returns the FLOPs of the layers, of a step."""
    lengths, d, h = np.array(model.lengths, float), model.dim, model.num_heads
    sizes = model.qk_dim + model.v_dim
    products = 2 * np.sum(lengths) * d * h * (2 * sizes + 3 * model.v_dim)
    attention = 2 * np.sum(lengths**2) / 2 * h * sizes
    factors = (3, 3.5) if is_training else (1, 1)
    return model.num_layers * (factors[0] * products + factors[1] * attention)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
