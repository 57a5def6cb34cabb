"""Sums over the rows that each row sees, by XLA, in blocks of jagged rows.

All blocks of fixed rows visit at once, each its own, one block of streamed rows after
another, until the last of them is done: what is held of a visit takes [rows, block] a
head, and work is that of the block that visits the most.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from loka_jax import jagged
from loka_jax.fp8 import E4M3
from loka_jax.jagged import Visibility

_ALIGNMENT = 8


def walk[Sums](
    add: Callable[..., Sums],
    sums: Callable[..., Sums],
    fixed: Any,
    streamed: Any,
    visible: Visibility,
    *,
    by_key: bool,
    block: int,
) -> Sums:
    """Returns what each fixed row sums over the streamed rows, [n, block, ...] of them.

    Args:
        add: from sums, blocks of fixed and of streamed rows, and which rows of each
            pair of blocks see each other [n, 1, fixed, streamed], to new sums.
        sums: from blocks of fixed rows to the sums before the first visit.
        fixed: arrays of rows.
        streamed: likewise.
        visible: of the queries and keys, which are the fixed and the streamed rows, or,
            if `by_key`, the streamed and the fixed ones.
        block: the most rows of a block.
    """
    sizes = [len(jax.tree.leaves(x)[0]) for x in (fixed, streamed)]
    block = min(block, -(-max(sizes) // _ALIGNMENT) * _ALIGNMENT)
    queries, keys = [size + -size % block for size in sizes[:: -1 if by_key else 1]]
    visible = jagged.padded(visible, queries, keys)
    fixed, streamed = (
        jax.tree.map(functools.partial(_blocked, block), x) for x in (fixed, streamed)
    )
    visits = jagged.blocks(visible, by_key=by_key, fixed=block, streamed=block)

    def visit(step, sums):
        is_second = step < visits.second_count
        place = jnp.where(is_second, visits.second, visits.first - visits.second_count)
        is_visit = step < visits.count
        place = jnp.where(is_visit, place + step, 0)
        mask = _mask(by_key, visible, place, block) & is_visit[:, None, None]
        return add(
            sums, fixed, jax.tree.map(lambda x: x[place], streamed), mask[:, None]
        )

    return lax.fori_loop(0, jnp.max(visits.count), visit, sums(fixed))


def unblocked(x: jax.Array, count: int) -> jax.Array:
    """Returns the first rows of blocks of rows."""
    return x.reshape(-1, *x.shape[2:])[:count]


def product(subscripts: str, a, b) -> jax.Array:
    """Returns an einsum in float32."""
    # GPUs would multiply float32 in TF32.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    if a.dtype == E4M3:  # behind a barrier, as in `fp8`
        a, b = (x.astype(jnp.bfloat16) for x in lax.optimization_barrier((a, b)))
    return jnp.einsum(
        subscripts, a, b, precision=precision, preferred_element_type=jnp.float32
    )


def _blocked(block: int, x):
    pad = -len(x) % block
    if pad:
        x = jnp.pad(x, ((0, pad), *[(0, 0)] * (x.ndim - 1)))
    return x.reshape(-1, block, *x.shape[1:])


def _mask(by_key: bool, visible: Visibility, place, size: int):
    """Returns which of the rows visited are visible, [blocks, fixed, streamed]."""
    own = jnp.arange(len(place))
    of_queries, of_keys = (place, own) if by_key else (own, place)
    keys = jnp.add.outer(of_keys * size, jnp.arange(size))
    limits = visible._replace(seen_by=())  # of the queries
    queries = jax.tree.map(lambda x: x.reshape(-1, size)[of_queries], limits)
    if by_key:
        queries = jax.tree.map(lambda x: x[:, None, :], queries)
        return jagged.is_visible(queries, keys[:, :, None])
    queries = jax.tree.map(lambda x: x[:, :, None], queries)
    return jagged.is_visible(queries, keys[:, None, :])
