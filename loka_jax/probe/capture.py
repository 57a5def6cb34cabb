"""The operands of a site themselves, to tell how well draws stand for them."""

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
    """An observer that keeps what it sees, in float32.

    Attributes:
        max_rows: rows of a batch that are kept, spread evenly over it.
    """

    max_rows: int = 1024

    def nothing(self, m: int, k: int, n: int) -> Operands:
        """Returns zeros in the shapes of what is kept."""
        rows = min(m, self.max_rows)
        shapes = ((rows, k), (k, n), (rows, n))
        return Operands(*(jnp.zeros(shape, jnp.float32) for shape in shapes))

    def observe(
        self,
        known: Operands,
        lhs: Float[Array, "m k"],
        rhs: Float[Array, "k n"],
        g: Float[Array, "m n"],
        scales: tuple[Float[Array, ""] | None, ...],
        axis_names: tuple[str, ...] = (),
    ) -> Operands:
        """Returns the operands of one batch; over devices each keeps its own."""
        del known, scales, axis_names
        lhs, g = (some_rows(x, self.max_rows) for x in (lhs, g))
        return Operands(*(x.astype(jnp.float32) for x in (lhs, rhs, g)))
