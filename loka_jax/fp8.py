"""FP8 arrays, and the casts between them and high precision.

Everywhere in this library `scale` multiplies into FP8 and lives only inside a cast;
`scale_inv` multiplies back out of it and is what is stored and passed on:

    data = cast(x * scale)        x ~ data * scale_inv        scale_inv = 1 / scale

Casts saturate explicitly. JAX's own cast turns 465 into NaN (E4M3) and 61,440 into
infinity (E5M2), while the GPU's saturates; clipping in float32 first makes every path
agree. NaN stays NaN: it must be seen.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float

E4M3 = jnp.float8_e4m3fn  # forward operands: max 448, 3 mantissa bits
E5M2 = jnp.float8_e5m2  # more range, coarser: max 57344, 2 mantissa bits

SIZE_MULTIPLE = 16  # cuBLASLt's FP8 products take sizes in multiples of it

# Keeps only the exponent of a float32, which rounds it down to a power of two.
_EXPONENT_BITS = 0x7F800000
_MAX_PARTS = 2048


@struct.dataclass
class Fp8Array:
    """An FP8 array with the factors that bring it back to high precision.

    Attributes:
        data: the FP8 values, of any shape; two-dimensional if `tile` is given.
        scale_inv: float32 dequantization factors, broadcastable to `data`; with
            `tile = (r, c)`, one factor for each tile of r rows and c columns.
        tile: rows and columns that share a scale, or None.
    """

    data: Float[Array, "..."]
    scale_inv: Float[Array, "..."]
    tile: tuple[int, int] | None = struct.field(pytree_node=False, default=None)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> Float[Array, "..."]:
        """Returns the dequantized array, `data * scale_inv`.

        The barrier keeps the rounding: XLA for GPUs may drop a cast to FP8 that is
        followed by a cast back (`xla_allow_excess_precision`). With power-of-two scales
        the product is exact in bfloat16 too, since FP8 has fewer mantissa bits.
        """
        data = jax.lax.optimization_barrier(self.data)
        scale_inv = self.scale_inv
        if self.tile is not None:
            for axis, size in enumerate(self.tile):
                scale_inv = jnp.repeat(scale_inv, size, axis=axis)
            scale_inv = scale_inv[: data.shape[0], : data.shape[1]]
        scale_inv = jnp.broadcast_to(scale_inv, data.shape)
        return (data.astype(jnp.float32) * scale_inv).astype(dtype)


def fp8_max(dtype: DTypeLike) -> float:
    """Returns the largest finite value of an FP8 format: 448 (E4M3), 57344 (E5M2)."""
    if jnp.dtype(dtype) not in (jnp.dtype(E4M3), jnp.dtype(E5M2)):
        raise ValueError(f"{dtype=} must be E4M3 or E5M2.")
    return float(jnp.finfo(dtype).max)


def saturate(x: Float[Array, "*shape"], dtype: DTypeLike) -> Float[Array, "*shape"]:
    """Returns `x` cast to FP8, clipped to the largest finite magnitude."""
    limit = fp8_max(dtype)
    return jnp.clip(x.astype(jnp.float32), -limit, limit).astype(dtype)


def padded_size(size: int) -> int:
    """Returns the least size of an FP8 product that is not smaller."""
    return size + -size % SIZE_MULTIPLE


def pad(x: Float[Array, "r c"]) -> Float[Array, "p q"]:
    """Returns a matrix padded with zeros to sizes that FP8 products take.

    Zeros add nothing to sums, and XLA pads in the pass of the cast around it.
    """
    rows, columns = x.shape
    return pad_to(x, (padded_size(rows), padded_size(columns)))


def pad_to(x: Float[Array, "r c"], shape: tuple[int, int]) -> Float[Array, "p q"]:
    """Returns a matrix padded with zeros to a shape."""
    if x.shape == shape:
        return x
    rest = [(0, size - given, 0) for size, given in zip(shape, x.shape, strict=True)]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), rest)


def amax(
    x: Float[Array, "..."], axes: Sequence[int] | None = None
) -> Float[Array, "..."]:
    """Returns the float32 `max |x|` over `axes`, with these dims kept at size 1.

    If `axes` is None the result is a scalar over all of them. The amax of an empty
    slice is 0, and that of a slice with a NaN is NaN.
    """
    largest = jnp.max(
        _magnitude_bits(x), axis=axes, keepdims=axes is not None, initial=0
    )
    return jax.lax.bitcast_convert_type(largest, x.dtype).astype(jnp.float32)


def amax_of_parts(x: Float[Array, "..."]) -> Float[Array, "p"]:
    """Returns float32 amaxes of p equal parts of `x`; their maximum is its amax.

    XLA reduces a large array in two kernels, and fuses only the first with the array's
    producer. Stopping after it lets several arrays share the second.
    """
    if x.size == 0:
        return jnp.zeros((1,), jnp.float32)
    if jax.export.is_symbolic_dim(x.size):
        return amax(x)[None]
    parts = x.reshape(math.gcd(x.size, _MAX_PARTS), -1)
    return amax(parts, axes=(1,))[:, 0]


def amax_over_devices(
    amax: Float[Array, "*shape"], axis_names: tuple[str, ...]
) -> Float[Array, "*shape"]:
    """Returns the largest of the amaxes on the devices along these mesh axes."""
    if not axis_names:
        return amax
    largest = jax.lax.pmax(_magnitude_bits(amax), axis_names)
    return jax.lax.bitcast_convert_type(largest, amax.dtype)


def power_of_two_up(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns the least powers of two that are not below positive normal numbers."""
    return 1.0 / power_of_two_down(1.0 / x)


def power_of_two_down(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns the largest powers of two that are not above positive normal numbers."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & _EXPONENT_BITS
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def compute_scale_inv(
    amax: Float[Array, "*shape"],
    dtype: DTypeLike,
    *,
    pow2_scale: bool = True,
    margin: int = 0,
) -> Float[Array, "*shape"]:
    """Returns `scale_inv = 1 / scale` with `scale = fp8_max / (amax * 2**margin)`.

    Args:
        pow2_scale: round `scale` down to a power of two, which makes scaling exact
            both ways in float32 and bfloat16, for at most one bit of range.

    A non-finite amax gives NaN, so that the fault reaches the output and is seen.
    """
    # The margin lowers the limit, because raising amax could leave float32's range.
    limit = fp8_max(dtype) * 2.0**-margin
    # Below the floor `scale` would overflow float32 and turn zeros into NaN. One more
    # factor of two keeps `scale_inv` a normal number, which GPUs do not flush to zero.
    floor = 2 * limit * float(jnp.finfo(jnp.float32).tiny)
    scale = limit / jnp.maximum(amax, floor)
    if pow2_scale:
        scale = power_of_two_down(scale)
    return jnp.where(jnp.isfinite(amax), 1.0 / scale, jnp.nan)


def mx_scale_inv(
    amax: Float[Array, "*shape"], dtype: DTypeLike
) -> Float[Array, "*shape"]:
    """Returns the scales of blocks in an MX format, as float32.

        scale_inv = 2^(floor(log2 amax) - emax)        emax = floor(log2 fp8_max)

    E8M0 has them all: powers of two, or NaN where the amax is not finite. Up to an
    eighth of the range of amaxes saturates, from 1.75 times a power of two in E4M3 on.
    Blocks of zeros, or below 2^-117, have 2^-126, which GPUs do not flush to zero.

    References:
        OCP Microscaling Formats (MX) Specification v1.0, section 6.3.
    """
    emax = power_of_two_down(jnp.float32(fp8_max(dtype)))
    smallest = float(jnp.finfo(jnp.float32).tiny)
    scale_inv = jnp.maximum(power_of_two_down(amax) / emax, smallest)
    return jnp.where(jnp.isfinite(amax), scale_inv, jnp.nan)


def cast(
    x: Float[Array, "*shape"], scale_inv: Float[Array, "..."], dtype: DTypeLike
) -> Fp8Array:
    """Returns `saturate(x / scale_inv)` with its `scale_inv`."""
    scaled = x.astype(jnp.float32) * jnp.broadcast_to(1.0 / scale_inv, x.shape)
    return Fp8Array(saturate(scaled, dtype), scale_inv)


def quantize(
    x: Float[Array, "*shape"],
    dtype: DTypeLike = E4M3,
    *,
    axes: Sequence[int] | None = None,
    pow2_scale: bool = True,
) -> Fp8Array:
    """Casts `x` to FP8 with current scaling, one scale per slice along `axes`.

    The FP8 data of finite values are finite: out-of-range values saturate. (Values
    within a factor 1.1 of float32's maximum may round up beyond it, which `dequantize`
    then returns as infinity.)

    Args:
        axes: the axes that share a scale: all of them (tensorwise) if None; the
            contracting dims of a matmul operand for rowwise scaling.

    Raises:
        ValueError: if `dtype` is not an FP8 type.
    """
    scale_inv = compute_scale_inv(amax(x, axes), dtype, pow2_scale=pow2_scale)
    return cast(x, scale_inv, dtype)


def quantize_tiles(
    x: Float[Array, "m k"],
    dtype: DTypeLike = E4M3,
    *,
    tile: tuple[int, int],
    scale_inv_of: Callable[[Array, DTypeLike], Array] = compute_scale_inv,
) -> Fp8Array:
    """Casts `x` to FP8 with one scale per `tile` (current scaling).

    Where a size is not a multiple of the tile, the last tile is partial.

    Args:
        scale_inv_of: returns the scales of tiles with such amaxes.
    """
    rows, cols = x.shape
    tile_rows, tile_cols = tile
    padded = jnp.pad(x, ((0, -rows % tile_rows), (0, -cols % tile_cols)))
    tiles = padded.reshape(
        padded.shape[0] // tile_rows, tile_rows, padded.shape[1] // tile_cols, tile_cols
    )
    scale_inv = scale_inv_of(amax(tiles, (1, 3)), dtype)
    data = cast(tiles, scale_inv, dtype).data.reshape(padded.shape)[:rows, :cols]
    return Fp8Array(data, scale_inv[:, 0, :, 0], tile)


def _magnitude_bits(x: Array) -> Array:
    """Returns integers ordered as `|x|`, with NaN above infinity.

    Maxima are taken of these because a maximum of floats may lose a NaN: XLA's does in
    large reductions on CPUs, and so does NCCL's.
    """
    integer = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, integer)
    return bits & jnp.iinfo(integer).max
