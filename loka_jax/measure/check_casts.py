"""Casts and products as a recipe describes them, by arithmetic on float32.

Scales are those of `loka_jax.fp8`; values are rounded apart from its casts, as kernels
have their own. A product of FP8 or bfloat16 values with float32 sums is exact but for
the order of the sums.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax import fp8
from loka_jax.recipe import Cast, GemmRecipe, Operand
from loka_jax.xla import high_precision_matmul

# Hopper's tensor cores add 32 FP8 products at a time to sums of about 14 bits, cutting
# off the rest. Without fast accumulation these are added in float32 every 128 terms.
_SUM_ERROR, _SUM_TERMS, _EXACT_TERMS = 2.0**-14, 32, 128


class Rounding(NamedTuple):
    """Errors by which values are perturbed, as if a candidate had rounded them.

    Another seed, uint32, is another perturbation; exact results have strength 0, not 1.
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
    """Returns a float32 operand, to be contracted over its last dim, as it is cast.

    With `rows_are_exact` the scales of rows are amax / fp8_max, not powers of two.
    """
    if cast is None:
        return Scaled(x, jnp.float32(1))
    if cast.is_tiled:
        ones, tiles = jnp.ones(x.shape, cast.dtype), cast.in_tiles(x, name)
        scale_inv = dataclasses.replace(tiles, data=ones).dequantize()
        return Scaled(
            round_to(x / scale_inv, cast.dtype) * scale_inv, jnp.float32(1), x
        )
    scale_inv = stored_scale_inv
    if cast.scaling == "current":
        by_row = cast.granularity == "rowwise"
        amax = fp8.amax(x, (1,) if by_row else None)
        pow2_scale = not (by_row and rows_are_exact)
        scale_inv = fp8.compute_scale_inv(amax, cast.dtype, pow2_scale=pow2_scale)
    unrounded = x / scale_inv
    return Scaled(round_to(unrounded, cast.dtype), scale_inv, unrounded)


def product(
    first: Scaled, second: Scaled, gemm: GemmRecipe | None, dtype, rounding: Rounding
) -> Product:
    """Returns `first @ second.T`, perturbed as sums on tensor cores are.

    Without a `gemm` it is a product in `dtype`.
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


def round_to(x: Array, dtype: DTypeLike) -> Array:
    """Returns float32 `x` rounded to the nearest value of an FP8 format, saturated."""
    limit = fp8.fp8_max(dtype)
    # The barrier keeps the cast: XLA may drop one that a cast back follows.
    data = jax.lax.optimization_barrier(jnp.clip(x, -limit, limit).astype(dtype))
    return data.astype(jnp.float32)


def code_step(dtype: DTypeLike) -> float:
    """Returns the largest step from a normal FP8 value to the next, relative to it."""
    return float(jnp.finfo(dtype).eps)
