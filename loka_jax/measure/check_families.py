"""Are the kernels of a family right? `why_wrong` runs them and XLA's form beside them.

Every value is compared with that of the reference, so that a tile of zeros, a row that
is skipped and one that was never to be written all show:

    |x - y| <= eps |y| + noise rms(y)

with eps the step of y's format, which two right roundings may lie apart, and the root
mean square over y's row. The noise is what float32 in another order, approximate
functions and roundings in between explain. Codes in 8 bits may lie a step apart, and
few of them do. Integers are equal, and so is everything where there is no noise.

Operands show the mistakes of kernels: rows of very different size, one of them zeros
and the last by far the largest, in sizes that fill no tile. They are NumPy's, made on
the host, as whoever asks may be tracing a program.
"""

import functools
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import PyTree

from loka_jax import fp8, xla
from loka_jax.measure.checking import EXHAUSTED, NO_MEMORY
from loka_jax.tails import Outer, Scale, Scaled, Written
from loka_jax.terminal import one_line

# tanh, exp and rsqrt of the GPU: the least precise has 11 bits.
NOISE = 2.0**-10
BF16 = np.dtype(ml_dtypes.bfloat16)
EXACT = 0.0  # noise of whole numbers, and of what is copied or cast once
SUMS = 2.0**-16  # of float32 in another order
SHAPE = (199, 333)

_WORKERS = 8  # cases that are compiled at a time
_PAUSE_S = 2.0  # before what failed is tried again
# A reference runs once: XLA's search for its fastest kernels takes longer than it.
_QUICK = {"xla_gpu_autotune_level": "0"}
# Of 8-bit codes, the share that rounding may move to the next one.
_MOVED_CODES = 1 / 32


class Case(NamedTuple):
    """What kernels are checked on.

    Attributes:
        draw: returns the operands of both, pytrees of arrays.
        kernel: a function of the operands that launches kernels.
        reference: the same by XLA; its results have the kernel's types.
        noise: see above.
    """

    name: str
    draw: Callable[[], tuple]
    kernel: Callable[..., PyTree]
    reference: Callable[..., PyTree]
    noise: float = NOISE


def why_any_wrong(
    cases: Sequence[Case],
    *,
    compiled: Callable[[Callable], Callable] = jax.jit,
    workers: int = _WORKERS,
) -> str | None:
    """Returns what is wrong with the kernels of some cases, or None if all are right.

    In threads of their own: the caller may trace a program, of which this is no part.
    """
    with futures.ThreadPoolExecutor(workers) as pool:
        reasons = list(pool.map(lambda case: _why_wrong(case, compiled), cases))
    return next(filter(None, reasons), None)


def _why_wrong(case: Case, compiled: Callable[[Callable], Callable]) -> str | None:
    try:
        try:
            found, expected = _results(case, compiled)
        except Exception as error:  # a busy machine may fail to start a compiler
            if EXHAUSTED in str(error):
                raise
            time.sleep(_PAUSE_S)
            found, expected = _results(case, compiled)
    except Exception as error:  # of any kind: the caller gets it as a reason
        is_full = EXHAUSTED in str(error)
        return NO_MEMORY if is_full else f"{case.name} does not run: {one_line(error)}"
    reason = why_off(found, expected, case.noise)
    return None if reason is None else f"{case.name}: {reason}"


def _results(case: Case, compiled: Callable[[Callable], Callable]) -> tuple[Any, Any]:
    """Returns the results of a case's kernel and of its reference."""
    operands = jax.tree.map(jnp.asarray, case.draw())
    expected = jax.jit(case.reference, compiler_options=_QUICK)(*operands)
    found = compiled(case.kernel)(*operands)
    return jax.block_until_ready((found, expected))


def why_off(found: PyTree, expected: PyTree, noise: float = NOISE) -> str | None:
    """Returns where results are not those of the reference, or None.

    Of the amaxes of parts the largest counts.
    """
    found, expected = (_with_names(x) for x in (found, expected))
    if found.keys() != expected.keys():
        return f"returns {sorted(found)}, not {sorted(expected)}"
    with np.errstate(all="ignore"):  # what is not finite is compared like the rest
        reasons = (_why_array_off(n, x, expected[n], noise) for n, x in found.items())
        return next(filter(None, reasons), None)


def _with_names(results: PyTree) -> dict[str, np.ndarray]:
    """Returns arrays by their place among the results."""

    def whole(x: Any) -> Any:
        if not isinstance(x, Written) or x.amaxes is None:
            return x
        return x._replace(amaxes=np.max(x.amaxes))

    results = jax.tree.map(whole, results, is_leaf=lambda x: isinstance(x, Written))
    named, _ = jax.tree_util.tree_flatten_with_path(results)
    return {f"result{jax.tree_util.keystr(at)}": np.asarray(x) for at, x in named}


def _why_array_off(name: str, x: np.ndarray, y: np.ndarray, noise: float) -> str | None:
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return f"{name} is {x.dtype}{list(x.shape)}, not {y.dtype}{list(y.shape)}"
    is_float = jnp.issubdtype(y.dtype, jnp.floating)
    found, expected = (v.astype(np.float64 if is_float else np.int64) for v in (x, y))
    allowed = _allowed(expected, y.dtype, noise)
    is_same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    is_right = is_same | (np.abs(found - expected) <= allowed)
    if not is_right.all():
        at = tuple(map(int, np.argwhere(~is_right)[0]))
        wrong = 1 - is_right.mean()
        return (
            f"{name}{list(at) if at else ''} is {found[at]:.6g}, not "
            f"{expected[at]:.6g}, and {wrong:.1%} of it is wrong"
        )
    if y.dtype.itemsize == 1 and y.dtype != np.uint8 and y.size:
        moved = 1 - is_same.mean()
        if moved > _MOVED_CODES:
            return f"{name}: {moved:.1%} of its codes are the next ones"
    return None


def _allowed(expected: np.ndarray, dtype: np.dtype, noise: float) -> Any:
    """Returns how far each value may be off."""
    if noise == 0 or not jnp.issubdtype(dtype, jnp.floating):
        return 1 if dtype == np.int8 else 0
    finite = np.where(np.isfinite(expected), expected, 0.0)
    rows = finite if finite.ndim else finite[None]
    rms = np.sqrt(np.mean(rows**2, axis=-1, keepdims=True))
    info = jnp.finfo(dtype)
    step = float(info.eps) * np.abs(finite) + float(info.smallest_subnormal)
    return step + noise * rms.reshape(rms.shape if finite.ndim else ())


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Any:
    """Returns normal draws."""
    draw = np.random.default_rng([seed, *shape])
    return draw.standard_normal(shape, np.float32).astype(dtype)


def uneven(*shape: int, seed: int = 0, dtype: Any = BF16) -> Any:
    """Returns rows of 2^-6 to 2^6; the fourth is zero, the last by far the largest."""
    draw = np.random.default_rng([seed, 1])
    sizes = np.exp2(draw.integers(-6, 7, shape[:1])).astype(np.float32)
    sizes[3], sizes[-1] = 0.0, 2.0**9
    rows = normal(*shape, seed=seed)
    return (rows * sizes.reshape(-1, *[1] * (rows.ndim - 1))).astype(dtype)


def scale_in_vector(value: float = 2.0**-4) -> Scale:
    """Returns a scale in a vector whose other entries would make numbers NaN."""
    return Scale(jnp.array([np.nan, value, np.nan], jnp.float32), 1)


def product(seed: int) -> Scaled:
    """Returns a product of which two scales were not applied."""
    return Scaled(
        jnp.asarray(uneven(*SHAPE, seed=seed)),
        (scale_in_vector(0.25), scale_in_vector(4.0)),
        unit=0.5,
    )


def in_fp8(seed: int) -> Scaled:
    """Returns a padded matrix in E4M3."""
    x = fp8.pad(jnp.asarray(normal(*SHAPE, seed=seed, dtype=BF16)))
    x = fp8.quantize(x)
    return Scaled(x.data, (Scale.of(x.scale_inv),))


def outer(seed: int) -> Outer:
    """Returns a product of two vectors that is never written."""
    vectors = (normal(size, seed=seed + i) for i, size in enumerate(SHAPE))
    return Outer(*map(jnp.asarray, vectors))


def vector(seed: int) -> Any:
    """Returns a value for each column."""
    return normal(SHAPE[1], seed=seed)


def by_both(
    name: str,
    draw: Callable[[], tuple],
    run: Callable[..., Any],
    kernels: Any,
    noise: float = NOISE,
) -> Case:
    """Returns a case of functions that the kernels' module and `xla` both have."""
    ours, theirs = (functools.partial(run, provider) for provider in (kernels, xla))
    return Case(name, draw, ours, theirs, noise)
