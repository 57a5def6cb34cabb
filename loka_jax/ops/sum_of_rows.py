"""The sum of rows of small parameters, whose gradients have the same bits every time.

    y_i = sum over t of table_t[index_ti],    dtable_tr = sum of dy_i where index_ti = r

XLA adds such gradients by atomics on a GPU: their order, and so the last bits, change
from run to run, and many that go to one row wait for each other. 32,768 gradients to 3
rows of 512 took 161 us of an H200, some ten times as long as to read them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from loka_jax.ops.embedding import sum_by_row

_FEW = 16  # rows, to which the gradients are added by a product

type Tables = tuple[Float[Array, "_ D"], ...]
type Indices = tuple[Int[Array, "N"], ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def sum_of_rows(tables: Tables, indices: Indices, dtype: Any) -> Float[Array, "N D"]:
    """Returns the sum of a row of each table, added in float32, in `dtype`.

    Args:
        indices: of the rows of each table, at least 0; those behind the last row are
            that row.
    """
    pairs = zip(tables, indices, strict=True)
    rows = (table[jnp.minimum(index, len(table) - 1)] for table, index in pairs)
    return sum((row.astype(jnp.float32) for row in rows), jnp.float32(0)).astype(dtype)


def _forward(tables: Tables, indices: Indices, dtype: Any) -> tuple[Array, Any]:
    return sum_of_rows(tables, indices, dtype), (tables, indices)


def _backward(dtype: Any, saved: Any, dy: Float[Array, "N D"]) -> tuple[Tables, None]:
    tables, indices = saved
    pairs = zip(tables, indices, strict=True)
    sums = (_sums(dy, index, len(table)).astype(table.dtype) for table, index in pairs)
    return tuple(sums), None


def _sums(dy: Array, index: Array, num_rows: int) -> Array:
    """Returns the float32 sums of the gradients of each row of a table."""
    zeros = jnp.zeros((num_rows, dy.shape[1]), jnp.float32)
    if not dy.size:
        return zeros
    index = jnp.minimum(index, num_rows - 1)
    if num_rows <= _FEW:
        one_hot = (index[:, None] == jnp.arange(num_rows)[None]).astype(dy.dtype)
        how: dict[str, Any] = dict(precision="highest")
        how |= dict(preferred_element_type=jnp.float32)
        return jnp.einsum("nr,nd->rd", one_hot, dy, **how)

    def one_by_one(index: Array, dy: Array) -> Array:
        return zeros.at[index].add(dy.astype(jnp.float32))

    def in_order(index: Array, dy: Array) -> Array:
        ids, sums = sum_by_row(index, dy, num_rows)
        return zeros.at[ids].set(sums, mode="drop")

    return jax.lax.platform_dependent(index, dy, cpu=one_by_one, default=in_order)


sum_of_rows.defvjp(_forward, _backward)
