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
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16

from loka_jax import jagged
from loka_jax.heads import Heads, Qkv
from loka_jax.jagged import BY_KEY, BY_QUERY, Pass, Visibility
from loka_jax.pallas import tiles
from loka_jax.pallas.interleaved import interleave
from loka_jax.pallas.jagged_attention_kernel import Kernel
from loka_jax.pallas.jagged_attention_layout import (
    BF16,
    LaunchLayout,
    Problem,
    TuningConfig,
    best_config,
    misfit,
    search_space,
    task_table,
    why_not,
)

__all__ = ["Problem", "TuningConfig", "attend", "gradients", "search_space", "why_not"]

_MAX_SIZE_OF_BOTH = 128  # of a head: more accumulators do not fit the registers


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
    layouts = _layouts((kind,), (*fixed, *streamed), *numbers)
    inputs = fixed, streamed, visible
    return sum((_attend(x, inputs, interpret) for x in layouts), start=())


def gradients(
    rows: Qkv,
    gradient: BFloat16[Array, "C h d"],
    visible: Visibility,
    *,
    scale: float,
    max_length: int,
    interpret: Any = None,
) -> Qkv:
    """Returns the gradients of q, k and v, given that of the values.

    They have the places of q, k and v in the rows; what other columns have is any.

    Raises:
        ValueError: if heads are not served.
    """
    numbers = scale, max_length, None, bool(interpret)
    operands = *rows.parts(), Heads.of(gradient)
    layouts = _layouts((BY_QUERY, BY_KEY), operands, *numbers)
    return _gradients(layouts, (rows, gradient, visible), interpret)


def _layouts(
    kinds: Sequence[Pass],
    operands: Sequence[Heads],
    scale: float,
    max_length: int,
    config: TuningConfig | None,
    is_interpreted: bool,
) -> tuple[LaunchLayout, ...]:
    """Returns the layouts of the launches of some passes."""
    (dtype,) = {z.array.dtype for z in operands}
    first, *_, last = operands
    rows, heads, size = len(first.array), first.count, first.size
    sizes: dict[str, Any] = dict(heads=heads, size=size, value_size=last.size)
    if (reason := why_not(Problem(**sizes, dtype=dtype))) is not None:
        raise ValueError(f"pallas jagged_attention does not serve {reason}.")
    layouts = tuple(
        LaunchLayout(
            *(kind, rows, heads, size, scale, max_length),
            config or best_config(kind, size, dtype),
            is_interpreted,
            dtype,
        )
        for one in kinds
        for kind in _launches(one, size)
    )
    for layout in layouts:
        if (reason := misfit(layout)) is not None:
            raise ValueError(f"{layout.config} does not fit: {reason}.")
    return layouts


def _launches(kind: Pass, size: int) -> tuple[Pass, ...]:
    """Returns a pass, or one of each of its results where heads are large."""
    if kind.has_slopes and kind.has_values and size > _MAX_SIZE_OF_BOTH:
        return kind._replace(has_values=False), kind._replace(has_slopes=False)
    return (kind,)


@tiles.lowered_once
def _attend(layout: LaunchLayout, inputs, interpret):
    count, (layout,) = layout.rows, _in_whole_tiles((layout,))
    fixed, streamed, visible = _padded(inputs, count, layout.rows)
    shape = layout.rows, layout.heads * layout.size
    refs = [jax.new_ref(lax.empty(shape, BF16)) for _ in layout.factors()]
    out = [Heads(ref, 0, layout.heads, layout.size) for ref in refs]
    _launch(layout, fixed, streamed, visible, out, interpret)
    results = (jax.freeze(ref)[:count] for ref in refs)
    return tuple(x.reshape(count, layout.heads, layout.size) for x in results)


@tiles.lowered_once
def _gradients(layouts: tuple[LaunchLayout, ...], inputs, interpret):
    count, layouts = layouts[0].rows, _in_whole_tiles(layouts)
    rows, gradient, visible = _padded(inputs, count, layouts[0].rows)
    refs = jax.tree.map(lambda x: jax.new_ref(lax.empty(x.shape, BF16)), rows)
    (q, k, v), (dq, dk, dv) = rows.parts(), refs.parts()
    by_query, by_key = (q, Heads.of(gradient)), (k, v)
    for layout in layouts:
        kind = layout.kind
        if kind.by_key:
            out = [dk] * kind.has_slopes + [dv] * kind.has_values
            _launch(layout, by_key, by_query, visible, out, interpret)
        else:
            _launch(layout, by_query, by_key, visible, [dq], interpret)
    return jax.tree.map(lambda ref: jax.freeze(ref)[:count], refs)


def _in_whole_tiles(layouts: tuple[LaunchLayout, ...]) -> tuple[LaunchLayout, ...]:
    """Returns the layouts of as many rows as all have in whole tiles and blocks."""
    unit = math.lcm(*(layout.unit for layout in layouts))
    rows = -(-layouts[0].rows // unit) * unit
    return tuple(layout._replace(rows=rows) for layout in layouts)


def _padded(inputs, count: int, num_rows: int):
    """Returns inputs, visibility last, of more rows."""
    if num_rows == count:
        return inputs
    *arrays, visible = inputs
    pad = lambda x: jnp.pad(x, ((0, num_rows - count), *[(0, 0)] * (x.ndim - 1)))  # noqa: E731
    return *jax.tree.map(pad, arrays), jagged.padded(visible, num_rows)


def _launch(
    layout: LaunchLayout,
    fixed: Sequence[Heads],
    streamed: Sequence[Heads],
    visible: Visibility,
    out: Sequence[Heads],
    interpret: Any,
) -> None:
    """Writes results to `out`, columns of references."""
    fixed = tuple(fixed[: 1 + layout.kind.has_slopes])
    if layout.is_fp8:
        x, y = (z.alone() for z in streamed)
        turned = y.transpose((1, 2, 0)).reshape(-1, layout.rows)
        streamed = Heads.of(interleave(x)), Heads(turned, 0, layout.heads, layout.size)
    limits = jax.tree.leaves(visible._replace(seen_by=()))
    refs = list({id(z.array): z.array for z in out}.values())
    numbers = {id(ref): number for number, ref in enumerate(refs)}
    places = [dataclasses.replace(z, array=numbers[id(z.array)]) for z in out]
    plgpu.kernel(
        Kernel(layout, places).body,
        out_type=(),
        scratch_types=layout.scratch(),
        grid=(layout.ctas,),
        grid_names=("cta",),
        num_threads=layout.config.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=tiles.compiler_params(),
        interpret=interpret,
    )(fixed, tuple(streamed), task_table(layout, visible), limits, refs)
