"""Casts and products as a recipe describes them, by arithmetic on float32.

Independent of the library's casts, whose mistakes would otherwise be on both sides of
a comparison. A product of FP8 or bfloat16 values with float32 sums is exact but for the
order of the sums.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax.recipe import BLOCK, Cast, GemmRecipe, Operand
from loka_jax.xla import high_precision_matmul

# Hopper's tensor cores add 32 FP8 products at a time to sums of about 14 bits, cutting
# off the rest. Without fast accumulation these are added in float32 every 128 terms.
_SUM_ERROR, _SUM_TERMS, _EXACT_TERMS = 2.0**-14, 32, 128


class Rounding(NamedTuple):
    """Errors by which values are perturbed, as if a candidate had rounded them.

    Attributes:
        seed: uint32; another seed is another perturbation.
        strength: 1 to perturb, 0 for exact results.
    """

    seed: Array
    strength: Array

    def __call__(self, x: Array, salt: int, error: Array) -> Array:
        """Returns `x` moved by up to `error`, which differs with each `salt`."""
        return x + self.strength * error * self._scatter(x, salt)

    def cut_off(self, x: Array, error: Array) -> Array:
        """Returns `x` moved towards zero by up to `error`."""
        share = 0.5 + 0.5 * self._scatter(x, 0)
        return x - self.strength * error * share * jnp.sign(x)

    def _scatter(self, x: Array, salt: int) -> Array:
        """Returns numbers between -1 and 1 that look random, by a hash of the indices.

        It compiles in a fraction of the time of JAX's generator.
        """
        seed = self.seed + jnp.uint32(salt)
        bits = jnp.full(x.shape, seed * jnp.uint32(0x9E3779B9))
        for axis in range(x.ndim):
            bits = bits ^ jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
            bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
            bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
        bits = bits ^ (bits >> 16)
        return bits.astype(jnp.float32) * 2.0**-31 - 1.0


class Scaled(NamedTuple):
    """An operand of a product, contracting its last dim, as it is multiplied.

    Attributes:
        data: (rows, terms), float32 values that the multiplied dtype holds.
        scale_inv: `[]` or `[rows, 1]`.
        unrounded: data before the cast; None without a cast to FP8.
    """

    data: Array
    scale_inv: Array
    unrounded: Array | None = None

    @property
    def value(self) -> Array:
        """The values."""
        return self.data * self.scale_inv.reshape(-1, 1)


class Product(NamedTuple):
    """A product, and how it changes if its first or second operand is not cast."""

    out: Array
    by_first: Array | None = None
    by_second: Array | None = None


def operand(
    x: Float[Array, "r c"],
    cast: Cast | None,
    name: Operand,
    stored_scale_inv: Float[Array, ""],
    *,
    rows_are_exact: bool = False,
) -> Scaled:
    """Returns an operand as it is cast.

    Args:
        x: float32, to be contracted over its last dim.
        cast: its cast; None if the product is not in FP8.
        rows_are_exact: scales of rows are amax / fp8_max, not powers of two.
    """
    if cast is None:
        return Scaled(x, jnp.float32(1))
    if cast.scaling == "delayed":
        return _cast(x, stored_scale_inv, cast.dtype)
    if cast.granularity == "tensorwise":
        return _cast(x, scale_inv_of(jnp.max(jnp.abs(x)), cast.dtype), cast.dtype)
    if cast.granularity == "rowwise":
        amax = jnp.max(jnp.abs(x), axis=1, keepdims=True)
        scale_inv = scale_inv_of(amax, cast.dtype, is_exact=rows_are_exact)
        return _cast(x, scale_inv, cast.dtype)
    scale_inv = _tile_scales(x, (BLOCK, BLOCK) if name == "rhs" else (1, BLOCK), cast)
    tiled = _cast(x, scale_inv, cast.dtype)
    return Scaled(tiled.data * scale_inv, jnp.float32(1), x)


def product(
    first: Scaled, second: Scaled, gemm: GemmRecipe | None, dtype, rounding: Rounding
) -> Product:
    """Returns `first @ second.T`, perturbed as sums on tensor cores are.

    Args:
        gemm: their casts; None for a product in `dtype`.
    """
    dtype = dtype if gemm is None else jnp.bfloat16  # which holds all of FP8
    scales = first.scale_inv.reshape(-1, 1), second.scale_inv.reshape(1, -1)

    def multiply(a: Array, b: Array) -> Array:
        out = high_precision_matmul(a, b, compute_dtype=dtype, out_dtype=jnp.float32)
        return out * scales[0] * scales[1]

    out = multiply(first.data, second.data)
    if gemm is None:
        return Product(out)
    terms = first.data.shape[1]
    lengths = [jnp.sqrt(jnp.sum(x.value**2, axis=1)) for x in (first, second)]
    sums = lengths[0][:, None] * lengths[1][None, :] / terms**0.5 + jnp.abs(out)
    in_a_row = terms if gemm.fast_accumulation else min(terms, _EXACT_TERMS)
    out = rounding.cut_off(out, sums * (_SUM_ERROR * in_a_row / _SUM_TERMS))
    if first.unrounded is None or second.unrounded is None:
        return Product(out)
    return Product(
        out,
        by_first=multiply(first.unrounded - first.data, second.data),
        by_second=multiply(first.data, second.unrounded - second.data),
    )


def scale_inv_of(amax: Array, dtype: DTypeLike, *, is_exact: bool = False) -> Array:
    """Returns the least power of two, or the least factor, that holds these amaxes."""
    ratio = amax / float(jnp.finfo(dtype).max)
    if not is_exact:
        fraction, exponent = jnp.frexp(ratio)
        exponent = jnp.where(fraction == 0.5, exponent - 1, exponent)
        ratio = jnp.where(ratio > 0, jnp.ldexp(jnp.ones_like(ratio), exponent), 0.0)
    return jnp.where(ratio > 0, ratio, 1.0)


def round_to(x: Array, dtype: DTypeLike) -> Array:
    """Returns float32 `x` rounded to the nearest value of an FP8 format, saturated."""
    info = jnp.finfo(dtype)
    x = jnp.clip(x, -float(info.max), float(info.max))
    _, exponent = jnp.frexp(x)
    # frexp's fraction is below 1; a format's is below 2.
    exponent = jnp.maximum(exponent - 1, int(info.minexp)) - int(info.nmant)
    return jnp.ldexp(jnp.round(jnp.ldexp(x, -exponent)), exponent)


def code_step(dtype: DTypeLike) -> float:
    """Returns the largest step from a normal FP8 value to the next, relative to it."""
    return float(jnp.finfo(dtype).eps)


def _cast(x: Array, scale_inv: Array, dtype: DTypeLike) -> Scaled:
    unrounded = x / jnp.broadcast_to(scale_inv, x.shape)
    return Scaled(round_to(unrounded, dtype), scale_inv, unrounded)


def _tile_scales(x: Array, tile: tuple[int, int], cast: Cast) -> Array:
    """Returns the scale of each element; the last tiles may be partial."""
    sizes = [(-size % side) for size, side in zip(x.shape, tile, strict=True)]
    padded = jnp.pad(jnp.abs(x), [(0, size) for size in sizes])
    counts = [size // side for size, side in zip(padded.shape, tile, strict=True)]
    tiles = padded.reshape(counts[0], tile[0], counts[1], tile[1])
    scale_inv = scale_inv_of(jnp.max(tiles, axis=(1, 3)), cast.dtype)
    for axis, side in enumerate(tile):
        scale_inv = jnp.repeat(scale_inv, side, axis=axis)
    return scale_inv[: x.shape[0], : x.shape[1]]
