import functools

import jax
import jax.numpy as jnp
import pytest

from loka_jax import fp8, xla
from loka_jax.recipe import Cast, GemmRecipe
from tests import support


def quantized(granularity, m, k, dtype=fp8.E4M3, seed=0):
    x = support.normal(m, k, seed=seed) * 10.0 ** support.normal(m, 1, seed=seed + 9)
    if granularity == "blockwise":
        return fp8.quantize_tiles(x, dtype, tile=(1, 128))
    return fp8.quantize(x, dtype, axes=(1,) if granularity == "rowwise" else None)


@pytest.mark.parametrize("lhs_dtype", [fp8.E4M3, fp8.E5M2])
@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise", "blockwise"])
def test_fp8_matmul_is_the_product_of_the_dequantized_operands(granularity, lhs_dtype):
    lhs = quantized(granularity, 32, 272, lhs_dtype)
    rhs = quantized(granularity, 48, 272, seed=1)
    out = xla.fp8_matmul(lhs, rhs, out_dtype=jnp.float32)
    support.assert_is_product(out, lhs.dequantize(), rhs.dequantize())


def test_operands_may_have_different_granularity():
    lhs = quantized("rowwise", 32, 64)
    rhs = quantized("tensorwise", 16, 64, seed=1)
    out = xla.fp8_matmul(lhs, rhs, out_dtype=jnp.float32)
    support.assert_is_product(out, lhs.dequantize(), rhs.dequantize())


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise", "blockwise"])
def test_bfloat16_results_are_rounded_once(granularity):
    lhs, rhs = quantized(granularity, 32, 128), quantized(granularity, 16, 128, seed=1)
    out = xla.fp8_matmul(lhs, rhs, out_dtype=jnp.bfloat16)
    half_ulp = 2.0**-8
    support.assert_is_product(out, lhs.dequantize(), rhs.dequantize(), half_ulp)


@pytest.mark.parametrize("fast", [False, True])
def test_on_cuda_the_dot_is_pinned_to_an_fp8_engine(fast):
    def matmul(lhs, rhs):
        lhs, rhs = fp8.quantize(lhs), fp8.quantize(rhs)
        return xla.fp8_matmul(lhs, rhs, out_dtype=jnp.bfloat16, fast_accumulation=fast)

    traced = jax.jit(matmul).trace(jnp.ones((32, 64)), jnp.ones((16, 64)))
    lowered = traced.lower(lowering_platforms=("cuda",))
    (dot,) = [x for x in lowered.as_text().splitlines() if "dot_general" in x]
    assert f"allow_imprecise_accumulation = {str(fast).lower()}" in dot
    assert "(tensor<32x64xf8E4M3FN>, tensor<16x64xf8E4M3FN>)" in dot


@pytest.mark.parametrize(
    "sizes, reason",
    [
        ((16, 32, 48), None),
        ((17, 32, 48), "m=17 is too far below a multiple of 16"),
        ((16, 40, 48), "k=40 is too far below a multiple of 16"),
        ((16, 32, 1), "n=1 is too far below a multiple of 16"),
        ((0, 32, 48), "m=0"),
    ],
)
def test_why_not_names_the_first_size_that_fp8_cannot_take(sizes, reason):
    assert xla.why_not(*sizes) == reason


@pytest.mark.parametrize(
    "gemm, text",
    [
        (None, "xla bf16"),
        (GemmRecipe(first=Cast(), second=Cast()), "xla fp8 e4m3 tensorwise"),
        (
            GemmRecipe(
                first=Cast(dtype=fp8.E5M2, granularity="rowwise"), second=Cast()
            ),
            "xla fp8 e5m2 x e4m3 rowwise x tensorwise",
        ),
        (
            GemmRecipe(
                first=Cast(granularity="blockwise"),
                second=Cast(granularity="blockwise"),
            ),
            "xla bf16 on e4m3 blockwise operands",
        ),
    ],
)
def test_describe_says_what_runs(gemm, text):
    assert xla.describe(gemm, jnp.bfloat16) == text


def test_float32_means_float32():
    lhs, rhs = support.normal(32, 256), support.normal(16, 256, seed=1)
    matmul = functools.partial(
        xla.high_precision_matmul, compute_dtype=jnp.float32, out_dtype=jnp.float32
    )
    support.assert_is_product(matmul(lhs, rhs), lhs, rhs)
    assert "precision = [HIGHEST, HIGHEST]" in jax.jit(matmul).lower(lhs, rhs).as_text()


def test_bfloat16_products_are_summed_in_float32():
    lhs, rhs = support.normal(32, 1024), support.normal(16, 1024, seed=1)
    lhs, rhs = lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16)
    out = xla.high_precision_matmul(
        lhs, rhs, compute_dtype=jnp.bfloat16, out_dtype=jnp.float32
    )
    support.assert_is_product(out, lhs, rhs)
