"""Launches of the kernel of `jagged_attention` and `jagged_softmax`."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from loka_jax.heads import Heads
from loka_jax.jagged import Pass, Visibility
from loka_jax.pallas import tiles
from loka_jax.pallas.interleaved import interleave
from loka_jax.pallas.jagged_attention_kernel import Kernel
from loka_jax.pallas.jagged_attention_layout import (
    LaunchLayout,
    Problem,
    TuningConfig,
    best_config,
    misfit,
    task_table,
    why_not,
)

_MAX_SIZE_OF_BOTH = 128  # of a head: more accumulators do not fit the registers


def layouts_of(
    kinds: Sequence[Pass],
    operands: Sequence[Heads],
    scale: float,
    max_length: int,
    config: TuningConfig | None,
    is_interpreted: bool,
    *,
    is_softmax: bool = False,
) -> tuple[LaunchLayout, ...]:
    """Returns the layouts of the launches of some passes.

    Raises:
        ValueError: if heads are not served, or the config does not fit.
    """
    (dtype,) = {z.array.dtype for z in operands}
    first, *_, last = operands
    rows, heads, size = len(first.array), first.count, first.size
    sizes: dict[str, Any] = dict(heads=heads, size=size, value_size=last.size)
    if (reason := why_not(Problem(**sizes, dtype=dtype))) is not None:
        raise ValueError(f"the kernel of attention does not serve {reason}.")
    layouts = tuple(
        LaunchLayout(
            *(kind, rows, heads, size, scale, max_length),
            config or best_config(kind, size, dtype),
            is_interpreted,
            dtype,
            is_softmax,
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


def in_whole_tiles(layouts: tuple[LaunchLayout, ...]) -> tuple[LaunchLayout, ...]:
    """Returns the layouts of as many rows as all have in whole tiles and blocks."""
    unit = math.lcm(*(layout.unit for layout in layouts))
    rows = -(-layouts[0].rows // unit) * unit
    return tuple(layout._replace(rows=rows) for layout in layouts)


def launch(
    layout: LaunchLayout,
    fixed: Sequence[Heads],
    streamed: Sequence[Heads],
    visible: Visibility,
    out: Sequence[Heads],
    interpret: Any,
    stats: Any = None,
) -> None:
    """Writes results to `out`, columns of references.

    Args:
        stats: of the queries of a softmax, see `Kernel`.
    """
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
    )(fixed, tuple(streamed), task_table(layout, visible), limits, refs, stats)
