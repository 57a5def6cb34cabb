"""The errors of a model's own products: live ones, and draws corrected by them.

live       of products on the operands of observed steps (`probe.live_errors`): the
           interval that the error of another step lies in
corrected  of products that were only drawn, times the ratio of live to drawn errors
           of the same role at all sites of the model. The ratio's spread over the
           sites widens the interval.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from loka_jax.dispatch.candidates import table_key
from loka_jax.dispatch.table import MEASURES, Entry, Errors, RoleErrors, Table
from loka_jax.measure.intervals import Interval, next_value, quantile
from loka_jax.nn import Site
from loka_jax.probe import live_errors
from loka_jax.probe.live_errors import LiveErrors
from loka_jax.recipe import ROLES, Role

LEAST_STEPS = 3.0  # observed steps, below which errors are not judged

assert live_errors.MEASURES == MEASURES


class Ratio(NamedTuple):
    """How much larger live errors are than drawn ones, as natural logarithms.

    Attributes:
        mean: over the sites.
        deviation: over the sites.
        count: of the sites.
    """

    mean: float
    deviation: float
    count: int


# By role and measure.
type Ratios = dict[Role, dict[str, Ratio]]


def live_intervals(errors: LiveErrors, recipes: Sequence[str]) -> RoleErrors:
    """Returns the live errors of a site, of products seen in enough steps.

    Args:
        errors: of the site.
        recipes: of the `ProbeConfig` that observed it.
    """
    moments = np.asarray(jax.device_get(errors.moments), np.float64)
    intervals: RoleErrors = {role: {} for role in ROLES}
    for recipe, by_role in zip(recipes, moments, strict=True):
        for role, by_measure in zip(ROLES, by_role, strict=True):
            if _effective_steps(by_measure[0]) >= LEAST_STEPS:
                intervals[role][recipe] = {
                    measure: _next_step(values)
                    for measure, values in zip(MEASURES, by_measure, strict=True)
                }
    return intervals


def seen_errors(
    errors: Mapping[str, LiveErrors], recipes: Sequence[str]
) -> dict[str, RoleErrors]:
    """Returns the live errors of the sites that were seen in enough steps.

    Args:
        errors: by the path of the site.
        recipes: of the `ProbeConfig` that observed them.
    """
    errors_by_path = {
        path: live_intervals(of_site, recipes)
        for path, of_site in jax.device_get(dict(errors)).items()
    }
    return {
        path: by_role
        for path, by_role in errors_by_path.items()
        if any(by_role.values())
    }


def ratios(live: Mapping[str, RoleErrors], drawn: Mapping[str, RoleErrors]) -> Ratios:
    """Returns the ratios of live to drawn errors of a model.

    Recipes at a site err alike, and count once.

    Args:
        live, drawn: errors by the path of the site.
    """
    by_role: Ratios = {}
    for role in ROLES:
        logs: dict[str, list[float]] = {measure: [] for measure in MEASURES}
        for path in live.keys() & drawn.keys():
            for measure in MEASURES:
                at_site = _log_ratios(live[path][role], drawn[path][role], measure)
                if at_site:
                    logs[measure].append(float(np.mean(at_site)))
        by_role[role] = {
            measure: Ratio(
                float(np.mean(values)), float(np.std(values, ddof=1)), len(values)
            )
            for measure, values in logs.items()
            if len(values) >= 2
        }
    return by_role


def own_errors(live: RoleErrors, drawn: RoleErrors, ratios: Ratios) -> RoleErrors:
    """Returns the errors of a site: live ones, and corrected ones of other products.

    Drawn errors without a ratio to correct them are left out, unless nothing was seen
    live at all.
    """
    if not any(live.values()) and not any(ratios.values()):
        return drawn
    own: RoleErrors = {}
    for role in ROLES:
        by_measure = ratios.get(role, {})
        own[role] = dict(live.get(role, {}))
        for recipe, errors in drawn.get(role, {}).items():
            if recipe not in own[role] and len(by_measure) == len(MEASURES):
                own[role][recipe] = {
                    measure: _corrected(errors[measure], by_measure[measure])
                    for measure in MEASURES
                }
    return own


def with_live(
    table: Table, sites: Sequence[Site], live: Mapping[str, RoleErrors], config: str
) -> Table:
    """Returns a model's entries of a table, with its own errors in place of drawn ones.

    Args:
        table: the measurements.
        sites: of the model.
        live: live errors by path.
        config: as in `make_plan`.
    """
    keys = {
        site.path: key
        for site in sites
        if site.path in live and (key := table_key(site.spec)) in table.sites
    }
    drawn = {
        path: table.sites[key].errors.get(f"{config} {path}", {})
        for path, key in keys.items()
    }
    drawn = {path: errors for path, errors in drawn.items() if errors}
    by_role = ratios(live, drawn)
    entries: dict = {}
    for path, key in keys.items():
        own = own_errors(live[path], drawn.get(path, {}), by_role)
        if own:
            entry = entries.setdefault(key, Entry())
            entry.errors[f"{config} {path}"] = own
    return dataclasses.replace(table, sites=entries)


def _effective_steps(values: np.ndarray) -> float:
    weight, squares, *_ = values
    return weight**2 / squares if squares > 0 else 0.0


def _next_step(values: np.ndarray) -> Interval:
    """Returns the mean over steps, with the interval of another step's error."""
    weight, squares, mean, m2 = values
    freedom = weight - squares / weight
    deviation = math.sqrt(max(m2, 0.0) / freedom)
    return next_value(float(mean), deviation, _effective_steps(values))


def _log_ratios(
    live: Mapping[str, Errors], drawn: Mapping[str, Errors], measure: str
) -> list[float]:
    means = [
        (live[recipe][measure].mean, drawn[recipe][measure].mean)
        for recipe in live.keys() & drawn.keys()
    ]
    return [math.log(a / b) for a, b in means if a > 0 and b > 0]


def _corrected(drawn: Interval, ratio: Ratio) -> Interval:
    """Returns a drawn error times the ratio of another site."""
    if not drawn.mean > 0:
        return drawn
    spread = ratio.deviation * math.sqrt(1 + 1 / ratio.count)
    own = math.log(max(drawn.high / drawn.mean, 1.0))
    half = math.hypot(quantile(ratio.count) * spread, own)
    mean = drawn.mean * math.exp(ratio.mean)
    return Interval(mean, mean * math.exp(-half), mean * math.exp(half))
