"""XLA's products: in FP8 by themselves, padded, and what is asked of CUDA.

Of every recipe they are tested with the site's, in tests/unit/ops.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import fp8, xla
from loka_jax.recipe import Cast, GemmRecipe
from tests import support
from tests.support import pallas as rounding

F32, BF16 = jnp.float32, jnp.bfloat16
HALF_ULP = 2.0**-8  # of bfloat16


def quantized(m, k, seed=0):
    """Returns rows of different sizes in FP8."""
    return fp8.quantize(support.uneven_rows(m, k, decades=2, seed=seed))


def test_sizes_that_are_no_multiples_of_16_are_padded_where_casts_allow():
    cast, tiles = Cast(), Cast(granularity="blockwise")
    padded = functools.partial(xla.is_padded, GemmRecipe(first=cast, second=cast))
    assert not padded(16, 32, 48)
    assert padded(17, 32, 48) and padded(16, 33, 48) and padded(16, 32, 47)
    assert not xla.is_padded(GemmRecipe(first=tiles, second=tiles), 17, 33, 47)


@pytest.mark.parametrize(
    "out_dtype, has_bias, has_relu",
    [(fp8.E4M3, True, True), (fp8.E5M2, False, False), (fp8.E4M3, False, True)],
)
def test_products_leave_in_fp8_saturated(out_dtype, has_bias, has_relu):
    lhs, rhs = quantized(32, 64).data, quantized(48, 64, seed=1).data
    bias = np.random.default_rng(2).standard_normal(48, np.float32)
    bias = jnp.asarray(1000 * bias) if has_bias else None
    factor = jnp.float32(2.0**-3 if out_dtype == fp8.E4M3 else 2.0**4)
    static = dict(out_dtype=out_dtype, has_relu=has_relu)
    run = jax.jit(functools.partial(xla.fp8_product_to_fp8, **static))
    out = run(lhs, rhs, factor, bias)
    exact = np.asarray(lhs, np.float64) @ np.asarray(rhs, np.float64).T
    largest = np.abs(exact).max()
    exact = exact if bias is None else exact + np.asarray(bias)
    exact = float(factor) * (np.maximum(exact, 0) if has_relu else exact)
    limit = float(jnp.finfo(out_dtype).max)
    assert out.dtype == out_dtype and np.abs(exact).max() > limit  # some saturate
    # With a bias, three roundings to bfloat16 before the last; a sum loses digits.
    error = 4 * HALF_ULP * largest * float(factor) if has_bias else 1e-6 * largest
    rounding.assert_fp8(out, 1.0, exact, error=error)


@pytest.mark.parametrize("fast", [False, True])
def test_on_cuda_the_dot_is_pinned_to_an_fp8_engine(fast):
    static = dict(out_dtype=BF16, fast_accumulation=fast)
    matmul = jax.jit(functools.partial(xla.fp8_matmul, **static))
    traced = matmul.trace(quantized(32, 64), quantized(16, 64))
    lowered = traced.lower(lowering_platforms=("cuda",))
    (dot,) = [x for x in lowered.as_text().splitlines() if "dot_general" in x]
    assert f"allow_imprecise_accumulation = {str(fast).lower()}" in dot
    assert "(tensor<32x64xf8E4M3FN>, tensor<16x64xf8E4M3FN>)" in dot


@pytest.mark.parametrize(
    "sizes, reason",
    [
        ((16, 32, 48), None),
        ((16, 40, 48), "k=40 is too far below a multiple of 16"),
        ((16, 32, 1), "n=1 is too far below a multiple of 16"),
        ((241, 241, 226), None),  # 15 of 241, and 14 of 226
        ((240, 32, 225), "n=225 is too far below a multiple of 16"),
        ((16, 0, 48), "k=0"),
    ],
)
def test_why_not_names_the_first_size_that_fp8_cannot_take(sizes, reason):
    assert xla.why_not(*sizes) == reason


def test_high_precision_is_asked_for_on_a_gpu():
    lhs, rhs = support.normal(32, 1024), support.normal(16, 1024, seed=1)
    static = dict(compute_dtype=F32, out_dtype=F32)
    matmul = jax.jit(functools.partial(xla.high_precision_matmul, **static))
    support.assert_is_product(matmul(lhs, rhs), lhs, rhs)
    assert "precision = [HIGHEST, HIGHEST]" in matmul.lower(lhs, rhs).as_text()
