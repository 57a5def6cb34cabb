"""One kernel for the passes of attention over jagged rows, see `jagged.Pass`.

    slopes  (silu'(S) * b y^T) x scale / N
    values  silu(S) y / N               S = scale a x^T, where a query sees a key

A CTA takes tiles of fixed rows (a, b) of one head, 64 rows a warpgroup, whoever they
belong to. A producer warpgroup streams by TMA the blocks (x, y) that some of them see.
Scores and what follows stay in registers, which are an operand of the second product.
silu and its slope come from one tanh:

    silu(2 h) = h + h t        2 silu'(2 h) = (1 + t) (1 + h - h t)        t = tanh h

TMA reads the columns of a head from arrays that hold others, too, and writes results to
columns: what a product returns is not taken apart, nor is its gradient put together. In
FP8, forward only, x comes with its rows interleaved, see `interleaved`, and y by
columns, as `wgmma` takes it.

Blocks that all see need no mask. Tiles with the most work go first, and every other
round in reverse, so that all CTAs end together. Each result is written once: there are
no atomics, and launches agree bit by bit.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16

from loka_jax import jagged
from loka_jax.heads import Heads, Qkv
from loka_jax.jagged import BY_KEY, BY_QUERY, Pass, Visibility
from loka_jax.pallas import tiles
from loka_jax.pallas.jagged_attention_launch import in_whole_tiles, launch, layouts_of
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

__all__ = ["Problem", "TuningConfig", "attend", "gradients", "search_space"]
__all__ += ["served_size", "why_not", "widened"]


def attend(
    kind: Pass,
    fixed: tuple[Heads, ...],
    streamed: tuple[Heads, ...],
    visible: Visibility,
    *,
    scale: float,
    max_length: int,
    config: TuningConfig | None = None,
    interpret: Any = None,
) -> tuple[BFloat16[Array, "C h d"], ...]:
    """Returns the wanted ones of slopes and values.

    Sums are float32; silu(S) and its slope times `b y^T` are rounded to the dtype of
    the rows, bfloat16, or E4M3 in the forward pass.

    Args:
        fixed: a, and b where slopes are wanted.
        streamed: x and y.

    Raises:
        ValueError: if heads are not served (see `why_not`), or the config does not fit.
    """
    numbers = scale, max_length, config, bool(interpret)
    layouts = layouts_of((kind,), (*fixed, *streamed), *numbers)
    inputs = fixed, streamed, visible
    return sum((_attend(x, inputs, interpret) for x in layouts), start=())


def gradients(
    rows: Qkv,
    gradient: BFloat16[Array, "C h d"],
    visible: Visibility,
    *,
    scale: float,
    max_length: int,
    into: BFloat16[Array, "C columns"] | None = None,
    interpret: Any = None,
) -> Qkv:
    """Returns the gradients of q, k and v, given that of the values.

    They have the places of q, k and v in the rows.

    Args:
        into: what other columns have, of rows in one array; any if None.

    Raises:
        ValueError: if heads are not served.
    """
    numbers = scale, max_length, None, bool(interpret)
    operands = *rows.parts(), Heads.of(gradient)
    layouts = layouts_of((BY_QUERY, BY_KEY), operands, *numbers)
    return _gradients(layouts, (rows, gradient, into, visible), interpret)


@tiles.lowered_once
def _attend(layout: LaunchLayout, inputs, interpret):
    count, (layout,) = layout.rows, in_whole_tiles((layout,))
    fixed, streamed, visible = _padded(inputs, count, layout.rows)
    shape = layout.rows, layout.heads * layout.size
    refs = [jax.new_ref(lax.empty(shape, BF16)) for _ in layout.factors()]
    out = [Heads(ref, 0, layout.heads, layout.size) for ref in refs]
    launch(layout, fixed, streamed, visible, out, interpret)
    results = (jax.freeze(ref)[:count] for ref in refs)
    return tuple(x.reshape(count, layout.heads, layout.size) for x in results)


@tiles.lowered_once
def _gradients(layouts: tuple[LaunchLayout, ...], inputs, interpret):
    count, layouts = layouts[0].rows, in_whole_tiles(layouts)
    rows, gradient, into, visible = _padded(inputs, count, layouts[0].rows)
    if into is None:
        out = jax.tree.map(lambda x: lax.empty(x.shape, BF16), rows)
    else:
        out = dataclasses.replace(rows, arrays=(into,))
    refs = jax.tree.map(jax.new_ref, out)
    (q, k, v), (dq, dk, dv) = rows.parts(), refs.parts()
    by_query, by_key = (q, Heads.of(gradient)), (k, v)
    for layout in layouts:
        kind = layout.kind
        if kind.by_key:
            out = [dk] * kind.has_slopes + [dv] * kind.has_values
            launch(layout, by_key, by_query, visible, out, interpret)
        else:
            launch(layout, by_query, by_key, visible, [dq], interpret)
    return jax.tree.map(lambda ref: jax.freeze(ref)[:count], refs)


def _padded(inputs, count: int, num_rows: int):
    """Returns inputs, visibility last, of more rows."""
    if num_rows == count:
        return inputs
    *arrays, visible = inputs
    pad = lambda x: jnp.pad(x, ((0, num_rows - count), *[(0, 0)] * (x.ndim - 1)))  # noqa: E731
    return *jax.tree.map(pad, arrays), jagged.padded(visible, num_rows)
