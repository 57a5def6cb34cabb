"""Captures the operands of a site, to check how well draws represent them."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from loka_jax import fp8
from loka_jax.probe import live_errors
from loka_jax.probe.live_errors import LiveErrors, empty_errors
from loka_jax.probe.site import some_rows
from loka_jax.recipe import Recipe


class Operands(NamedTuple):
    """The operands of a site: lhs (m, k), rhs (k, n), and the gradient g (m, n)."""

    lhs: Float[Array, "m k"]
    rhs: Float[Array, "k n"]
    g: Float[Array, "m n"]


class Sample(NamedTuple):
    """Some rows of a site's operands, how far all rows reach, and errors of all rows.

    Attributes:
        operands: some rows of lhs and g, and rhs.
        amaxes: of lhs, rhs and g, over all rows.
        errors: of the products by the recipes of the `Sampler`, of all rows.
    """

    operands: Operands
    amaxes: Float[Array, "3"]
    errors: LiveErrors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capture:
    """An observer that returns the operands themselves, in float32.

    Attributes:
        max_rows: number of rows of a batch to keep, spread evenly over it.
    """

    max_rows: int = 1024

    def init(self, m: int, k: int, n: int) -> Operands:
        """Returns zeros in the shapes of the captured operands."""
        rows = min(m, self.max_rows)
        shapes = ((rows, k), (k, n), (rows, n))
        return Operands(*(jnp.zeros(shape, jnp.float32) for shape in shapes))

    def observe(
        self,
        stats: Operands,
        lhs: Float[Array, "m k"],
        rhs: Float[Array, "k n"],
        g: Float[Array, "m n"],
        scales: tuple[Float[Array, ""] | None, ...],
        axis_names: tuple[str, ...] = (),
    ) -> Operands:
        """Returns the operands of one batch; each device returns those it holds."""
        del stats, scales, axis_names
        lhs, g = (some_rows(x, self.max_rows) for x in (lhs, g))
        return Operands(*(x.astype(jnp.float32) for x in (lhs, rhs, g)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler:
    """An observer that returns a `Sample` of the operands.

    Attributes:
        recipes: of which errors are sampled, with the scales of the step.
        max_rows: number of rows of a batch to keep, spread evenly over it.
        copies: how many times as many rows drhs contracts, on other devices and in
            other microbatches: its relative L2 is extrapolated to them.
    """

    recipes: tuple[Recipe, ...] = ()
    max_rows: int = 1024
    copies: int = 1

    def init(self, m: int, k: int, n: int) -> Sample:
        """Returns zeros in the shapes of a sample."""
        capture = Capture(max_rows=self.max_rows)
        errors = empty_errors(len(self.recipes))
        return Sample(capture.init(m, k, n), jnp.zeros(3, jnp.float32), errors)

    def observe(
        self,
        stats: Sample,
        lhs: Float[Array, "m k"],
        rhs: Float[Array, "k n"],
        g: Float[Array, "m n"],
        scales: tuple[Float[Array, ""] | None, ...],
        axis_names: tuple[str, ...] = (),
    ) -> Sample:
        """Returns a sample of one batch, its amaxes those of all devices.

        Which elements of a product are computed follows from `stats.errors.steps`.
        """
        capture = Capture(max_rows=self.max_rows)
        operands = capture.observe(stats.operands, lhs, rhs, g, scales, axis_names)
        amaxes = jnp.stack([fp8.amax(x) for x in (lhs, rhs, g)])
        whole = live_errors.Operands(lhs, rhs, g, scales)
        errors = live_errors.live_errors(
            whole, self.recipes, stats.errors.steps, axis_names, self.copies
        )
        return Sample(operands, fp8.amax_over_devices(amaxes, axis_names), errors)


def at_step(stats: Any, step: Int[Array, ""]) -> Any:
    """Returns an observer's empty statistics, of which samples begin at a step.

    Looks at different steps then compute different elements of a product.
    """

    def begin(x: Any) -> Any:
        if not isinstance(x, Sample):
            return x
        steps = jnp.full_like(x.errors.steps, step)
        return x._replace(errors=x.errors._replace(steps=steps))

    return jax.tree.map(begin, stats, is_leaf=lambda x: isinstance(x, Sample))
