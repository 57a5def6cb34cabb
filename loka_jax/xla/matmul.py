"""Two-dimensional products by XLA: FP8 on the cuBLASLt engine, and high precision.

Hopper's FP8 tensor cores want both operands K-major, so the FP8 product takes them as
lhs (M, K) and rhs (N, K), both contracting their last dim:

    out[m, n] = sum_k lhs[m, k] * rhs[n, k]

On CUDA an FP8 algorithm preset pins the dot to cuBLASLt; without it XLA's autotuner
chooses the engine and may choose a bfloat16 one. Other platforms have no presets; there
the same call is an exact float32 product of the decoded values: CPU runs emulate the
GPU's numerics up to the order of summation.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax.fp8 import SIZE_MULTIPLE, Fp8Array, fp8_max, pad_to, padded_size
from loka_jax.recipe import MX_BLOCK, GemmRecipe

# Both operands contract their last dim.
_K_MAJOR = (((1,), (1,)), ((), ()))
# The largest share of padding in a size: more costs what FP8 gains.
_MOST_PADDING = 1 / 16


def why_not(m: int, k: int, n: int) -> str | None:
    """Returns why an (m, k) x (k, n) product does not run in FP8, or None if it does.

    Sizes that are no multiple of 16 are padded with zeros, where these are few.

    In the role's own terms: for drhs, m is the site's K and k its batch.
    """
    for name, size in (("m", m), ("k", k), ("n", n)):
        if jax.export.is_symbolic_dim(size):
            continue  # such a batch is padded to what it needs
        if size == 0:
            return f"{name}=0"
        if padded_size(size) - size > _MOST_PADDING * size:
            return f"{name}={size} is too far below a multiple of {SIZE_MULTIPLE}"
    return None


def is_padded(gemm: GemmRecipe, m: int, k: int, n: int) -> bool:
    """Returns True if operands of an FP8 product are padded."""
    sizes = (size for size in (m, k, n) if not jax.export.is_symbolic_dim(size))
    return not gemm.is_tiled and any(size % SIZE_MULTIPLE for size in sizes)


def describe(gemm: GemmRecipe | None, compute_dtype: DTypeLike) -> str:
    """Returns a short description of a role's product: provider, formats, granularity.

    A property that both operands share is named once.
    """
    if gemm is None:
        return f"xla {_name(compute_dtype)}"
    casts = (gemm.first, gemm.second)
    formats = " x ".join(dict.fromkeys(_name(c.dtype) for c in casts))
    granularity = " x ".join(dict.fromkeys(c.granularity for c in casts))
    if gemm.is_tiled:
        return f"xla bf16 on {formats} {granularity} operands"
    return f"xla fp8 {formats} {granularity}"


def fp8_matmul(
    lhs: Fp8Array,
    rhs: Fp8Array,
    *,
    out_dtype: DTypeLike,
    fast_accumulation: bool = False,
) -> Float[Array, "m n"]:
    """Returns `dequantize(lhs) @ dequantize(rhs).T`, multiplied in FP8.

    Args:
        lhs: (m, k), one scale, one per row `[m, 1]`, or tiles along k.
        rhs: (n, k), likewise.
        out_dtype: of the result. In bfloat16 the product is written once in bfloat16
            and scaled in the next fusion, which is exact with power-of-two scales. In
            float16 it is scaled in float32, as its unscaled form may be out of range.
        fast_accumulation: accept the tensor core's low-precision sums over all of k.

    XLA has no FP8 product of tiled operands on Hopper. They are multiplied in bfloat16
    after dequantization, which is exact with power-of-two scales: the numerics of a
    block-scaled FP8 GEMM at the speed of a bfloat16 one. Operands in an MX format go to
    `jax.nn.scaled_matmul`, which does the same but on Blackwell.
    """
    if lhs.tile == rhs.tile == (1, MX_BLOCK):
        return _mx_matmul(lhs, rhs, out_dtype)
    if lhs.tile is not None or rhs.tile is not None:
        operands = (lhs.dequantize(jnp.bfloat16), rhs.dequantize(jnp.bfloat16))
        return _dot(*operands, out_dtype, precision=None)
    is_float16 = jnp.dtype(out_dtype) == jnp.float16
    out = fp8_product(
        lhs.data,
        rhs.data,
        out_dtype=jnp.float32 if is_float16 else out_dtype,
        fast_accumulation=fast_accumulation,
    )
    out = jax.lax.platform_dependent(
        out.astype(jnp.float32),
        lhs.scale_inv,
        rhs.scale_inv.T,
        cuda=_scaled,
        default=_scaled_in_range,
    )
    return out.astype(out_dtype)


def _mx_matmul(lhs: Fp8Array, rhs: Fp8Array, out_dtype: DTypeLike) -> Array:
    def operand(x: Fp8Array) -> tuple[Array, Array]:
        rows, k = x.data.shape
        data = pad_to(x.data, (rows, k + -k % MX_BLOCK))
        return data[None], x.scale_inv.astype(jnp.float8_e8m0fnu)[None]

    (first, first_scales), (second, second_scales) = operand(lhs), operand(rhs)
    out = jax.nn.scaled_matmul(
        first, second, first_scales, second_scales, preferred_element_type=out_dtype
    )
    return out[0]


def _scaled(out, lhs_scale_inv, rhs_scale_inv):
    # Two multiplications, not one by the product, which could leave float32's range.
    return out * lhs_scale_inv * rhs_scale_inv


def _scaled_in_range(out, lhs_scale_inv, rhs_scale_inv):
    """Returns `_scaled`, infinite only where the result is.

    The same with power-of-two scales. On GPUs it would be another program.
    """
    smaller = jnp.minimum(lhs_scale_inv, rhs_scale_inv)
    return out * smaller * jnp.maximum(lhs_scale_inv, rhs_scale_inv)


def fp8_product(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "n _"],
    *,
    out_dtype: DTypeLike,
    fast_accumulation: bool = False,
) -> Float[Array, "m n"]:
    """Returns the unscaled product `lhs @ rhs.T`; the caller applies the scales.

    Sizes that are no multiple of 16 are padded with zeros, and the result is cut. One
    operand may have been padded along k already. The padding of drhs, whose k are the
    rows of a batch, joins the copies that transpose its operands.
    """
    (m, k), n = lhs.shape, rhs.shape[0]
    k = padded_size(k)
    assert k == padded_size(rhs.shape[1]), (lhs.shape, rhs.shape)
    out = jax.lax.platform_dependent(
        pad_to(lhs, (padded_size(m), k)),
        pad_to(rhs, (padded_size(n), k)),
        cuda=lambda a, b: _dot(a, b, out_dtype, precision=_preset(fast_accumulation)),
        default=lambda a, b: _dot(a, b, out_dtype, precision=None),
    )
    return cut(out, (m, n))


def cut(x: Float[Array, "p q"], shape: tuple[int, int]) -> Float[Array, "r c"]:
    """Returns the first rows and columns of a padded matrix."""
    return x if x.shape == shape else x[: shape[0], : shape[1]]


def fp8_product_to_fp8(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "n k"],
    factor: float | Float[Array, ""],
    bias: Float[Array, "n"] | None = None,
    *,
    out_dtype: DTypeLike,
    has_relu: bool = False,
    fast_accumulation: bool = False,
) -> Float[Array, "m n"]:
    """Returns `factor * relu(lhs @ rhs.T + bias)` in FP8, saturated.

    XLA makes all of it part of cuBLASLt's product. That takes one factor and one clip,
    and with a bias bfloat16 throughout.

    Args:
        bias: in units of the unscaled product; None if absent.
    """
    dtype = jnp.float32 if bias is None else jnp.bfloat16
    options = dict(out_dtype=dtype, fast_accumulation=fast_accumulation)
    out = fp8_product(lhs, rhs, **options)
    if bias is not None:
        out = out + bias.astype(dtype)[None, :]
    if has_relu:
        out = jax.nn.relu(out)
    limit = jnp.asarray(fp8_max(out_dtype), dtype)
    out = out * jnp.asarray(factor, jnp.float32).astype(dtype)
    return jnp.clip(out, -limit, limit).astype(out_dtype)


def high_precision_matmul(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "n k"],
    *,
    compute_dtype: DTypeLike,
    out_dtype: DTypeLike,
) -> Float[Array, "m n"]:
    """Returns `lhs @ rhs.T`, operands in `compute_dtype`, summed in float32.

    Products in float32 request full precision; by default GPUs would use TF32.
    """
    operands = (lhs.astype(compute_dtype), rhs.astype(compute_dtype))
    is_f32 = jnp.dtype(compute_dtype) == jnp.float32
    precision = jax.lax.Precision.HIGHEST if is_f32 else None
    return _dot(*operands, out_dtype, precision=precision)


_NAMES = {
    jnp.dtype(jnp.float32): "f32",
    jnp.dtype(jnp.bfloat16): "bf16",
    jnp.dtype(jnp.float8_e4m3fn): "e4m3",
    jnp.dtype(jnp.float8_e5m2): "e5m2",
}


def _name(dtype: DTypeLike) -> str:
    return _NAMES.get(jnp.dtype(dtype), jnp.dtype(dtype).name)


def _preset(fast_accumulation: bool) -> jax.lax.DotAlgorithmPreset:
    presets = jax.lax.DotAlgorithmPreset
    if fast_accumulation:
        return presets.ANY_F8_ANY_F8_F32_FAST_ACCUM
    return presets.ANY_F8_ANY_F8_F32


def _dot(lhs, rhs, out_dtype, *, precision):
    dot = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=_K_MAJOR,
        precision=precision,
        preferred_element_type=out_dtype,
    )
    if lhs.dtype != jnp.bfloat16 or jnp.dtype(out_dtype) != jnp.float32:
        return dot(lhs, rhs)
    return jax.lax.platform_dependent(
        lhs, rhs, cpu=_in_float32_if_mapped(dot), default=dot
    )


def _in_float32_if_mapped(dot: Callable[..., Array]) -> Callable[..., Array]:
    """Returns the product for CPUs, where XLA lacks some batched ones of bfloat16."""
    product = jax.custom_batching.custom_vmap(dot)

    @product.def_vmap
    def mapped(size, is_mapped, lhs, rhs):
        del size
        axes = tuple(0 if each else None for each in is_mapped)
        wide = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
        return jax.vmap(dot, axes)(*wide), True

    return product
