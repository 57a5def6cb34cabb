"""XLA's compiled programs for Hopper: their FP8 GEMMs and kernels, in the HLO."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from loka_jax import checked, fp8, nn, xla
from loka_jax.ops.device import HOPPER
from tests.support import hopper
from tests.support.recipes import recipe_of

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


def compiled_here(step, *args):
    return jax.jit(step).lower(*args).compile().as_text()


on_this_gpu = pytest.param(compiled_here, marks=pytest.mark.gpu, id="on_gpu")


@pytest.mark.parametrize("compiled", [hopper.compiled, on_this_gpu])
@pytest.mark.parametrize("recipe", PRODUCTS)
def test_fp8_operands_reach_the_gemms_of_a_dense(recipe, compiled):
    step, args = gradients_of(nn.Dense(256, recipe=recipe_of(recipe), use_bias=False))
    assert counts(compiled(step, *args)) == PRODUCTS[recipe]


def test_blockwise_products_keep_their_rounding():
    step, args = gradients_of(nn.Dense(256, recipe="fp8_blockwise", use_bias=False))
    hlo = hopper.compiled(step, *args)
    assert counts(hlo) == (0, 3)
    # lhs and rhs of fwd, g and rhs of dlhs, lhs and g of drhs: all contract their last
    # dim, and XLA may store them by tiles.
    casts = set(re.findall(r" = f8e4m3fn\[([\d,]+)\]\S* convert\(", hlo))
    sizes = [math.prod(map(int, shape.split(","))) for shape in casts]
    assert {4096 * 512, 256 * 512, 4096 * 256} <= set(sizes), casts


def test_mx_products_are_multiplied_in_fp8_on_blackwell_alone():
    layer = nn.Dense(256, recipe="mxfp8", use_bias=False)
    step, args = gradients_of(layer)
    on_blackwell = hopper.compiled(step, *args, target="b200")
    by_blocks = 'custom_call_target="__cudnn$blockScaledDot"'
    assert on_blackwell.count(by_blocks) == 3 and counts(on_blackwell) == (0, 0)
    assert counts(hopper.compiled(step, *args)) == (0, 3)


def test_the_weights_gradient_reads_looked_up_rows_as_they_lie():
    layer = nn.Dense(256, recipe="fp8_rowwise", use_bias=False)

    def loss(variables, table, ids, x):
        rows = jnp.concatenate([x, table[ids].reshape(len(ids), -1)], axis=1)
        return jnp.sum(layer.apply(variables, rows.astype(jnp.bfloat16)) ** 2)

    table, ids = jax.ShapeDtypeStruct((4096, 128), jnp.float32), (8192, 26)
    x = jax.ShapeDtypeStruct((ids[0], 256), jnp.float32)
    rows = jax.ShapeDtypeStruct((ids[0], 256 + 26 * 128), jnp.bfloat16)
    variables = jax.eval_shape(layer.init, jax.random.key(0), rows)
    ids = jax.ShapeDtypeStruct(ids, jnp.int32)
    hlo = hopper.compiled(jax.grad(loss), variables, table, ids, x)
    entry = hlo[hlo.index("\nENTRY ") :]
    # One copy of the rows, which is transposed while it is cast.
    assert entry.count(" = bf16[8192,3584]") == 1
    assert " = bf16[3584,8192]" not in entry
    assert " = f8e4m3fn[3584,8192]" in entry


@pytest.mark.parametrize(
    "first, has_bias", [(fp8.E4M3, True), (fp8.E4M3, False), (fp8.E5M2, True)]
)
def test_a_product_writes_its_result_in_fp8_itself(first, has_bias):
    def run(lhs, rhs, factor, bias):
        options = dict(out_dtype=first, has_relu=has_bias, fast_accumulation=True)
        bias = bias if has_bias else None
        return xla.fp8_product_to_fp8(lhs, rhs, factor, bias, **options)

    lhs = jax.ShapeDtypeStruct((4096, 512), first)
    rhs = jax.ShapeDtypeStruct((1024, 512), fp8.E4M3)
    factor = jax.ShapeDtypeStruct((), jnp.float32)
    bias = jax.ShapeDtypeStruct((1024,), jnp.float32)
    hlo = hopper.compiled(run, lhs, rhs, factor, bias)
    assert counts(hlo) == (1, 0)
    assert len(hopper.kernels(hlo)) == 1 + has_bias  # the bias is cast to bfloat16


@pytest.mark.parametrize(
    "recipe, use_bias", [("bf16", False), ("fp8_tensorwise_delayed", True)]
)
def test_attention_reads_and_writes_columns_where_products_have_them(
    recipe, use_bias, monkeypatch
):
    monkeypatch.setattr(checked, "why_wrong", lambda *families: None)
    rows, width = 1024, 4 * 2 * 64  # U, V, Q and K
    how = dict(max_length=256, recipe=recipe, use_bias=use_bias)
    layer = nn.HstuLayer(2, 64, 64, implementation="group", **how)

    def step(variables, x, offsets, g):
        with nn.site_context(device=HOPPER, scales_initialized=True):
            layer_of = lambda *args: layer.apply(*args, offsets)  # noqa: E731
            out, pull = jax.vjp(layer_of, variables, x)
            return out, pull(g)

    x = jax.ShapeDtypeStruct((rows, 128), jnp.bfloat16)
    offsets = jax.ShapeDtypeStruct((9,), jnp.int32)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x, offsets)
    hlo = hopper.compiled(step, variables, x, offsets, x)
    entry = hlo[hlo.index("\nENTRY ") :]
    lines = dict(re.findall(r"\n  (?:ROOT )?%([\w.\-]+) = (.*?), metadata", entry))
    wide, kernel = f"bf16[{rows},{width}]", 'custom_call_target="mosaic_gpu_v2"'
    launches = [line for line in lines.values() if kernel in line]
    names = {x for line in launches for x in re.findall(r"%([\w.\-]+)", line)}
    read = [lines[x] for x in names if lines.get(x, "").startswith(wide)]
    # The product's result, and where the gradient of q is written, then of k and v.
    targets = 'custom_call_target="AllocateBuffer"', kernel
    (product,) = (x for x in read if not any(target in x for target in targets))
    assert re.search(r" get-tuple-element\(%cublas|calls=%gemm_fusion", product)
    assert len(launches) == len(read) == 3
    # Nothing else has its size but what writes the gradient of U into it.
    used = *launches, *read
    others = [x for x in lines if wide in lines[x] and lines[x] not in used]
    (of_u,) = (x for x in others if "gemm" not in x)
    assert "dynamic_update_slice" in of_u
