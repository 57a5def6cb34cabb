"""The errors of candidates at each role of a site, on drawn and on real operands.

A role is measured once for each way to cast its operands: recipes that differ elsewhere
only count once, under the first one's name.
"""

import concurrent.futures
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from loka_jax import fp8, scaling
from loka_jax.measure.compiling import untuned_here
from loka_jax.measure.errors import Errors, errors, measure
from loka_jax.measure.intervals import Interval, interval
from loka_jax.ops import roles
from loka_jax.ops.device import local_device
from loka_jax.ops.plan import resolve
from loka_jax.ops.run_site import SiteArrays, run_site
from loka_jax.probe.capture import Operands
from loka_jax.probe.sampling import sample_rows, sample_weight
from loka_jax.probe.site import SiteStats, weight_of
from loka_jax.recipe import ROLE_OPERANDS, ROLES, Recipe, Role, get_recipe
from loka_jax.scaling import DelayedScaling
from loka_jax.site import BF16, Choice, SiteSpec

# By name: a function from a seed to operands, and the seeds.
type Sources = Mapping[str, tuple[Callable[[Any], Operands], Iterable[Any]]]
# By role, candidate, source and measure.
type SiteErrors = dict[Role, dict[str, dict[str, dict[str, Interval]]]]


class _Scores(NamedTuple):
    errors: Errors
    rates: roles.CastRates


def site_errors(
    spec: SiteSpec, sources: Sources, recipes: tuple[str, ...]
) -> SiteErrors:
    """Returns the errors of each role's candidates, by source of the operands.

    Measures are those of `Errors` and of `CastRates`.

    Args:
        spec: the site.
        sources: of operands.
        recipes: to measure beside bfloat16.
    """
    measure_role = functools.partial(_role_errors, spec, sources, recipes)
    # In parallel, since most of it is compilation.
    with concurrent.futures.ThreadPoolExecutor(len(ROLES)) as pool:
        return dict(zip(ROLES, pool.map(measure_role, ROLES), strict=True))


def role_candidates(
    spec: SiteSpec, role: Role, recipes: tuple[str, ...]
) -> list[Choice]:
    """Returns the choices that differ at a role of a site, bfloat16 first."""
    candidates = [BF16]
    gemms = set()
    for recipe in map(get_recipe, recipes):
        choice = Choice("xla", recipe)
        gemm = resolve(spec, choice, local_device()).recipe.gemm(role)
        if gemm is None or gemm in gemms:
            continue
        gemms.add(gemm)
        candidates.append(choice)
        # Only the fused kernel multiplies differently from XLA.
        fused = Choice("pallas", recipe)
        if role == "fwd" and resolve(_product(spec), fused, local_device()).is_fused:
            candidates.append(fused)
    return candidates


@functools.partial(jax.jit, static_argnames="rows")
def draw_learned(key: Key[Array, ""], stats: SiteStats, rows: int) -> Operands:
    """Returns operands of a site with the learned means and covariances."""
    keys = jax.random.split(key, 3)
    return Operands(
        lhs=_rounded(sample_rows(keys[0], stats.lhs.moments, rows, stats.lhs.norms)),
        rhs=sample_weight(keys[1], weight_of(stats).normal),
        g=_rounded(sample_rows(keys[2], stats.g.moments, rows, stats.g.norms)),
    )


@functools.partial(jax.jit, static_argnames="sizes")
def draw_normal(key: Key[Array, ""], sizes: tuple[int, int, int]) -> Operands:
    """Returns operands (m, k), (k, n), (m, n) from N(0, 1)."""
    m, k, n = sizes
    keys = jax.random.split(key, 3)
    return Operands(
        lhs=_rounded(jax.random.normal(keys[0], (m, k))),
        rhs=jax.random.normal(keys[1], (k, n)),
        g=_rounded(jax.random.normal(keys[2], (m, n))),
    )


def _rounded(x: Array) -> Array:
    # Activations and their gradients are bfloat16 when a site reads them.
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _product(spec: SiteSpec) -> SiteSpec:
    """Returns the site of the product alone."""
    return SiteSpec(m=spec.m, k=spec.k, n=spec.n)


def _role_errors(
    spec: SiteSpec, sources: Sources, recipes: tuple[str, ...], role: Role
) -> dict[str, dict[str, dict[str, Interval]]]:
    """Returns the errors of a role's candidates by source."""
    candidates = role_candidates(spec, role, recipes)
    score = jax.jit(
        functools.partial(_score, role, tuple(candidates)),
        compiler_options=untuned_here(),
    )
    scores = {
        source: measure(score, functools.partial(_draw, role, draw), seeds)
        for source, (draw, seeds) in sources.items()
    }
    return {
        candidate.name: {
            source: _intervals(by_name[candidate.name])
            for source, by_name in scores.items()
        }
        for candidate in candidates
    }


def _score(role: Role, candidates: tuple[Choice, ...], first, second, amaxes):
    """Returns the scores of all candidates on one pair of operands."""
    ref = roles.exact_product(role, first, second)
    scores = {}
    for candidate in candidates:
        out = _run_role(candidate, role, first, second, amaxes)
        # Otherwise the compiler would omit the rounding of a product to bfloat16.
        out = jax.lax.optimization_barrier(out)
        state = scaling_state(candidate.recipe, amaxes)
        rates = roles.cast_rates(role, first, second, candidate.recipe, state)
        scores[candidate.name] = _Scores(errors(ref, out), rates)
    return scores


def _run_role(
    choice: Choice, role: Role, first: Array, second: Array, amaxes: Float[Array, "3"]
) -> Array:
    """Returns a role's product.

    Args:
        choice: of provider and recipe.
        role: of the product.
        first, second: its operands, see `ops.roles`.
        amaxes: of lhs, rhs and g, which delayed scales are made from.
    """
    state = scaling_state(choice.recipe, amaxes)
    if choice.provider == "xla":
        return roles.product(role, first, second, choice.recipe, state)
    m, k, n = roles.sizes(role, first, second)
    plan = resolve(SiteSpec(m=m, k=k, n=n), choice, local_device())
    out = run_site(plan, SiteArrays(first, second), state)
    assert isinstance(out, jax.Array)
    return out


def _draw(role: Role, draw, seed) -> tuple:
    """Returns the operands of a role, and the amaxes that delayed scales are made from.

    Those of the operands themselves: `amax_ratio` tells how far a scale lags behind.
    """
    operands = draw(seed)
    first, second = (getattr(operands, name) for name in ROLE_OPERANDS[role])
    return first, second, _role_amaxes(role, first, second)


def _role_amaxes(
    role: Role, first: Float[Array, "..."], second: Float[Array, "..."]
) -> Float[Array, "3"]:
    """Returns the amaxes of lhs, rhs and g; 1 for the operand that the role lacks."""
    a, b = (jnp.max(jnp.abs(x)).astype(jnp.float32) for x in (first, second))
    unit = jnp.ones((), jnp.float32)
    return jnp.stack(
        {"fwd": (a, b, unit), "dlhs": (unit, b, a), "drhs": (a, unit, b)}[role]
    )


def _intervals(scores: _Scores) -> dict[str, Interval]:
    """Returns mean and interval of every measure."""
    values: dict[str, np.ndarray] = scores.errors._asdict() | scores.rates._asdict()
    return {name: interval(value) for name, value in values.items()}


def scaling_state(recipe: Recipe, amaxes: Float[Array, "3"]) -> DelayedScaling | None:
    """Returns the state of a site after a step with these amaxes of lhs, rhs and g."""
    if not recipe.is_delayed:
        return None
    return scaling.update_delayed(scaling.init_delayed(recipe), amaxes, recipe)


def operand_amaxes(operands: tuple[Array, Array, Array]) -> Float[Array, "3"]:
    """Returns the amaxes of lhs, rhs and g."""
    return jnp.stack([fp8.amax(x) for x in operands])
