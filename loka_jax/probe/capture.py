"""Captures the operands of a site, to check how well draws represent them."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax import fp8
from loka_jax.probe.site import some_rows


class Operands(NamedTuple):
    """The operands of a site: lhs (m, k), rhs (k, n), and the gradient g (m, n)."""

    lhs: Float[Array, "m k"]
    rhs: Float[Array, "k n"]
    g: Float[Array, "m n"]


class Sample(NamedTuple):
    """Some rows of a site's operands, and how far all rows reach.

    Attributes:
        operands: some rows of lhs and g, and rhs.
        amaxes: of lhs, rhs and g, over all rows.
    """

    operands: Operands
    amaxes: Float[Array, "3"]


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
        max_rows: number of rows of a batch to keep, spread evenly over it.
    """

    max_rows: int = 1024

    def init(self, m: int, k: int, n: int) -> Sample:
        """Returns zeros in the shapes of a sample."""
        capture = Capture(max_rows=self.max_rows)
        return Sample(capture.init(m, k, n), jnp.zeros(3, jnp.float32))

    def observe(
        self,
        stats: Sample,
        lhs: Float[Array, "m k"],
        rhs: Float[Array, "k n"],
        g: Float[Array, "m n"],
        scales: tuple[Float[Array, ""] | None, ...],
        axis_names: tuple[str, ...] = (),
    ) -> Sample:
        """Returns a sample of one batch, its amaxes those of all devices."""
        capture = Capture(max_rows=self.max_rows)
        operands = capture.observe(stats.operands, lhs, rhs, g, scales, axis_names)
        amaxes = jnp.stack([fp8.amax(x) for x in (lhs, rhs, g)])
        return Sample(operands, fp8.amax_over_devices(amaxes, axis_names))
