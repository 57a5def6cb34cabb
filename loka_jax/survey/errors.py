"""How wrong every candidate is at a site, on learned, real and N(0, 1) operands."""

import concurrent.futures
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from loka_jax.dispatch.candidates import SiteKey
from loka_jax.nn import Site
from loka_jax.ops import roles
from loka_jax.probe.capture import Operands
from loka_jax.probe.compiling import UNTUNED
from loka_jax.probe.measure import Errors, errors, estimate, measure
from loka_jax.probe.sampling import sample_rows, sample_weight
from loka_jax.probe.site import SiteStats, weight_of
from loka_jax.recipe import ROLE_OPERANDS, ROLES, Role
from loka_jax.site import Choice
from loka_jax.survey.candidates import candidates, operand_amaxes, product, rates
from loka_jax.survey.config import SurveyConfig

# By name: a function from a seed to operands, and the seeds.
type Sources = Mapping[str, tuple[Callable[[Any], Operands], Iterable[Any]]]


class _Scores(NamedTuple):
    errors: Errors
    rates: roles.CastRates


def survey_errors(
    site: Site,
    stats: SiteStats,
    captured: Sequence[Operands],
    config: SurveyConfig,
) -> dict[Role, dict[str, dict[str, Any]]]:
    """Returns the errors of each role's candidates, by source of the operands.

    Args:
        site: where.
        stats: what Probe knows of it.
        captured: its operands in some batches; may be empty.
        config: how many draws, of how many rows.

    Returns:
        as `site_errors`; sources are "learned", "normal" and, if captured, "real".
    """
    rows = min(site.m, config.rows)
    keys = jax.random.split(jax.random.key(config.seed), config.pairs)
    learned = functools.partial(draw_learned, stats=stats, rows=rows)
    normal = functools.partial(draw_normal, sizes=(rows, site.k, site.n))
    sources: dict[str, Any] = {"learned": (learned, keys), "normal": (normal, keys)}
    if captured:
        sources["real"] = (lambda one: one, captured)
    return site_errors(site, sources, config.recipes)


def site_errors(
    site: Site | SiteKey, sources: Sources, recipes: tuple[str, ...]
) -> dict[Role, dict[str, dict[str, Any]]]:
    """Returns for each role and candidate the errors by source.

    Under each name of `Errors` and of `CastRates` mean, low and high.

    Args:
        site: where.
        sources: of operands.
        recipes: beside bfloat16.
    """
    of_role = functools.partial(_role_errors, site, sources, recipes)
    # At a time, for most of it is compilation.
    with concurrent.futures.ThreadPoolExecutor(len(ROLES)) as pool:
        return dict(zip(ROLES, pool.map(of_role, ROLES), strict=True))


def _role_errors(
    site: Site | SiteKey, sources: Sources, recipes: tuple[str, ...], role: Role
) -> dict[str, dict[str, Any]]:
    """Returns the errors of a role's candidates by source."""
    known = candidates(site, role, recipes)
    options = UNTUNED if jax.default_backend() == "gpu" else {}
    score = jax.jit(
        functools.partial(_score, role, tuple(known)), compiler_options=dict(options)
    )
    drawn = {
        source: measure(score, functools.partial(_draw, role, draw), seeds)
        for source, (draw, seeds) in sources.items()
    }
    return {
        candidate.name: {
            source: _summary(scores[candidate.name]) for source, scores in drawn.items()
        }
        for candidate in known
    }


def _score(role: Role, known: tuple[Choice, ...], first, second, amaxes):
    """Returns the scores of all candidates on one pair of operands."""
    ref = roles.exact_product(role, first, second)
    barrier = jax.lax.optimization_barrier
    return {
        candidate.name: _Scores(
            # Else the compiler would leave out the rounding of a product to bfloat16.
            errors(ref, barrier(product(candidate, role, first, second, amaxes))),
            rates(candidate.recipe, role, first, second, amaxes),
        )
        for candidate in known
    }


def _draw(role: Role, draw, seed) -> tuple:
    """Returns the operands of a role, and the amaxes that delayed scales are made for.

    Those of the operands themselves: how far a scale lags behind, `amax_ratio` tells.
    """
    operands = draw(seed)
    first, second = (getattr(operands, name) for name in ROLE_OPERANDS[role])
    return first, second, operand_amaxes(role, first, second)


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


def _summary(scores: _Scores) -> dict[str, dict[str, float]]:
    """Returns mean, low and high of every measure."""
    values: dict[str, np.ndarray] = scores.errors._asdict() | scores.rates._asdict()
    return {name: estimate(value)._asdict() for name, value in values.items()}
