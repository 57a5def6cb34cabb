"""A pass of attention over jagged rows by XLA, see `jagged.Pass`.

All blocks of fixed rows visit at once, each its own, one block of streamed rows after
another, until the last of them is done: scores take [C, block] a head, and work is that
of the block that visits the most.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from loka_jax import jagged
from loka_jax.fp8 import E4M3, saturate
from loka_jax.heads import Heads
from loka_jax.jagged import Pass, Visibility

# Rows of a block, and where sequences are long. A block that is longer than most of
# them visits mainly rows that it does not see.
_BLOCK, _LARGER_BLOCK, _LONG = 128, 256, 2048
_ALIGNMENT = 8


def attend(
    kind: Pass,
    fixed: tuple[Heads, ...],
    streamed: tuple[Heads, ...],
    visible: Visibility,
    *,
    scale: float,
    max_length: int,
) -> tuple[Float[Array, "C h _"], ...]:
    """Returns the wanted ones of slopes and values, in the dtype of x and of y.

    Sums are float32; what a product takes is rounded to the dtype of its operands. Of
    rows in E4M3, in the forward pass, results are bfloat16.

    Args:
        fixed: a, and b where slopes are wanted.
        streamed: x and y.
        max_length: N.
    """
    rows: Any = [[z.alone() for z in side] for side in (fixed, streamed)]
    size = len(rows[0][0])
    block = _LARGER_BLOCK if max_length >= _LONG else _BLOCK
    block = min(block, -(-size // _ALIGNMENT) * _ALIGNMENT)
    pad = -size % block
    blocked = jax.tree.map(lambda x: _blocked(x, pad, block), rows)
    visible = jagged.padded(visible, size + pad)
    visits = jagged.blocks(visible, by_key=kind.by_key, fixed=block, streamed=block)
    add = functools.partial(_add, kind, scale, *blocked, visible, visits)
    x, y = blocked[1]
    sums = [jnp.zeros(z.shape, jnp.float32) for z in _wanted(kind, x, y)]
    sums = lax.fori_loop(0, jnp.max(visits.count), add, sums)
    factors = _wanted(kind, scale / max_length, 1 / max_length)
    pairs = zip(sums, factors, _wanted(kind, x, y), strict=True)
    return tuple(
        (total * factor).astype(_high(z.dtype)).reshape(-1, *z.shape[2:])[:size]
        for total, factor, z in pairs
    )


def _wanted(kind: Pass, slopes, values) -> list:
    wanted = (kind.has_slopes, slopes), (kind.has_values, values)
    return [x for is_wanted, x in wanted if is_wanted]


def _blocked(x, pad: int, block: int):
    padded = jnp.pad(x, ((0, pad), (0, 0), (0, 0))) if pad else x
    return padded.reshape(-1, block, *x.shape[1:])


def _add(kind: Pass, scale, fixed, streamed, visible, visits, step, sums):
    """Adds what each block of fixed rows gets from the block it visits at a step."""
    is_second = step < visits.second_count
    block = jnp.where(is_second, visits.second, visits.first - visits.second_count)
    is_visit = step < visits.count
    block = jnp.where(is_visit, block + step, 0)
    x, y = (z[block] for z in streamed)
    mask = _mask(kind, visible, block, x.shape[1]) & is_visit[:, None, None]
    mask = mask[:, None]
    a, *_ = fixed
    scores = scale * _product("nfhd,nghd->nhfg", a, x)
    probability = jax.nn.sigmoid(scores)
    added = []
    if kind.has_slopes:
        slope = probability * (1 + scores * (1 - probability))
        slope = slope * _product("nfhd,nghd->nhfg", fixed[1], y)
        added.append(_sum(jnp.where(mask, slope, 0), x))
    if kind.has_values:
        added.append(_sum(jnp.where(mask, scores * probability, 0), y))
    return [total + more for total, more in zip(sums, added, strict=True)]


def _mask(kind: Pass, visible: Visibility, block, size: int):
    """Returns which of the rows visited are visible, [blocks, fixed, streamed]."""
    own = jnp.arange(len(block))
    of_queries, of_keys = (block, own) if kind.by_key else (own, block)
    keys = jnp.add.outer(of_keys * size, jnp.arange(size))
    queries = jax.tree.map(lambda x: x.reshape(-1, size)[of_queries], visible)
    if kind.by_key:
        queries = jax.tree.map(lambda x: x[:, None, :], queries)
        return jagged.is_visible(queries, keys[:, :, None])
    queries = jax.tree.map(lambda x: x[:, :, None], queries)
    return jagged.is_visible(queries, keys[:, None, :])


def _sum(weights, rows):
    is_fp8 = rows.dtype == E4M3
    weights = saturate(weights, E4M3) if is_fp8 else weights.astype(rows.dtype)
    return _product("nhfg,nghd->nfhd", weights, rows)


def _high(dtype):
    """Returns the dtype; bfloat16 of E4M3, all of whose values it has."""
    return jnp.bfloat16 if dtype == E4M3 else dtype


def _product(subscripts: str, a, b):
    """Returns an einsum in float32."""
    # GPUs would multiply float32 in TF32.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    if a.dtype == E4M3:  # behind a barrier, as in `fp8`
        a, b = (x.astype(jnp.bfloat16) for x in lax.optimization_barrier((a, b)))
    return jnp.einsum(
        subscripts, a, b, precision=precision, preferred_element_type=jnp.float32
    )
