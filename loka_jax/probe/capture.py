"""Captures the operands of a site, to check how well draws represent them."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax.probe.site import some_rows


class Operands(NamedTuple):
    """The operands of a site: lhs (m, k), rhs (k, n), and the gradient g (m, n)."""

    lhs: Float[Array, "m k"]
    rhs: Float[Array, "k n"]
    g: Float[Array, "m n"]


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
