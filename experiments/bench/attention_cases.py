"""What benchmarks of attention share: cases, forms of them, and times of these."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from loka_jax import quality
from loka_jax.measure.compiling import leaves, untuned_here
from loka_jax.measure.timing import Case as Timed
from loka_jax.measure.timing import profile_kernels, time_chains, time_kernels
from loka_jax.terminal import one_line

# Least SQNR of our results: they, and what they are made of, are rounded to 2**-9.
LEAST_DB = 45.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Heads of a size, and lengths of sequences: max_length, or drawn.

    Attributes:
        lengths: "full", "log-normal" (median a third of the most) or "uniform" from 0.
    """

    size: int
    max_length: int
    batch: int
    heads: int = 4
    lengths: str = "full"

    def offsets(self) -> np.ndarray:
        """Returns where sequences begin and the last one ends."""
        generator = np.random.default_rng(self.batch)
        lengths = np.full(self.batch, self.max_length)
        if self.lengths == "log-normal":
            drawn = generator.lognormal(np.log(self.max_length / 3), 1.0, self.batch)
            lengths = np.clip(drawn, 1, self.max_length).astype(int)
        elif self.lengths == "uniform":
            lengths = generator.integers(0, self.max_length + 1, self.batch)
        return np.cumsum([0, *lengths]).astype(np.int32)

    def flops(self) -> float:
        """Returns the FLOPs of the forward pass."""
        lengths = np.diff(self.offsets()).astype(float)
        return 4 * self.size * self.heads * float(np.sum(lengths**2)) / 2


CASES = {
    "t256": Case(size=128, max_length=256, batch=128),
    "m": Case(size=128, max_length=4096, batch=8),
    "m_log_normal": Case(size=128, max_length=4096, batch=32, lengths="log-normal"),
    "h256": Case(size=256, max_length=4096, batch=8),
    "h64": Case(size=64, max_length=512, batch=64),
    "h64_log_normal": Case(size=64, max_length=512, batch=64, lengths="log-normal"),
    "h64_odd": Case(size=64, max_length=777, batch=37, lengths="uniform"),
    "tiny": Case(size=64, max_length=50, batch=3, heads=2, lengths="uniform"),
}


class Form(NamedTuple):
    """A way to compute attention, or a part of it, of a case.

    Attributes:
        work: the key of `WORK`.
        wanted: what its results are checked against; None for no check.
        wall: whether to time the wall clock, too.
        least_db: the least SQNR of a right result.
    """

    run: Callable
    operands: tuple[jax.Array, ...]
    work: str
    wanted: tuple[jax.Array, ...] | None = None
    wall: bool = True
    least_db: float = LEAST_DB


# Products of rows by rows in a pass, in units of the forward pass's two.
WORK = {"forward": 1, "both": 3.5, "dq": 1.5, "dk, dv": 2, "dk": 1.5, "dv": 1}


def timed(case: Case, form: Form, program: Any) -> dict[str, Any]:
    """Returns the record of a form: its time, or why there is none."""
    if isinstance(program, Exception):
        return {"failed": one_line(program)}
    try:
        arguments = leaves(form.operands)
        found = program(*arguments)
        record: dict[str, Any] = {}
        if form.wanted is not None:
            record["sqnr_db"] = _least_sqnr(form.wanted, found)
            if not record["sqnr_db"] >= form.least_db:
                return record | {"wrong": f"{record['sqnr_db']:.1f} dB"}
            again = program(*arguments)
            if not all(map(jnp.array_equal, found, again)):
                return record | {"wrong": "two calls differ"}
        (timing,) = time_kernels({"": Timed(program, [arguments])}).values()
        us = timing.median_us
        flops = case.flops() * WORK[form.work]
        record |= {"us": us, "min_us": timing.min_us, "max_us": timing.max_us}
        record |= {"kernels": timing.kernels, "tflops": flops / us / 1e6}
        if form.wall:
            chain = lambda calls: [program(*arguments) for _ in range(calls)][-1]  # noqa: E731
            record["wall_us"] = time_chains({"": chain}, calls=10, rounds=3)[""].min_us
            if (kernels := profile_kernels(chain)) is not None:
                record["longest"] = kernels.longest[:6]
        return record
    except Exception as error:  # the next form may run
        return {"failed": one_line(error)}


def _least_sqnr(wanted, found) -> float:
    pairs = [(x, y.astype(jnp.float32)) for x, y in zip(wanted, found, strict=True)]
    if not all(bool(jnp.all(jnp.isfinite(y))) for _, y in pairs):
        return -np.inf
    return min(float(quality.sqnr(x, y)) for x, y in pairs)


def operands_of(case: Case, num_rows: int) -> tuple[jax.Array, ...]:
    """Returns q, k, v and a gradient of the output."""
    shape = (-(-num_rows // 128) * 128, case.heads, case.size)
    return _normal(shape)


def padded_operands(case: Case) -> tuple[jax.Array, ...]:
    """Returns q, k, v and a gradient, in sequences of one length."""
    return _normal((case.batch, -(-case.max_length // 64) * 64, case.heads, case.size))


def _normal(shape) -> tuple[jax.Array, ...]:
    make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))
    return tuple(map(make, jax.random.split(jax.random.key(0, impl="rbg"), 4)))


def exactly(run: Callable) -> Callable:
    """Returns the function in float32."""
    exact = lambda *x: run(*(z.astype(jnp.float32) for z in x))  # noqa: E731
    return jax.jit(exact, compiler_options=dict(untuned_here()))
