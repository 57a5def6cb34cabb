"""What an observed step tells of a site: its statistics, or its operands themselves.

`ProbeConfig.observe` returns the statistics of a batch alone, and `merge` adds them to
those so far, so that microbatches and devices may see parts of a batch. The weight is
the same for all parts, so its statistics are replaced. `Capture.observe` returns some
rows of the operands.
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
from loka_jax.probe import elements, live_errors, matrix_normal, moments, row_norms
from loka_jax.probe.elements import Elements
from loka_jax.probe.live_errors import LiveErrors
from loka_jax.probe.matrix_normal import MatrixNormal
from loka_jax.probe.moments import Moments
from loka_jax.probe.operands import Operands
from loka_jax.recipe import Recipe, get_recipe


class Rows(NamedTuple):
    """Statistics of an operand whose rows are samples.

    Attributes:
        norms: counts of rows by norm, see `row_norms`.
    """

    moments: Moments
    norms: Float[Array, "bins"]
    elements: Elements


class Weight(NamedTuple):
    """The distribution of a weight over the steps, and the last one's elements."""

    normal: MatrixNormal
    elements: Elements


class SiteStats(NamedTuple):
    """What is learned of a site: input, weight, gradient, errors of FP8 products."""

    lhs: Rows
    rhs: Weight
    g: Rows
    errors: LiveErrors


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """An observer that learns the statistics of sites.

    Attributes:
        max_rows: number of rows of a batch to observe, spread evenly over it.
        decay: factor on the weight of earlier rows at every observed batch; with 1 the
            first steps of training count as much as the last.
        recipes: whose products are multiplied on the operands themselves, to measure
            their errors: at every site, whatever runs there.
        moves_weight_covariances: False updates only the means of weights, at a fraction
            of the cost.
        copies: how many times as many rows drhs contracts, on other devices and in
            other microbatches: its relative L2 is extrapolated to them.
    """

    max_rows: int = 2048
    decay: float = 1.0
    recipes: tuple[str, ...] = live_errors.RECIPES
    moves_weight_covariances: bool = True
    copies: int = 1

    def __post_init__(self):  # noqa: D105
        require(self.max_rows >= 2, "max_rows", self.max_rows, "at least 2")
        require(0 < self.decay <= 1, "--probe.decay", self.decay, "in (0, 1]")
        for name in self.recipes:
            get_recipe(name)

    def init(self, m: int, k: int, n: int) -> SiteStats:
        """Returns the empty statistics of a site, whatever its m."""
        del m

        def rows(width: int) -> Rows:
            norms = jnp.zeros((row_norms.BINS,), jnp.float32)
            return Rows(
                moments=moments.empty_moments(width),
                norms=norms,
                elements=elements.empty_elements(),
            )

        weight = Weight(matrix_normal.empty_weights(k, n), elements.empty_elements())
        errors = live_errors.empty_errors(len(self.recipes))
        return SiteStats(rows(k), weight, rows(n), errors)

    def observe(
        self, stats: SiteStats, operands: Operands, axis_names: tuple[str, ...] = ()
    ) -> SiteStats:
        """Returns the statistics of one batch, and the updated ones of the weight.

        Args:
            stats: the statistics so far. Of lhs and g only their means are used, as
                centres; of the errors, the number of steps.
            axis_names: mesh axes over which the rows of the batch are spread; the
                result covers all of them.
        """
        recipes = [get_recipe(name) for name in self.recipes]
        errors = live_errors.live_errors(
            operands, recipes, stats.errors.steps, axis_names, self.copies
        )
        (lhs, rhs, g, *_), (of_lhs, of_rhs, of_g) = operands, operands.scales
        # Materialized once; otherwise every reduction would compute them again.
        lhs, g = jax.lax.optimization_barrier(
            tuple(some_rows(x, self.max_rows) for x in (lhs, g))
        )
        normal = matrix_normal.update(
            stats.rhs.normal, rhs, moves_covariances=self.moves_weight_covariances
        )
        return SiteStats(
            lhs=_rows(stats.lhs, lhs, of_lhs, axis_names),
            rhs=Weight(normal, _elements(stats.rhs.elements, rhs, of_rhs, ())),
            g=_rows(stats.g, g, of_g, axis_names),
            errors=errors,
        )


def merge(stats: SiteStats, batch: SiteStats, decay: float = 1.0) -> SiteStats:
    """Returns the statistics after a batch, or part of one, was observed.

    `decay` is the factor on the weight of what was seen earlier. Of several uses of a
    site in a step `batch` is the sum; what differs between their means is left out of
    the scatter.
    """
    uses = batch.errors.steps

    def rows(a: Rows, b: Rows) -> Rows:
        count = b.moments.count
        factor = jnp.where(count > 0, decay, 1.0)
        mean = b.moments.mean / jnp.maximum(count, 1)  # `_rows` tells the sum
        return Rows(
            moments=moments.merge(a.moments, b.moments._replace(mean=mean), factor),
            norms=factor * a.norms + b.norms,
            elements=elements.merge(a.elements, elements.of_uses(b.elements, uses)),
        )

    def weight(earlier: Array, told: Array) -> Array:
        return jnp.where(uses > 0, told / jnp.maximum(uses, 1), earlier)

    normal = jax.tree.map(weight, stats.rhs.normal, batch.rhs.normal)
    is_seen = batch.rhs.elements.count > 0
    last = batch.rhs.elements.values / jnp.maximum(uses, 1)
    last = jnp.where(is_seen, last, stats.rhs.elements.values)
    return SiteStats(
        lhs=rows(stats.lhs, batch.lhs),
        rhs=Weight(normal, Elements(last)),
        g=rows(stats.g, batch.g),
        errors=live_errors.merge(stats.errors, batch.errors, decay),
    )


class Sample(NamedTuple):
    """Some rows of a site's operands, in float32, and the errors of all rows."""

    operands: Operands
    errors: LiveErrors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capture:
    """An observer that returns the operands themselves.

    Attributes:
        max_rows: number of rows of a batch to keep, spread evenly over it; each device
            keeps some of those it holds.
        recipes: of which errors are measured, with the scales of the step.
        copies: how many times as many rows drhs contracts, on other devices and in
            other microbatches: its relative L2 is extrapolated to them.
    """

    max_rows: int = 1024
    recipes: tuple[Recipe, ...] = ()
    copies: int = 1

    def init(self, m: int, k: int, n: int) -> Sample:
        """Returns zeros in the shapes of a sample."""
        rows = min(m, self.max_rows)
        shapes = (rows, k), (k, n), (rows, n), (3,), (3,)
        operands = Operands(*(jnp.zeros(shape, jnp.float32) for shape in shapes))
        return Sample(operands, live_errors.empty_errors(len(self.recipes)))

    def observe(
        self, stats: Sample, operands: Operands, axis_names: tuple[str, ...] = ()
    ) -> Sample:
        """Returns a sample of one batch.

        Which elements of a product are computed follows from `stats.errors.steps`.
        """
        errors = live_errors.live_errors(
            operands, self.recipes, stats.errors.steps, axis_names, self.copies
        )
        kept = operands._replace(
            lhs=some_rows(operands.lhs, self.max_rows).astype(jnp.float32),
            rhs=operands.rhs.astype(jnp.float32),
            g=some_rows(operands.g, self.max_rows).astype(jnp.float32),
        )
        return Sample(kept, errors)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorsAlone:
    """An observer that measures the errors of some recipes' products, nothing else.

    Attributes:
        recipes: of which errors are measured, with the scales of the step.
        decay, copies: as those of `ProbeConfig`.
    """

    recipes: tuple[str, ...] = live_errors.RECIPES
    decay: float = 1.0
    copies: int = 1

    def init(self, m: int, k: int, n: int) -> LiveErrors:
        """Returns the errors before the first step, whatever the sizes."""
        del m, k, n
        return live_errors.empty_errors(len(self.recipes))

    def observe(
        self, stats: LiveErrors, operands: Operands, axis_names: tuple[str, ...] = ()
    ) -> LiveErrors:
        """Returns the errors of one batch; of `stats` the number of steps is read."""
        recipes = [get_recipe(name) for name in self.recipes]
        return live_errors.live_errors(
            operands, recipes, stats.steps, axis_names, self.copies
        )


def errors_of(stats: SiteStats | LiveErrors) -> LiveErrors:
    """Returns the errors among what is learned of a site."""
    return stats if isinstance(stats, LiveErrors) else stats.errors


def some_rows(x: Float[Array, "m k"], limit: int) -> Float[Array, "r k"]:
    """Returns up to `limit` rows, spread evenly."""
    size = x.shape[0]
    if size <= limit:
        return x
    if size % limit == 0:  # a slice needs no gather
        return x[:: size // limit]
    return x[np.arange(limit) * size // limit]


def _rows(earlier: Rows, x: Float[Array, "m k"], stored, axis_names) -> Rows:
    """Returns the statistics of the rows of all devices, empty if not finite."""
    if x.shape[0] == 0:
        return jax.tree.map(jnp.zeros_like, earlier)
    norms = row_norms.norms_of(x, earlier.moments.mean)
    seen = moments.moments_of(x, earlier.moments.scatter.shape[-1], axis_names)
    batch = Rows(
        # A sum, which adds up with those of other uses of the site.
        moments=seen._replace(mean=seen.count * seen.mean),
        norms=jax.lax.psum(norms, axis_names),
        elements=_elements(earlier.elements, x, stored, axis_names),
    )
    # `_elements` returns a count of zero for rows that are not finite.
    is_finite = batch.elements.count > 0
    return jax.tree.map(lambda value: jnp.where(is_finite, value, 0.0), batch)


def _elements(
    earlier: Elements, x: Array, stored: Float[Array, ""], axis_names: tuple[str, ...]
) -> Elements:
    """Returns the statistics of an operand's elements, of none if it is not finite."""
    if x.size == 0:
        return elements.empty_elements()
    amax = fp8.amax_over_devices(elements.amax_of(x), axis_names)
    current = fp8.compute_scale_inv(amax, E4M3)
    cast = fp8.cast(x, jnp.where(stored > 0, stored, current), E4M3)
    batch = elements.elements_of(x, cast, centre=earlier.mean, axis_names=axis_names)
    is_finite = jnp.all(jnp.isfinite(batch.values))
    return Elements(jnp.where(is_finite, batch.values, 0.0))
