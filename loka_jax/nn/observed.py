"""The taps through which Probe observes the sites of Flax modules.

    with probing(ProbeConfig()):
        variables = model.init(key, x)                       # adds the collection PROBE
        grads = jax.grad(loss)(variables)                    # inside the jitted step
    stats = merge_stats(variables[PROBE], grads[PROBE], ProbeConfig())

Outside of `probing`, modules neither have nor read the collection, at no cost.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax.nn.context import current
from loka_jax.ops.mesh_axes import varying_axes
from loka_jax.ops.plan import KernelPlan
from loka_jax.ops.tap import Observer, tap, tell
from loka_jax.probe import live_errors, monitors, site
from loka_jax.probe.live_errors import LiveErrors
from loka_jax.probe.site import ErrorsAlone, ProbeConfig, Sample, SiteStats
from loka_jax.recipe import OPERANDS, Recipe
from loka_jax.scaling import DelayedScaling, delayed_cast, stored_scales

PROBE = "probe"  # the collection


def site_tap(
    module: Any,
    plan: KernelPlan,
    state: DelayedScaling | None,
    axis_names: tuple[str, ...],
) -> Callable[[Array, Array, Array], Array] | None:
    """Returns a function of (out, lhs, rhs) by which Probe sees them, or None."""
    observer, spec = current().observer, plan.spec
    if observer is None:
        return None
    init = functools.partial(observer.init, spec.m, spec.k, spec.n)
    stats = module.variable(PROBE, "stats", init).value
    # Its gradient is left to the product: this use contributes nothing.
    seen = None if state is None else jax.lax.stop_gradient(state)
    scales = _scales(seen, plan.choice.recipe)
    # A pytree, so that a site can take its arrays as arguments.
    observe = functools.partial(_observed, observer, axis_names)
    return jax.tree_util.Partial(observe, scales, stats)


def attention_seen(
    module: Any,
    out: Float[Array, "..."],
    largest_logit: Callable[[], Float[Array, ""]],
) -> Float[Array, "..."]:
    """Returns what an attention returns, of which Probe sees the size and a logit.

    To be called inside a compact Flax module, whose path they are kept by.

    Args:
        largest_logit: the largest magnitude of a score, or a bound of it; called where
            Probe observes.
    """
    observer = current().observer
    if not isinstance(observer, ProbeConfig | ErrorsAlone):
        return out
    empty = functools.partial(live_errors.empty_errors, len(observer.recipes))
    stats = module.variable(PROBE, "stats", empty).value
    told = jax.lax.stop_gradient((out, largest_logit()))
    seen = monitors.of_attention(*told, varying_axes(out))
    return tell(out, empty()._replace(steps=jnp.ones(()), monitors=seen), stats)


def _scales(
    state: DelayedScaling | None, recipe: Recipe
) -> tuple[Float[Array, ""] | None, ...]:
    """Returns the stored factors of lhs, rhs and g; 0 before an operand's first amax.

    None for an operand without a delayed cast.
    """
    if state is None or recipe.scales_initialized:
        return stored_scales(state, recipe)
    return tuple(
        None if delayed_cast(operand, recipe) is None else state.factor(operand)
        for operand in OPERANDS
    )


def _observed(observer: Observer, axis_names, scales, stats, out, lhs, rhs) -> Array:
    lhs, rhs = jax.lax.stop_gradient((lhs, rhs))
    axis_names = axis_names or varying_axes(lhs)
    return jnp.asarray(tap(observer, axis_names, out, lhs, rhs, scales, stats))


def by_path(collection: Any) -> dict[str, Any]:
    """Returns the statistics in a collection PROBE, by the paths of the sites."""
    leaves = jax.tree_util.tree_leaves_with_path(collection, is_leaf=is_of_site)
    return {"/".join(str(key.key) for key in path[:-1]): x for path, x in leaves}


def is_of_site(x: Any) -> bool:
    """Returns True for what Probe keeps of one site."""
    return isinstance(x, SiteStats | Sample | LiveErrors)


def merge_stats(stats: Any, batch: Any, config: ProbeConfig | ErrorsAlone) -> Any:
    """Returns a collection PROBE after a batch was observed."""

    def merge(a: Any, b: Any) -> Any:
        of_errors = isinstance(a, LiveErrors)
        merged = live_errors.merge if of_errors else site.merge
        merged = functools.partial(merged, decay=config.decay)
        for _ in range(site.errors_of(a).steps.ndim):  # of layers of a scan or vmap
            merged = jax.vmap(merged)
        return merged(a, b)

    return jax.tree.map(merge, stats, batch, is_leaf=is_of_site)
