"""`fp8_matmul` against numpy in float64, interpreted and on a GPU."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import fp8
from loka_jax.fp8 import E4M3, E5M2
from loka_jax.triton.matmul import fp8_matmul
from tests import support
from tests.support.triton import anywhere, interpreted, on_gpu, skip_without_triton

__all__ = ["anywhere", "interpreted", "on_gpu"]

skip_without_triton()

anywhere_ = pytest.mark.usefixtures("anywhere")
FORMATS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]
# Which elements of lhs and rhs share a scale: all, rows, or tiles.
ROWS, TILES = ("rows", "rows"), ((1, 128), (128, 128))
# Every granularity, and every format with rows and tiles.
FORMATS_AND_GRANULARITIES = [
    (FORMATS[0], ((), ())),
    (FORMATS[0], ROWS),
    (FORMATS[1], ("rows", ())),
    (FORMATS[2], ((), "rows")),
    (FORMATS[1], TILES),
    (FORMATS[2], ((128, 128), (1, 128))),
]


def _quantized(rows, k, dtype, granularity, seed):
    """Returns rows of different sizes, in parts along K of different sizes."""
    x = support.normal(rows, k, seed=seed)
    sizes = np.random.default_rng(seed + 9).uniform(-2, 2, (rows, math.ceil(k / 128)))
    x = x * jnp.asarray(10.0 ** np.repeat(sizes, 128, 1)[:, :k], jnp.float32)
    if granularity in ((), "rows"):
        return fp8.quantize(x, dtype, axes=(1,) if granularity else None)
    return fp8.quantize_tiles(x, dtype, tile=granularity)


def operands_of(m, k, n, formats=FORMATS[0], granularities=ROWS):
    """Returns lhs and rhs in FP8."""
    (lhs, rhs), (by_lhs, by_rhs) = formats, granularities
    return _quantized(m, k, lhs, by_lhs, 0), _quantized(n, k, rhs, by_rhs, 1)


def error_of(out, lhs, rhs):
    """Returns the relative L2 norm of the error, each element in its natural unit.

    The unit is the sum of the magnitudes of its products over the root of their number,
    so that a wrong scale of small rows shows as much as one of large rows.
    """
    a, b = (np.asarray(x.dequantize(), np.float64) for x in (lhs, rhs))
    unit = np.abs(a) @ np.abs(b).T / math.sqrt(a.shape[1])
    ref = a @ b.T / unit
    error = np.asarray(out, np.float64) / unit - ref
    return np.linalg.norm(error) / np.linalg.norm(ref)


def limit_of(out_dtype, fast=False):
    """Returns the expected error of a correct kernel."""
    rounding = 2.5e-3 if out_dtype == jnp.bfloat16 else 1e-6
    if jax.default_backend() == "cpu":
        return rounding
    # The tensor core's sums keep about 13 bits.
    return rounding + (2e-3 if fast else 5e-4)


def check(sizes, *formats_and_granularities, out_dtype=jnp.float32, fast=False):
    """Checks a product of operands of these sizes."""
    lhs, rhs = operands_of(*sizes, *formats_and_granularities)
    out = fp8_matmul(lhs, rhs, out_dtype=out_dtype, fast_accumulation=fast)
    assert out.dtype == out_dtype
    assert error_of(out, lhs, rhs) < limit_of(out_dtype, fast)


@anywhere_
@pytest.mark.parametrize("formats, granularities", FORMATS_AND_GRANULARITIES)
def test_products_of_the_dequantized_operands(formats, granularities):
    check((100, 208, 48), formats, granularities)


# Single elements, whole and odd tiles, and groups of tiles.
@anywhere_
@pytest.mark.parametrize(
    "sizes, granularities, fast, out_dtype",
    [
        ((1, 16, 1), ROWS, False, jnp.float32),
        ((65, 272, 130), ROWS, True, jnp.float32),
        ((65, 272, 130), TILES, False, jnp.bfloat16),
        ((600, 32, 17), ROWS, False, jnp.bfloat16),
    ],
)
def test_sizes_accumulation_and_result_types(sizes, granularities, fast, out_dtype):
    check(sizes, FORMATS[1], granularities, out_dtype=out_dtype, fast=fast)


@anywhere_
def test_nan_stays_in_its_row():
    lhs, rhs = operands_of(70, 208, 48)
    lhs = lhs.replace(data=lhs.data.at[3, 200].set(jnp.nan))
    out = fp8_matmul(lhs, rhs, out_dtype=jnp.bfloat16)
    faulty = np.isnan(np.asarray(out, np.float32))
    assert faulty[3].all() and not np.delete(faulty, 3, 0).any()
