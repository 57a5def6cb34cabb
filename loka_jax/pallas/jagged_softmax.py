"""Softmax attention over jagged rows by the kernel of `jagged_attention`.

It goes over the same blocks by the same rings, see there, and weights rows by a softmax
of the scores, see `jagged_attention_scores`. The forward pass writes lse, the logarithm
of the sum of each query's exponentials; the backward passes take it, and
`delta = g . out`, and look for no maximum. Each result is written once: launches agree
bit by bit. Queries may be other rows than keys.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float

from loka_jax import jagged
from loka_jax.heads import Heads
from loka_jax.jagged import BY_KEY, BY_QUERY, FORWARD, Visibility
from loka_jax.pallas import tiles
from loka_jax.pallas.jagged_attention_launch import launch, layouts_of
from loka_jax.pallas.jagged_attention_layout import (
    BF16,
    LaunchLayout,
    Problem,
    TuningConfig,
    search_space,
    served_size,
    why_not,
    widened,
)

__all__ = ["Problem", "TuningConfig", "backward", "forward", "search_space"]
__all__ += ["served_size", "why_not", "widened"]


def forward(
    q: BFloat16[Array, "Q h d"],
    k: BFloat16[Array, "C h d"],
    v: BFloat16[Array, "C h d"],
    visible: Visibility,
    scale: float,
    *,
    config: TuningConfig | None = None,
    interpret: Any = None,
) -> tuple[BFloat16[Array, "Q h d"], Float[Array, "Q h"]]:
    """Returns the outputs, and lse in float32.

    Sums are float32; p is rounded to bfloat16 for its product. A query that sees no key
    gets zeros.

    Args:
        scale: above 0.

    Raises:
        ValueError: if heads are not served (see `why_not`), or the config does not fit.
    """
    heads = tuple(map(Heads.of, (q, k, v)))
    how = scale, 1, config, bool(interpret)
    layouts = layouts_of((FORWARD,), heads, *how, is_softmax=True)
    return _forward(layouts, (*heads, visible), interpret)


def backward(
    q: BFloat16[Array, "Q h d"],
    k: BFloat16[Array, "C h d"],
    v: BFloat16[Array, "C h d"],
    g: BFloat16[Array, "Q h d"],
    of_rows: tuple[Float[Array, "Q h"], Float[Array, "Q h"]],
    visible: Visibility,
    scale: float,
    *,
    interpret: Any = None,
) -> tuple[
    BFloat16[Array, "Q h d"], BFloat16[Array, "C h d"], BFloat16[Array, "C h d"]
]:
    """Returns dq, dk and dv.

    Sums are float32; p and the gradient of the scores are rounded to bfloat16 for their
    products.

    Args:
        g: the gradient of the outputs.
        of_rows: lse and delta.

    Raises:
        ValueError: if heads are not served.
    """
    heads = tuple(map(Heads.of, (q, k, v, g)))
    how = scale, 1, None, bool(interpret)
    layouts = layouts_of((BY_QUERY, BY_KEY), heads, *how, is_softmax=True)
    return _backward(layouts, (*heads, of_rows, visible), interpret)


@tiles.lowered_once
def _forward(layouts: tuple[LaunchLayout, ...], inputs, interpret):
    (layout,) = layouts
    (q, k, v), visible, count = _padded(layouts, inputs)
    rows = len(q.array)
    out = _empty(q)
    lse = jax.new_ref(lax.empty((q.count, rows), jnp.float32))
    layout = layout._replace(rows=rows)
    launch(layout, (q,), (k, v), visible, (out,), interpret, lse)
    return _found(out, count), jax.freeze(lse)[:, :count].T


@tiles.lowered_once
def _backward(layouts: tuple[LaunchLayout, ...], inputs, interpret):
    *heads, of_rows, visible = inputs
    keys = len(heads[1].array)
    (q, k, v, g), visible, count = _padded(layouts, (*heads, visible))
    stats = jnp.stack([x.T for x in of_rows], axis=1)
    stats = jnp.pad(stats, ((0, 0), (0, 0), (0, len(q.array) - count)))
    dq, dk, dv = map(_empty, (q, k, v))
    by_query, by_key = (q, g), (k, v)
    for layout in layouts:
        kind = layout.kind
        if kind.by_key:
            places = by_key, by_query, visible
            out = [dk] * kind.has_slopes + [dv] * kind.has_values
        else:
            places, out = (by_query, by_key, visible), [dq]
        layout = layout._replace(rows=len(places[0][0].array))
        launch(layout, *places, out, interpret, stats)
    return _found(dq, count), _found(dk, keys), _found(dv, keys)


def _padded(layouts: tuple[LaunchLayout, ...], inputs):
    """Returns heads and visibility in whole tiles, and the number of queries."""
    unit = math.lcm(*(layout.unit for layout in layouts))
    *heads, visible = inputs
    padded = [
        Heads(jnp.pad(x.array, ((0, -len(x.array) % unit), (0, 0))), 0, x.count, x.size)
        for x in heads
    ]
    sizes = (len(x.array) for x in padded[:2])
    return padded, jagged.padded(visible, *sizes), len(heads[0].array)


def _empty(like: Heads) -> Heads:
    """Returns a place for heads."""
    ref = jax.new_ref(lax.empty(like.array.shape, BF16))
    return Heads(ref, 0, like.count, like.size)


def _found(heads: Heads, count: int) -> jax.Array:
    """Returns the first rows that were written."""
    return jax.freeze(heads.array)[:count].reshape(count, heads.count, heads.size)
