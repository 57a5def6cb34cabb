"""Where Flax modules let Probe see their sites.

    with probing(ProbeConfig()):
        variables = model.init(key, x)                       # adds the collection PROBE
        grads = jax.grad(loss)(variables)                    # inside the jitted step
    known = merge_stats(variables[PROBE], grads[PROBE], ProbeConfig())

Outside of `probing` modules neither have nor read the collection, and cost nothing.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jaxtyping import Array

from loka_jax.ops.tap import Observer, tap
from loka_jax.probe import site
from loka_jax.probe.capture import Operands
from loka_jax.probe.site import ProbeConfig, SiteStats
from loka_jax.recipe import Recipe
from loka_jax.scaling import DelayedScaling, set_scales

PROBE = "probe"  # the collection
_observer: contextvars.ContextVar[Observer | None] = contextvars.ContextVar(
    "probe", default=None
)


@contextlib.contextmanager
def probing(observer: Observer | None) -> Iterator[None]:
    """Makes the sites of modules that are called inside observable, unless None.

    Args:
        observer: a `ProbeConfig` for statistics, or a `Capture` for the operands
            themselves. `Capture` wants variables made for the same number of rows.
    """
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def site_tap(
    module: linen.Module,
    m: int,
    k: int,
    n: int,
    state: DelayedScaling | None,
    recipe: Recipe,
    axis_names: tuple[str, ...],
) -> Callable[[Array, Array, Array], Array] | None:
    """Returns a function of (out, lhs, rhs) that lets Probe see them, or None.

    Args:
        module: that calls the site.
        m, k, n: sizes of its product.
        state: delayed-scaling state, whose scales the operands are cast with.
        recipe: of the casts.
        axis_names: mesh axes over which rows are spread.
    """
    observer = _observer.get()
    if observer is None:
        return None
    known = module.variable(PROBE, "stats", observer.nothing, m, k, n).value
    return _observe(observer, axis_names, set_scales(state, recipe), known)


def per_sample_tap(
    module: linen.Module, k: int, n: int, axis_names: tuple[str, ...]
) -> Callable[[Array, Array, Array], Array] | None:
    """Returns what `site_tap` does, for a product whose rhs differs by sample.

    Its function takes (b m, n), (b m, k) and (k, b n) for a batch of b products. Only
    statistics are taken of them, and nothing is captured.
    """
    observer = _observer.get()
    if not isinstance(observer, ProbeConfig):
        return None
    init = functools.partial(site.no_stats, k, n, observer, is_per_sample=True)
    known = module.variable(PROBE, "stats", init).value
    return _observe(observer, axis_names, (None, None, None), known)


def _observe(observer: Observer, axis_names, scales, known):
    def observe(out: Array, lhs: Array, rhs: Array) -> Array:
        lhs, rhs = jax.lax.stop_gradient((lhs, rhs))
        return jnp.asarray(tap(observer, axis_names, out, lhs, rhs, scales, known))

    return observe


def by_path(collection: Any) -> dict[str, Any]:
    """Returns what a collection PROBE holds, by the paths of the sites."""
    leaves = jax.tree_util.tree_leaves_with_path(collection, is_leaf=_is_of_site)
    return {"/".join(str(key.key) for key in path[:-1]): x for path, x in leaves}


def _is_of_site(x: Any) -> bool:
    return isinstance(x, SiteStats | Operands)


def merge_stats(known: Any, batch: Any, config: ProbeConfig) -> Any:
    """Returns a collection PROBE after a batch was observed.

    Args:
        known: the collection.
        batch: its "gradient".
        config: how sites are observed.
    """
    return jax.tree.map(
        lambda a, b: site.merge(a, b, config),
        known,
        batch,
        is_leaf=_is_of_site,
    )
