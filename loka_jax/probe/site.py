"""Statistics of one site: of its input rows, its weight, and its output's gradient.

`observe` returns the statistics of a batch alone, and `merge` adds them to those so
far, so that microbatches and devices may see parts of a batch. The weight is the same
for all parts, so its statistics are replaced.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from loka_jax import fp8
from loka_jax.fp8 import E4M3
from loka_jax.options import require
from loka_jax.probe import (
    live_errors,
    matrix_normal,
    moments,
    row_norms,
    tails,
)
from loka_jax.probe.live_errors import LiveErrors
from loka_jax.probe.matrix_normal import MatrixNormal
from loka_jax.probe.moments import Moments
from loka_jax.probe.row_norms import RowNorms
from loka_jax.probe.tails import Tails
from loka_jax.recipe import get_recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """How sites are observed in one step.

    Attributes:
        max_rows: number of rows of a batch to observe, spread evenly over it.
        decay: factor on the weight of earlier rows at every observed batch; with 1 the
            first steps of training count as much as the last.
        recipes: whose products are multiplied on the operands themselves, to measure
            their errors: at every site, whatever runs there.
        moves_weight_covariances: False updates only the means of weights, at a fraction
            of the cost.
    """

    max_rows: int = 2048
    decay: float = 1.0
    recipes: tuple[str, ...] = live_errors.RECIPES
    moves_weight_covariances: bool = True

    def __post_init__(self):  # noqa: D105
        require(self.max_rows >= 2, "max_rows", self.max_rows, "at least 2")
        require(0 < self.decay <= 1, "--probe.decay", self.decay, "in (0, 1]")
        for name in self.recipes:
            get_recipe(name)

    def init(self, m: int, k: int, n: int) -> "SiteStats":
        """Returns the empty statistics of a site, whatever its m."""
        del m
        return empty_stats(k, n, self)

    def observe(
        self,
        stats: "SiteStats",
        lhs: Float[Array, "m k"],
        rhs: Float[Array, "k p"],
        g: Float[Array, "m n"],
        scales: tuple[Float[Array, ""] | None, ...],
        axis_names: tuple[str, ...] = (),
    ) -> "SiteStats":
        """Returns the statistics of one batch; see the function `observe`."""
        return observe(stats, lhs, rhs, g, scales, self, axis_names)


class Rows(NamedTuple):
    """Statistics of an operand whose rows are samples."""

    moments: Moments
    norms: RowNorms
    tails: Tails


class Weight(NamedTuple):
    """Statistics of a weight.

    Attributes:
        normal: its distribution over the steps.
        tails: the tails of the last weight seen.
    """

    normal: MatrixNormal
    tails: Tails


class SiteStats(NamedTuple):
    """Statistics of a site with lhs (m, k), rhs (k, n) and product (m, n).

    Attributes:
        lhs: those of the input's rows.
        rhs: those of the weight, or of its columns if every sample has its own.
        g: those of the rows of the product's gradient.
        errors: of its products in FP8; of no recipe if every sample has its own weight.
    """

    lhs: Rows
    rhs: Weight | Rows
    g: Rows
    errors: LiveErrors


def weight_of(stats: SiteStats) -> Weight:
    """Returns the statistics of a weight that all samples share."""
    assert isinstance(stats.rhs, Weight)
    return stats.rhs


def empty_stats(
    k: int, n: int, config: ProbeConfig, *, is_per_sample: bool = False
) -> SiteStats:
    """Returns the empty statistics of a site.

    Args:
        k, n: sizes of its weight.
        config: how it is observed.
        is_per_sample: whether every sample has a weight of its own.
    """

    def rows(width):
        empty = moments.empty_moments(width)
        return Rows(empty, row_norms.empty_norms(), tails.empty_tails())

    if is_per_sample:
        return SiteStats(rows(k), rows(k), rows(n), live_errors.empty_errors(0))
    weight = matrix_normal.empty_weights(k, n)
    return SiteStats(
        lhs=rows(k),
        rhs=Weight(weight, tails.empty_tails()),
        g=rows(n),
        errors=live_errors.empty_errors(len(config.recipes)),
    )


def observe(
    stats: SiteStats,
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "k p"],
    g: Float[Array, "m n"],
    scales: tuple[Float[Array, ""] | None, ...],
    config: ProbeConfig,
    axis_names: tuple[str, ...] = (),
) -> SiteStats:
    """Returns the statistics of one batch, and the updated ones of the weight.

    Args:
        stats: the statistics so far. Of lhs and g only their means are used, as
            centres; of the errors, the number of steps.
        lhs, rhs, g: the operands of a step. If every sample has a weight of its own,
            the samples' lhs and g are stacked, and their rhs stand side by side.
        scales: `scale_inv` with which lhs, rhs and g are cast; None, or 0, to compute
            it from the operand's amax.
        config: how sites are observed.
        axis_names: mesh axes over which the rows of the batch are spread; the result
            covers all of them.
    """
    operands = live_errors.Operands(lhs, rhs, g, scales)
    errors = _errors(stats.errors, operands, config, axis_names)
    # Materialized once; otherwise every reduction would compute them again.
    lhs, g = jax.lax.optimization_barrier(
        tuple(some_rows(x, config.max_rows) for x in (lhs, g))
    )
    batch = SiteStats(
        lhs=_rows(stats.lhs, lhs, scales[0], E4M3, axis_names),
        rhs=_rhs(stats.rhs, rhs, scales[1], config, axis_names),
        g=_rows(stats.g, g, scales[2], E4M3, axis_names),
        errors=errors,
    )
    return _merge_over_devices(batch, axis_names)


def _errors(
    earlier: LiveErrors,
    operands: live_errors.Operands,
    config: ProbeConfig,
    axis_names: tuple[str, ...],
) -> LiveErrors:
    if not earlier.moments.size:
        return earlier
    recipes = [get_recipe(name) for name in config.recipes]
    return live_errors.live_errors(operands, recipes, earlier.steps, axis_names)


def _rhs(stats: Weight | Rows, rhs, scale_inv, config, axis_names) -> Weight | Rows:
    if isinstance(stats, Rows):
        columns = some_rows(rhs.T, config.max_rows)
        return _rows(stats, columns, scale_inv, E4M3, axis_names)
    moves = config.moves_weight_covariances
    normal = matrix_normal.update(stats.normal, rhs, moves_covariances=moves)
    return Weight(normal, _tails(stats.tails, rhs, scale_inv, E4M3, ()))


def merge(stats: SiteStats, batch: SiteStats, config: ProbeConfig) -> SiteStats:
    """Returns the statistics after a batch, or part of one, was observed."""

    def rows(a: Rows, b: Rows) -> Rows:
        factor = jnp.where(b.moments.count > 0, config.decay, 1.0)
        kept = moments.decay(a.moments, factor)
        norms = row_norms.RowNorms(factor * a.norms.counts)
        return Rows(
            moments.merge(kept, b.moments),
            row_norms.merge(norms, b.norms),
            tails.merge(a.tails, b.tails),
        )

    def rhs(a: Weight | Rows, b: Weight | Rows) -> Weight | Rows:
        if isinstance(a, Rows):
            assert isinstance(b, Rows)
            return rows(a, b)
        assert isinstance(b, Weight)
        is_seen = b.tails.count > 0
        last = jnp.where(is_seen, b.tails.values, a.tails.values)
        return Weight(b.normal, Tails(last))

    return SiteStats(
        lhs=rows(stats.lhs, batch.lhs),
        rhs=rhs(stats.rhs, batch.rhs),
        g=rows(stats.g, batch.g),
        errors=live_errors.merge(stats.errors, batch.errors, config.decay),
    )


def _merge_over_devices(batch: SiteStats, axis_names: tuple[str, ...]) -> SiteStats:
    def rows(x: Rows) -> Rows:
        return Rows(
            moments.merge_over_devices(x.moments, axis_names),
            row_norms.merge_over_devices(x.norms, axis_names),
            tails.merge_over_devices(x.tails, axis_names),
        )

    rhs = rows(batch.rhs) if isinstance(batch.rhs, Rows) else batch.rhs
    return batch._replace(lhs=rows(batch.lhs), rhs=rhs, g=rows(batch.g))


def some_rows(x: Float[Array, "m k"], limit: int) -> Float[Array, "r k"]:
    """Returns up to `limit` rows, spread evenly."""
    size = x.shape[0]
    if size <= limit:
        return x
    if size % limit == 0:  # a slice needs no gather
        return x[:: size // limit]
    return x[np.arange(limit) * size // limit]


def _rows(stats: Rows, x: Float[Array, "m k"], scale_inv, dtype, axis_names) -> Rows:
    """Returns the statistics of the rows of `x`, empty if they are not finite."""
    size = stats.moments.scatter.shape[-1]
    if x.shape[0] == 0:
        return jax.tree.map(jnp.zeros_like, stats)
    batch = Rows(
        moments.moments_of(x, size),
        row_norms.norms_of(x, stats.moments.mean),
        _tails(stats.tails, x, scale_inv, dtype, axis_names),
    )
    # `_tails` returns a count of zero for rows that are not finite.
    is_finite = batch.tails.count > 0
    return jax.tree.map(lambda value: jnp.where(is_finite, value, 0.0), batch)


def _tails(
    earlier: Tails,
    x: Array,
    scale_inv: Float[Array, ""] | None,
    dtype,
    axis_names: tuple[str, ...],
) -> Tails:
    """Returns the tails of an operand, empty if it is not finite."""
    if x.size == 0:
        return tails.empty_tails()
    amax = fp8.amax_over_devices(tails.amax_of(x), axis_names)
    current = fp8.compute_scale_inv(amax, dtype)
    if scale_inv is None:
        scale_inv = current
    else:
        scale_inv = jnp.where(scale_inv > 0, scale_inv, current)
    batch = tails.tails_of(x, fp8.cast(x, scale_inv, dtype), centre=earlier.mean)
    return Tails(jnp.where(tails.is_finite(batch), batch.values, 0.0))
