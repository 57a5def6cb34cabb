"""Captures the operands of a site, and the errors of its products in one step."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax.probe import live_errors
from loka_jax.probe.live_errors import LiveErrors, Operands
from loka_jax.probe.site import some_rows
from loka_jax.recipe import Recipe


class Sample(NamedTuple):
    """Some rows of a site's operands, in float32, and errors of all rows.

    Attributes:
        operands: some rows of lhs and g, and rhs.
        errors: of the products by the recipes of the `Capture`, of all rows.
    """

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
        self,
        stats: Sample,
        lhs: Float[Array, "m k"],
        rhs: Float[Array, "k n"],
        g: Float[Array, "m n"],
        scales: tuple[Float[Array, ""] | None, ...],
        axis_names: tuple[str, ...] = (),
    ) -> Sample:
        """Returns a sample of one batch.

        Which elements of a product are computed follows from `stats.errors.steps`.
        """
        operands = live_errors.operands_of(lhs, rhs, g, scales, axis_names)
        errors = live_errors.live_errors(
            operands, self.recipes, stats.errors.steps, axis_names, self.copies
        )
        kept = operands._replace(
            lhs=some_rows(lhs, self.max_rows).astype(jnp.float32),
            rhs=rhs.astype(jnp.float32),
            g=some_rows(g, self.max_rows).astype(jnp.float32),
        )
        return Sample(kept, errors)
