"""The order of a table's rows in its array, which no number of devices changes.

Rows are dealt to S virtual shards, and L devices hold S / L of them each, so that an
array that was saved on some devices is restored on others as it is. With depth =
ceil(R / S), row g of R has the place

    q = g // S,   v = (g + hash32(q)) mod S,   p = v depth + q

of S depth places: a bijection, as g = S q + (v - hash32(q)) mod S. Each S rows in a row
go to S shards, in an order that differs from one S to the next: rows that are popular
together, or multiples of some number, spread evenly. With S = 1, p = g.

Rows are pairs (q, g mod S) and places pairs (v, q), so that all is 32-bit arithmetic
for up to 2^39 rows. The functions take numpy arrays or JAX's, of unsigned 32-bit
integers.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Bool, Float, Int, UInt32

from loka_jax.ops.tables import TableSpec
from loka_jax.unbiased import Words, hash32

VIRTUAL_SHARDS = 256  # S of tables over several devices; a power of two


class Order(NamedTuple):
    """The order of the rows of one array.

    Attributes:
        rows: R, the number of rows.
        shards: S, the number of virtual shards, a power of two.
    """

    rows: int
    shards: int

    @property
    def depth(self) -> int:
        """The number of places of a virtual shard."""
        return -(-self.rows // self.shards)

    @property
    def places(self) -> int:
        """The number of places; some are no row's unless S divides R."""
        return self.shards * self.depth


def shard_of(q: Words, remainder: Words, shards: int) -> Words:
    """Returns v of the rows g = S q + remainder."""
    return (remainder + hash32(q)) & np.uint32(shards - 1)


def remainder_of(v: Words, q: Words, shards: int) -> Words:
    """Returns g mod S of the rows at the places (v, q)."""
    return (v - hash32(q)) & np.uint32(shards - 1)


class Places(NamedTuple):
    """Where the rows of ids lie; v is S for an id that has none, and is to be ignored.

    Attributes:
        v: uint32, the virtual shard.
        q: uint32, the place in it.
    """

    v: UInt32[Array, "*N"]
    q: UInt32[Array, "*N"]

    def where(self, keep: Bool[Array, "..."], shards: int) -> "Places":
        """Returns the places with those that are not to be kept ignored."""
        return Places(jnp.where(keep, self.v, np.uint32(shards)), self.q)


def places_of_ids(
    spec: TableSpec,
    ids: Int[Array, "B F *H"],
    order: Order,
    fields: slice = slice(None),
) -> Places:
    """Returns the place of the row of each per-field id.

    As `embedding.flat_ids`, which has ids where this has places, but for more rows than
    int32 can number: an id is in its field's table, and the sum with the field's first
    row has the quotient and the remainder of both.

    Args:
        fields: which of the spec's fields these are; all by default.
    """
    shape = (1, len(spec.rows[fields])) + (1,) * (ids.ndim - 2)
    first = np.array(spec.offsets[fields], np.int64).reshape(shape)
    rows = np.array(spec.rows[fields], np.int32).reshape(shape)
    in_range = (ids >= 0) & (ids < rows)
    bits = np.uint32(order.shards.bit_length() - 1)
    mask = np.uint32(order.shards - 1)
    unsigned = ids.astype(jnp.uint32)
    remainder = (first % order.shards).astype(np.uint32) + (unsigned & mask)
    q = jnp.asarray((first // order.shards).astype(np.uint32)) + (unsigned >> bits)
    q = q + (remainder >> bits)
    v = shard_of(q, remainder, order.shards)
    return Places(v, q).where(in_range, order.shards)


def places_of(rows: Int[np.ndarray, "N"], order: Order) -> Int[np.ndarray, "N"]:
    """Returns the place of each row, int64, on the host."""
    q, remainder = np.divmod(rows, order.shards)
    v = shard_of(q.astype(np.uint32), remainder.astype(np.uint32), order.shards)
    return v.astype(np.int64) * order.depth + q


def normal_rows(
    key: Array,
    order: Order,
    dim: int,
    shards: Int[Array, "n"],
    kept: Callable[[Array], Array] = lambda rows: rows,
) -> Float[Array, "P D"]:
    """Returns normal values of the places of some virtual shards, in their order.

    Row g has the values of row g of `jax.random.normal(key, (R, D))`, whatever S is and
    wherever it lies; the places of no row have those of rows beyond R. Each element is
    computed for itself and the shards one after another, so that devices make their
    parts of an array with nothing to exchange and little memory.

    Args:
        key: a random key of JAX's default generator, which hashes an element's number.
        kept: gives what is kept of the rows of a shard, in a narrower dtype.
    """
    words = jax.random.key_data(key)
    shape = (order.depth, dim)
    q, d = (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in range(2))

    def shard(v: Array) -> Array:
        remainder = remainder_of(v.astype(jnp.uint32), q, order.shards)
        bits = threefry2x32_p.bind(*words, *_element(q, remainder, d, order, dim))
        return kept(_normal(bits[0] ^ bits[1]))

    return jax.lax.map(shard, shards).reshape(-1, dim)


def _element(q, remainder, d, order: Order, dim: int) -> tuple[Array, Array]:
    """Returns (S q + remainder) D + d as its high and low 32 bits."""
    bits = order.shards.bit_length() - 1
    high = q >> np.uint32(32 - bits)
    low = (q << np.uint32(bits)) | remainder
    # The product in halves of 16 bits: D is below 2^16.
    first = (low & np.uint32(0xFFFF)) * np.uint32(dim)
    second = (low >> np.uint32(16)) * np.uint32(dim)
    high = high * np.uint32(dim) + (
        ((first >> np.uint32(16)) + second) >> np.uint32(16)
    )
    low = first + (second << np.uint32(16))
    total = low + d
    return high + (total < low).astype(jnp.uint32), total


def _normal(bits: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns what `jax.random.normal` makes of random bits."""
    low = np.nextafter(np.float32(-1), np.float32(0))
    ones = (bits >> np.uint32(9)) | np.uint32(0x3F800000)
    unit = jax.lax.bitcast_convert_type(ones, jnp.float32) - np.float32(1)
    uniform = jnp.maximum(low, unit * (np.float32(1) - low) + low)
    return np.float32(np.sqrt(2)) * jax.lax.erf_inv(uniform)
