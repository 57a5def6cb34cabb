"""A pass of attention over jagged rows by XLA, see `jagged.Pass`."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax.fp8 import E4M3, saturate
from loka_jax.heads import Heads
from loka_jax.jagged import Pass, Visibility
from loka_jax.xla.jagged_walk import product, unblocked, walk

# Rows of a block, and where sequences are long. A block that is longer than most of
# them visits mainly rows that it does not see.
_BLOCK, _LARGER_BLOCK, _LONG = 128, 256, 2048


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
    own, other = ([z.alone() for z in side] for side in (fixed, streamed))
    sums = walk(
        functools.partial(_add, kind, scale),
        lambda fixed: [
            jnp.zeros((*fixed[0].shape[:3], z.shape[2]), jnp.float32)
            for z in _wanted(kind, *other)
        ],
        own,
        other,
        visible,
        by_key=kind.by_key,
        block=_LARGER_BLOCK if max_length >= _LONG else _BLOCK,
    )
    wanted = _wanted(kind, *other)
    factors = _wanted(kind, scale / max_length, 1 / max_length)
    return tuple(
        unblocked((total * factor).astype(_high(z.dtype)), len(own[0]))
        for total, factor, z in zip(sums, factors, wanted, strict=True)
    )


def _wanted(kind: Pass, slopes, values) -> list:
    wanted = (kind.has_slopes, slopes), (kind.has_values, values)
    return [x for is_wanted, x in wanted if is_wanted]


def _add(kind: Pass, scale, sums, fixed, streamed, mask):
    """Adds what each block of fixed rows gets from the block it visits."""
    (a, *_), (x, y) = fixed, streamed
    scores = scale * product("nfhd,nghd->nhfg", a, x)
    probability = jax.nn.sigmoid(scores)
    added = []
    if kind.has_slopes:
        slope = probability * (1 + scores * (1 - probability))
        slope = slope * product("nfhd,nghd->nhfg", fixed[1], y)
        added.append(_sum(jnp.where(mask, slope, 0), x))
    if kind.has_values:
        added.append(_sum(jnp.where(mask, scores * probability, 0), y))
    return [total + more for total, more in zip(sums, added, strict=True)]


def _sum(weights, rows):
    is_fp8 = rows.dtype == E4M3
    weights = saturate(weights, E4M3) if is_fp8 else weights.astype(rows.dtype)
    return product("nhfg,nghd->nfhd", weights, rows)


def _high(dtype):
    """Returns the dtype; bfloat16 of E4M3, all of whose values it has."""
    return jnp.bfloat16 if dtype == E4M3 else dtype
