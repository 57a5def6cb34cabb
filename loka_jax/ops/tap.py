"""Statistics of a site's operands from its backward pass.

Only the backward pass has lhs, rhs and the product's gradient together. So the
statistics are an input whose "gradient" is the statistics of this batch: differentiate
with respect to them, then merge.
"""

import functools
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float

from loka_jax.probe.operands import Operands, operands_of


@runtime_checkable
class Observer(Protocol):
    """An observer of sites; hashable, since it is static (`ProbeConfig`, `Capture`)."""

    def init(self, m: int, k: int, n: int) -> Any:
        """Returns the empty statistics of a site (m, k) x (k, n)."""
        ...

    def observe(
        self, stats: Any, operands: Operands, axis_names: tuple[str, ...]
    ) -> Any:
        """Returns the statistics of a batch, in a tree like that of `init`."""
        ...


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def tap(
    observer: Observer,
    axis_names: tuple[str, ...],
    out: Float[Array, "m n"],
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "k p"],
    scales: tuple[Float[Array, ""] | None, ...],
    stats: Any,
) -> Float[Array, "m n"]:
    """Returns `out` unchanged; the gradient of `stats` is the observer's result.

    Args:
        axis_names: mesh axes over which rows are spread, under `shard_map`.
        scales: of the casts of lhs, rhs and g, see `operands_of`.
        stats: the statistics of the site so far.
    """
    del observer, axis_names, lhs, rhs, scales, stats
    return out


def _forward(observer, axis_names, out, lhs, rhs, scales, stats):
    del observer, axis_names
    return out, (lhs, rhs, scales, stats)


def _backward(observer, axis_names, residuals, g):
    lhs, rhs, scales, stats = residuals
    operands = operands_of(lhs, rhs, g, scales, axis_names)
    batch = observer.observe(stats, operands, axis_names)
    return g, None, None, None, batch


tap.defvjp(_forward, _backward)


@jax.custom_vjp
def tell(out: Float[Array, "..."], seen: Any, stats: Any) -> Float[Array, "..."]:
    """Returns `out` unchanged; the gradient of `stats` is what was seen of the batch.

    Args:
        seen: a tree like `stats`, known in the forward pass.
    """
    del seen, stats
    return out


def _tell_forward(out, seen, stats):
    del stats
    return out, seen


def _tell_backward(seen, g):
    return g, None, seen


tell.defvjp(_tell_forward, _tell_backward)
