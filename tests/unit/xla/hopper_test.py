"""XLA's compiled programs for Hopper: their FP8 GEMMs and kernels, in the HLO."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen

from loka_jax import fp8, nn, quality, xla
from tests import support
from tests.support import hopper

# Recipe -> FP8 GEMMs and other products of a Dense, forward and backward.
PRODUCTS = {
    "fp8_tensorwise": (3, 0),
    "fp8_tensorwise_delayed": (3, 0),
    "fp8_tensorwise_delayed:initialized": (3, 0),
    "fp8_tensorwise_delayed_bf16_drhs": (2, 1),
    "fp8_rowwise": (3, 0),
    "fp8_rowwise_bf16_drhs": (2, 1),
    "bf16": (0, 3),
}
X = jax.ShapeDtypeStruct((4096, 512), jnp.bfloat16)


def gradients_of(layer):
    """Returns the gradients of a layer, which need all its products, and arguments."""

    def gradients(variables, x, g):
        out, vjp = jax.vjp(layer.apply, variables, x)
        return out, vjp(g)

    variables = jax.eval_shape(layer.init, jax.random.key(0), X)
    g = jax.ShapeDtypeStruct((X.shape[0], layer.features), jnp.bfloat16)
    return gradients, (variables, X, g)


def counts(hlo):
    return hopper.fp8_gemms(hlo), hopper.other_gemms(hlo)


@pytest.mark.parametrize("recipe", PRODUCTS)
def test_fp8_operands_reach_the_gemms_of_a_dense(recipe):
    step, args = gradients_of(nn.Dense(256, recipe=recipe, use_bias=False))
    assert counts(hopper.compiled(step, *args)) == PRODUCTS[recipe]


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", PRODUCTS)
def test_fp8_operands_reach_the_gemms_of_a_dense_on_this_gpu(recipe):
    step, args = gradients_of(nn.Dense(256, recipe=recipe, use_bias=False))
    hlo = jax.jit(step).lower(*args).compile().as_text()
    assert counts(hlo) == PRODUCTS[recipe]


@pytest.mark.parametrize("recipe", ["fp8_tensorwise_delayed", "fp8_rowwise"])
def test_fp8_operands_reach_the_gemms_of_a_flax_dense(recipe):
    product = functools.partial(nn.Fp8DotGeneral, recipe=recipe)
    layer = linen.Dense(
        256, dtype=jnp.bfloat16, use_bias=False, dot_general_cls=product
    )
    step, args = gradients_of(layer)
    assert counts(hopper.compiled(step, *args)) == (3, 0)


def test_sizes_that_fp8_cannot_take_run_in_bf16():
    step, args = gradients_of(nn.Dense(100, recipe="fp8_rowwise", use_bias=False))
    assert counts(hopper.compiled(step, *args)) == (0, 3)


# Fake quantization.


def test_blockwise_products_keep_their_rounding():
    step, args = gradients_of(nn.Dense(256, recipe="fp8_blockwise", use_bias=False))
    hlo = hopper.compiled(step, *args)
    assert counts(hlo) == (0, 3)
    # lhs and rhs of fwd, g and rhs of dlhs, lhs and g of drhs: all contract their last
    # dim, and XLA may store them by tiles.
    casts = set(re.findall(r" = f8e4m3fn\[([\d,]+)\]\S* convert\(", hlo))
    sizes = [math.prod(map(int, shape.split(","))) for shape in casts]
    assert {4096 * 512, 256 * 512, 4096 * 256} <= set(sizes), casts


@pytest.mark.parametrize(
    "measure", [quality.sqnr, quality.worst_slice_sqnr, quality.relative_l2]
)
def test_measures_of_a_dequantized_array_see_its_rounding(measure):
    error = lambda x: measure(x, fp8.quantize(x).dequantize())  # noqa: E731
    assert "f8e4m3fn" in hopper.compiled(error, support.normal(256, 512))


def test_without_a_barrier_xla_removes_the_rounding():
    # If this fails, XLA has changed and `Fp8Array.dequantize` may be simplified.
    error = lambda x: jnp.sum((x - x.astype(fp8.E4M3).astype(jnp.float32)) ** 2)  # noqa: E731
    assert "f8e4m3fn" not in hopper.compiled(error, support.normal(256, 512))


# Kernels.


class Tower(linen.Module):
    """Four dense layers with LayerNorm and relu, and a head."""

    dense: type | functools.partial

    @linen.compact
    def __call__(self, x):
        for features in (512, 512, 256, 128):
            x = self.dense(features, use_bias=False)(x)
            x = jax.nn.relu(nn.normalize(x, "layer", train=False))
        return linen.Dense(1, dtype=jnp.bfloat16, use_bias=False)(x)


def kernels_of_a_step(dense):
    """Returns how many kernels a training step of the tower launches."""
    tower = Tower(dense)
    x = jax.ShapeDtypeStruct((8192, 512), jnp.bfloat16)
    variables = jax.eval_shape(tower.init, jax.random.key(0), x)

    def step(variables, x):
        loss = lambda v: jnp.mean(tower.apply(v, x).astype(jnp.float32) ** 2)  # noqa: E731
        gradients = jax.grad(loss)(variables)
        params = jax.tree.map(
            lambda p, g: p - 0.01 * g, variables["params"], gradients["params"]
        )
        return gradients | {"params": params}

    return len(hopper.kernels(hopper.compiled(step, variables, x)))


@pytest.fixture(scope="module")
def kernels_in_bf16():
    return kernels_of_a_step(functools.partial(nn.Dense, recipe="bf16"))


@pytest.mark.parametrize(
    "recipe, most",
    [
        ("fp8_tensorwise_delayed_bf16_drhs:initialized", 3.25),
        ("fp8_tensorwise_delayed:initialized", 5.5),
    ],
)
def test_kernels_added_by_an_fp8_dense(kernels_in_bf16, recipe, most):
    fp8_kernels = kernels_of_a_step(functools.partial(nn.Dense, recipe=recipe))
    assert (fp8_kernels - kernels_in_bf16) / 4 <= most


def test_kernels_added_by_flax(kernels_in_bf16):
    # The baseline of the counts above.
    flax_dense = functools.partial(
        linen.Dense, dtype=jnp.bfloat16, dot_general_cls=linen.Fp8DirectDotGeneralOp
    )
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        flax_kernels = kernels_of_a_step(flax_dense)
    assert (flax_kernels - kernels_in_bf16) / 4 > 12


@pytest.mark.parametrize("first, out", [(fp8.E4M3, fp8.E4M3), (fp8.E5M2, fp8.E5M2)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_product_writes_its_result_in_fp8_itself(first, out, has_bias):
    def run(lhs, rhs, factor, bias):
        options = dict(out_dtype=out, has_relu=has_bias, fast_accumulation=True)
        bias = bias if has_bias else None
        return xla.fp8_product_to_fp8(lhs, rhs, factor, bias, **options)

    lhs = jax.ShapeDtypeStruct((4096, 512), first)
    rhs = jax.ShapeDtypeStruct((1024, 512), fp8.E4M3)
    factor = jax.ShapeDtypeStruct((), jnp.float32)
    bias = jax.ShapeDtypeStruct((1024,), jnp.float32)
    hlo = hopper.compiled(run, lhs, rhs, factor, bias)
    assert counts(hlo) == (1, 0)
    assert len(hopper.kernels(hlo)) == 1 + has_bias  # the bias is cast to bfloat16
