"""One kernel for the passes of attention over jagged rows, see `jagged.Pass`.

    slopes  (silu'(S) * b y^T) x scale / N
    values  silu(S) y / N               S = scale a x^T, where a query sees a key

A CTA takes tiles of fixed rows (a, b) of one head, 64 rows a warpgroup, whoever they
belong to. A producer warpgroup streams by TMA the blocks (x, y) that some of them see.
Scores and what follows stay in registers, which are an operand of the second product.
silu and its slope come from one tanh:

    silu(2 h) = h + h t        2 silu'(2 h) = (1 + t) (1 + h - h t)        t = tanh h

In FP8, forward only, x comes with its rows interleaved, see `interleaved`, and y by
columns, as `wgmma` takes it.

Blocks that all see need no mask. Tiles with the most work go first, and every other
round in reverse, so that all CTAs end together. Each result is written once: there are
no atomics, and launches agree bit by bit.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float

from loka_jax import jagged
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
    search_space,
    task_table,
    why_not,
)

__all__ = ["Problem", "TuningConfig", "attend", "search_space", "why_not"]

_MAX_SIZE_OF_BOTH = 128  # of a head: more accumulators do not fit the registers


def attend(
    kind: Pass,
    fixed: tuple[Float[Array, "C h d"], ...],
    streamed: tuple[Float[Array, "C h d"], ...],
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
    (dtype,) = {z.dtype for z in (*fixed, *streamed)}
    rows, heads, size = fixed[0].shape
    sizes = dict(heads=heads, size=size, value_size=streamed[1].shape[-1])
    reason = why_not(Problem(**sizes, dtype=dtype))
    if reason is not None:
        raise ValueError(f"pallas jagged_attention does not serve {reason}.")
    if kind.has_slopes and kind.has_values and size > _MAX_SIZE_OF_BOTH:
        rest: Any = streamed, visible
        how: dict[str, Any] = dict(scale=scale, max_length=max_length)
        how |= dict(config=config, interpret=interpret)
        slopes = attend(kind._replace(has_values=False), fixed, *rest, **how)
        return slopes + attend(kind._replace(has_slopes=False), fixed[:1], *rest, **how)
    config, is_interpreted = config or best_config(kind, size, dtype), bool(interpret)
    sizes = rows, heads, size, scale, max_length
    layout = LaunchLayout(kind, *sizes, config, is_interpreted, dtype)
    reason = misfit(layout)
    if reason is not None:
        raise ValueError(f"{layout.config} does not fit: {reason}.")
    return _launch(layout, (fixed, streamed, visible), interpret)


@tiles.lowered_once
def _launch(layout: LaunchLayout, inputs, interpret):
    fixed, streamed, visible = inputs
    rows = [*fixed, *streamed]
    if pad := layout.padded_rows - layout.rows:
        rows = [jnp.pad(z, ((0, pad), (0, 0), (0, 0))) for z in rows]
        visible = jagged.padded(visible, layout.padded_rows)
    if layout.is_fp8:
        a, x, y = rows
        rows = [a, interleave(x), y.transpose((1, 2, 0))]
    limits = jax.tree.leaves(visible._replace(seen_by=()))
    out = plgpu.kernel(
        Kernel(layout).body,
        out_type=layout.results(),
        scratch_types=layout.scratch(),
        grid=(layout.ctas,),
        grid_names=("cta",),
        num_threads=layout.config.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=tiles.compiler_params(),
        interpret=interpret,
    )(*rows, task_table(layout, visible), *limits)
    return tuple(z[: layout.rows] for z in out)
