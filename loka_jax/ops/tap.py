"""Statistics of a site's operands out of a backward pass.

Only there are lhs, rhs and the product's gradient known together. So the statistics are
an input whose "gradient" is what this batch says: differentiate with respect to them,
then merge.
"""

import functools
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float


@runtime_checkable
class Observer(Protocol):
    """Who looks at sites; hashable, for it is static (`ProbeConfig`, `Capture`)."""

    def nothing(self, m: int, k: int, n: int) -> Any:
        """Returns what is known of a site (m, k) x (k, n) before it ran."""
        ...

    def observe(
        self,
        known: Any,
        lhs: Array,
        rhs: Array,
        g: Array,
        scales: tuple[Array | None, ...],
        axis_names: tuple[str, ...],
    ) -> Any:
        """Returns what a batch says, in a tree like that of `nothing`."""
        ...


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def tap(
    observer: Observer,
    axis_names: tuple[str, ...],
    out: Float[Array, "m n"],
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "k p"],
    scales: tuple[Float[Array, ""] | None, ...],
    known: Any,
) -> Float[Array, "m n"]:
    """Returns `out` as it is; the gradient of `known` is what the observer returns.

    Args:
        observer: who looks.
        axis_names: mesh axes over which rows are spread, under `shard_map`.
        out: the product `lhs @ rhs`.
        lhs, rhs: its operands; no gradient flows to them from here.
        scales: that the operands are cast with, see `probe.site.observe`.
        known: of the site.
    """
    del observer, axis_names, lhs, rhs, scales, known
    return out


def _forward(observer, axis_names, out, lhs, rhs, scales, known):
    del observer, axis_names
    return out, (lhs, rhs, scales, known)


def _backward(observer, axis_names, kept, g):
    lhs, rhs, scales, known = kept
    batch = observer.observe(known, lhs, rhs, g, scales, axis_names)
    return g, None, None, None, batch


tap.defvjp(_forward, _backward)
