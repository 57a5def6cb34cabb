"""What is learned of one site: its rows, its weight, and the gradient of its product.

A batch is seen by itself (`observe`), then merged with what is known (`merge`), so that
microbatches and devices may see parts of it. The weight is the same for all of them,
and what is known of it is replaced.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax import fp8
from loka_jax.fp8 import E4M3, E5M2
from loka_jax.probe import blocks, matrix_normal, moments, row_norms, tails
from loka_jax.probe.matrix_normal import MatrixNormal
from loka_jax.probe.moments import Moments
from loka_jax.probe.row_norms import RowNorms
from loka_jax.probe.tails import Tails


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """How sites are observed.

    Attributes:
        max_rows: rows of a batch that are looked at, spread evenly over it.
        max_bytes: of each covariance; wider ones are kept in blocks.
        momentum: of a weight's covariances.
        mean_momentum: of its mean.
        weight_mean: "average", or "zero" for a weight whose covariances carry all.
        decay: weight that older rows keep whenever new ones come.
        moves_weight_covariances: False moves the means of weights alone, at a fraction
            of the cost.
    """

    max_rows: int = 2048
    max_bytes: int = blocks.MAX_BYTES
    momentum: float = matrix_normal.MOMENTUM
    mean_momentum: float = matrix_normal.MEAN_MOMENTUM
    weight_mean: Literal["average", "zero"] = "average"
    decay: float = 1.0
    moves_weight_covariances: bool = True

    def __post_init__(self):  # noqa: D105
        if not self.max_rows >= 2:
            raise ValueError(f"{self.max_rows=} must be at least 2.")
        for name in ("momentum", "mean_momentum"):
            value = getattr(self, name)
            if not 0 < value < 1:
                raise ValueError(f"{name}={value} must be above 0 and below 1.")
        if not 0 < self.decay <= 1:
            raise ValueError(f"{self.decay=} must be above 0 and at most 1.")

    def nothing(self, m: int, k: int, n: int) -> "SiteStats":
        """Returns what is known of a site before it ran; m does not matter."""
        del m
        return no_stats(k, n, self)

    def observe(
        self,
        known: "SiteStats",
        lhs: Float[Array, "m k"],
        rhs: Float[Array, "k p"],
        g: Float[Array, "m n"],
        scales: tuple[Float[Array, ""] | None, ...],
        axis_names: tuple[str, ...] = (),
    ) -> "SiteStats":
        """Returns the statistics of one batch, see `observe`."""
        return observe(known, lhs, rhs, g, scales, self, axis_names)


class Rows(NamedTuple):
    """What is known of an operand whose rows are samples."""

    moments: Moments
    norms: RowNorms
    tails: Tails


class Weight(NamedTuple):
    """What is known of a weight.

    Attributes:
        normal: its distribution over the steps.
        tails: of the last one seen.
    """

    normal: MatrixNormal
    tails: Tails


class SiteStats(NamedTuple):
    """What is known of a site with lhs (m, k), rhs (k, n), product (m, n).

    Attributes:
        lhs: of its rows.
        rhs: of its weight; of its columns where it differs from sample to sample.
        g: of the rows of its product's gradient.
    """

    lhs: Rows
    rhs: Weight | Rows
    g: Rows


def weight_of(stats: SiteStats) -> Weight:
    """Returns what is known of the weight of a site that has one for all samples."""
    assert isinstance(stats.rhs, Weight)
    return stats.rhs


def no_stats(
    k: int, n: int, config: ProbeConfig, *, is_per_sample: bool = False
) -> SiteStats:
    """Returns what is known of a site before it ran.

    Args:
        k, n: sizes of its weight.
        config: how it is observed.
        is_per_sample: its weight differs from sample to sample.
    """
    max_bytes = config.max_bytes

    def rows(width):
        known = moments.no_moments(width, max_bytes=max_bytes)
        return Rows(known, row_norms.no_norms(), tails.no_tails())

    if is_per_sample:
        return SiteStats(rows(k), rows(k), rows(n))
    weight = matrix_normal.no_weights(k, n, max_bytes=max_bytes)
    return SiteStats(rows(k), Weight(weight, tails.no_tails()), rows(n))


def observe(
    known: SiteStats,
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "k p"],
    g: Float[Array, "m n"],
    scales: tuple[Float[Array, ""] | None, ...],
    config: ProbeConfig,
    axis_names: tuple[str, ...] = (),
) -> SiteStats:
    """Returns the statistics of one batch, and what is known of the weight after it.

    Args:
        known: of the weight; else only its shapes count.
        lhs, rhs, g: the operands of a step, those of all samples below each other
            (beside each other for rhs) where the weight differs between them.
        scales: `scale_inv` that lhs, rhs and g were cast with; None for what their
            amaxes give.
        config: how sites are observed.
        axis_names: mesh axes over which the rows of the batch are spread; of all of
            them together it tells.
    """
    # Stored once: else every reduction makes them again from what they come from.
    lhs, g = jax.lax.optimization_barrier(
        tuple(some_rows(x, config.max_rows) for x in (lhs, g))
    )
    batch = SiteStats(
        lhs=_rows(known.lhs, lhs, scales[0], E4M3, axis_names),
        rhs=_rhs(known.rhs, rhs, scales[1], config, axis_names),
        g=_rows(known.g, g, scales[2], E5M2, axis_names),
    )
    return _merge_over_devices(batch, axis_names)


def _rhs(known: Weight | Rows, rhs, scale_inv, config, axis_names) -> Weight | Rows:
    if isinstance(known, Rows):
        columns = some_rows(rhs.T, config.max_rows)
        return _rows(known, columns, scale_inv, E4M3, axis_names)
    normal = matrix_normal.update(
        known.normal,
        rhs,
        momentum=config.momentum,
        mean_momentum=config.mean_momentum,
        mean=config.weight_mean,
        moves_covariances=config.moves_weight_covariances,
    )
    return Weight(normal, _tails(known.tails, rhs, scale_inv, E4M3, ()))


def merge(known: SiteStats, batch: SiteStats, config: ProbeConfig) -> SiteStats:
    """Returns what is known after a batch, or part of one, was observed."""

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
        rows(known.lhs, batch.lhs), rhs(known.rhs, batch.rhs), rows(known.g, batch.g)
    )


def _merge_over_devices(batch: SiteStats, axis_names: tuple[str, ...]) -> SiteStats:
    def rows(x: Rows) -> Rows:
        return Rows(
            moments.merge_over_devices(x.moments, axis_names),
            row_norms.merge_over_devices(x.norms, axis_names),
            tails.merge_over_devices(x.tails, axis_names),
        )

    rhs = rows(batch.rhs) if isinstance(batch.rhs, Rows) else batch.rhs
    return SiteStats(rows(batch.lhs), rhs, rows(batch.g))


def some_rows(x: Float[Array, "m k"], most: int) -> Float[Array, "r k"]:
    """Returns up to `most` rows, spread evenly."""
    stride = max(1, x.shape[0] // most)
    return x[::stride][:most]


def _rows(known: Rows, x: Float[Array, "m k"], scale_inv, dtype, axis_names) -> Rows:
    """Returns what some rows say, nothing if they are not finite."""
    size = known.moments.scatter.shape[-1]
    if x.shape[0] == 0:
        return jax.tree.map(jnp.zeros_like, known)
    found = Rows(
        moments.moments_of(x, size),
        row_norms.norms_of(x, known.moments.mean),
        _tails(known.tails, x, scale_inv, dtype, axis_names),
    )
    # Zeros are what `_tails` returns of rows that are not finite.
    is_known = found.tails.count > 0
    return jax.tree.map(lambda value: jnp.where(is_known, value, 0.0), found)


def _tails(
    known: Tails,
    x: Array,
    scale_inv: Float[Array, ""] | None,
    dtype,
    axis_names: tuple[str, ...],
) -> Tails:
    """Returns the tails of an operand, none if it is not finite."""
    if x.size == 0:
        return tails.no_tails()
    if scale_inv is None:
        amax = fp8.amax_over_devices(tails.amax_of(x), axis_names)
        scale_inv = fp8.compute_scale_inv(amax, dtype)
    found = tails.tails_of(x, fp8.cast(x, scale_inv, dtype), centre=known.mean)
    return Tails(jnp.where(tails.is_finite(found), found.values, 0.0))
