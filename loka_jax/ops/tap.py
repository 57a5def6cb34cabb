"""Statistics of a site's operands out of a backward pass.

Only there are lhs, rhs and the product's gradient known together. So the statistics are
an input whose "gradient" is what this batch says: differentiate with respect to them,
then merge.
"""

import functools

import jax
from jaxtyping import Array, Float

from loka_jax.probe import site
from loka_jax.probe.site import ProbeConfig, SiteStats


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def tap(
    config: ProbeConfig,
    axis_names: tuple[str, ...],
    out: Float[Array, "m n"],
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "k n"],
    scales: Float[Array, "3"] | None,
    known: SiteStats,
) -> Float[Array, "m n"]:
    """Returns `out` as it is; the gradient of `known` is what `site.observe` returns.

    Args:
        config: how sites are observed.
        axis_names: mesh axes over which rows are spread, under `shard_map`.
        out: the product `lhs @ rhs`.
        lhs, rhs: its operands; no gradient flows to them from here.
        scales: that the operands are cast with, see `site.observe`.
        known: of the site.
    """
    del config, axis_names, lhs, rhs, scales, known
    return out


def _forward(config, axis_names, out, lhs, rhs, scales, known):
    del config, axis_names
    return out, (lhs, rhs, scales, known)


def _backward(config, axis_names, kept, g):
    lhs, rhs, scales, known = kept
    batch = site.observe(known, lhs, rhs, g, scales, config, axis_names)
    return g, None, None, None, batch


tap.defvjp(_forward, _backward)
