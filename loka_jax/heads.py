"""Rows of the heads of an attention, which lie side by side in columns.

Queries, keys and values may be arrays of their own, or columns of the one array that a
product returns: kernels read either as it lies.
"""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float

_STATIC: dict[str, Any] = dict(metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Heads:
    """The rows of some heads in an array that may hold others, too.

    Attributes:
        array: [C, columns], or a reference to it.
        first: the first column of these heads.
        count: of heads.
        size: of a head, its columns.
    """

    array: Any
    first: int = dataclasses.field(**_STATIC)
    count: int = dataclasses.field(**_STATIC)
    size: int = dataclasses.field(**_STATIC)

    @classmethod
    def of(cls, rows: Float[Array, "C h d"]) -> "Heads":
        """Returns all heads of an array."""
        count, heads, size = rows.shape
        return cls(rows.reshape(count, heads * size), 0, heads, size)

    def alone(self) -> Float[Array, "C h d"]:
        """Returns these heads without others."""
        own = self.array[:, self.first : self.first + self.count * self.size]
        return own.reshape(-1, self.count, self.size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Qkv:
    """Queries, keys and values: in three arrays, or in one with U before them.

    Attributes:
        arrays: q, k and v, [C, h d_qk] twice and [C, h d_v]; or one, [U V Q K], whose
            U is as wide as V.
        heads: h.
        v_dim: d_v.
    """

    arrays: tuple[Any, ...]
    heads: int = dataclasses.field(**_STATIC)
    v_dim: int = dataclasses.field(**_STATIC)

    @classmethod
    def of(
        cls,
        q: Float[Array, "C h d_qk"],
        k: Float[Array, "C h d_qk"],
        v: Float[Array, "C h d_v"],
    ) -> "Qkv":
        """Returns those of three arrays."""
        arrays = tuple(Heads.of(x).array for x in (q, k, v))
        return cls(arrays, q.shape[1], v.shape[2])

    @property
    def is_joined(self) -> bool:
        """True if one array has all."""
        return len(self.arrays) == 1

    @property
    def u(self) -> Float[Array, "C h_d_v"] | None:
        """U; None without."""
        if not self.is_joined:
            return None
        return self.arrays[0][:, : self.heads * self.v_dim]

    def parts(self) -> tuple[Heads, Heads, Heads]:
        """Returns q, k and v."""
        heads, v_dim, columns = self.heads, self.v_dim, self.arrays[0].shape[1]
        if self.is_joined:
            qk_dim, arrays = columns // heads // 2 - v_dim, self.arrays * 3
            firsts = 2 * heads * v_dim, columns - heads * qk_dim, heads * v_dim
        else:
            qk_dim, arrays, firsts = columns // heads, self.arrays, (0, 0, 0)
        sizes = qk_dim, qk_dim, v_dim
        places = zip(arrays, firsts, sizes, strict=True)
        q, k, v = (Heads(x, first, heads, size) for x, first, size in places)
        return q, k, v
