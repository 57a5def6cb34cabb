"""Stochastic rounding of rows to bfloat16, by bits that only the row's number decides.

bfloat16 has the upper 16 of float32's 32 bits. With u uniform in 0 .. 2^16 - 1 and the
bits of x as an integer,

    rounded(x) = (bits(x) + u) with the lower 16 bits cleared

is the neighbour of x away from zero with the probability (bits(x) mod 2^16) / 2^16, and
else the one towards it: E[rounded(x)] = x, in every binade and for subnormal numbers,
with a variance of at most a fourth of the squared distance of the neighbours. Values
that bfloat16 has stay as they are, as do infinities and NaN. Beyond its largest finite
value the neighbour is infinity, by the same probability.

u needs no state. It is a hash of the seed, the step, the row's number g and the lane d:

    k0, k1 = threefry(seed, step, D)
    a = hash32(low32(g) ^ k0),   b = hash32((a + high32(g)) ^ k1)
    u = hash32(b + d 0x9E3779B9) >> 16

k1 is as good as uniform, and hash32 a bijection: so is u, from step to step. g is not
the place of a row but its number, so that u is the same on every mesh, and without one.

References:
    Zamirai, Zhang, Aberger, De Sa: Revisiting BFloat16 Training. arXiv 2010.06192: to
    the nearest, updates of weights are lost; stochastic rounding keeps them. FBGEMM's
    tables of 16 bits have it by default (`stochastic_rounding`).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt32

from loka_jax.ops.row_order import Order, remainder_of
from loka_jax.unbiased import hash32, lane_bits

_LOWER = np.uint32(0xFFFF)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["words"],
    meta_fields=["depth", "shards"],
)
@dataclasses.dataclass(frozen=True)
class Rounding:
    """What decides the random bits of a table's rows in a step.

    Attributes:
        words: k0, k1, and the first virtual shard of this part of the table.
        depth: places of a virtual shard.
        shards: S, the number of virtual shards.
    """

    words: UInt32[Array, "3"]
    depth: int
    shards: int


def of_step(
    seed: int,
    step: Int[Array, ""],
    order: Order,
    dim: int,
    first_shard: Int[Array, ""] | int = 0,
) -> Rounding:
    """Returns the rounding of a stack of tables in a step.

    Args:
        seed: of the run.
        order: of the rows.
        dim: D, in which stacks differ.
        first_shard: the first virtual shard of this device's part of the table.
    """
    key = jax.random.key(seed, impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, step), dim)
    first = jnp.asarray(first_shard).astype(jnp.uint32)
    words = jnp.append(jax.random.key_data(key), first)
    return Rounding(words, order.depth, order.shards)


def random_bits(
    rounding: Rounding, rows: Int[Array, "N"], dim: int
) -> UInt32[Array, "N D"]:
    """Returns u of the values of some rows, in 0 .. 2^16 - 1.

    Args:
        rounding: of the step.
        rows: places in this part of the table.
        dim: D.
    """
    k0, k1, first = rounding.words
    places = rows.astype(jnp.uint32)
    v, q = (
        first + places // np.uint32(rounding.depth),
        places % np.uint32(rounding.depth),
    )
    shift = rounding.shards.bit_length() - 1
    low = (q << np.uint32(shift)) | remainder_of(v, q, rounding.shards)
    high = q >> np.uint32(32 - shift) if shift else np.uint32(0)
    of_row = hash32((hash32(low ^ k0) + high) ^ k1)
    return lane_bits(of_row, dim) >> np.uint32(16)


def round_by(
    x: Float[Array, "*shape"], bits: UInt32[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Returns float32 values in bfloat16, rounded by bits in 0 .. 2^16 - 1."""
    words = jax.lax.bitcast_convert_type(x, jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((words + bits) & ~_LOWER, jnp.float32)
    # The sum may carry a NaN into another number.
    return jnp.where(jnp.isnan(x), x, rounded).astype(jnp.bfloat16)


def stored(
    x: Float[Array, "N D"],
    rows: Int[Array, "N"],
    dtype: DTypeLike,
    rounding: Rounding | None,
) -> Float[Array, "N D"]:
    """Returns float32 rows as a table keeps them.

    Args:
        x: the rows.
        rows: their places in this part of the table.
        dtype: of the table; bfloat16 for `rounding`.
        rounding: of the step; None rounds to the nearest.
    """
    if rounding is None:
        return x.astype(dtype)
    return round_by(x, random_bits(rounding, rows, x.shape[1]))
