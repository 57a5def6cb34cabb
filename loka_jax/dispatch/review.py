"""A plan reviewed while training, by errors on the operands of observed steps.

live       errors of products on these operands (`probe.live_errors`), as intervals that
           the error of another step lies in
corrected  of products that were only drawn, times the ratio of live to drawn errors
           of the same role at all sites of the model. The ratio's spread over the
           sites widens the interval.

    demoted    FP8 whose mean live error is above its limit: the site gets the fastest
               choice within the limits, in bfloat16 or in FP8
    promoted   FP8 within the limits is faster than bfloat16, or than the FP8 that runs,
               by what the limits ask for

Within the limits is an error whose interval's upper end is, so that a site does not go
back and forth. One that was demoted is promoted only within three quarters of them.

A cross network runs as one operation only by one choice, so that where one of its sites
changes the others follow the new plan too.
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from loka_jax.dispatch.candidates import table_key
from loka_jax.dispatch.drift import HOME
from loka_jax.dispatch.groups import groups_of
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.plan import DispatchPlan, make_plan
from loka_jax.dispatch.policy import DEFAULT_LIMITS, Decision, Limits, shares_of_limits
from loka_jax.dispatch.table import Entry, RoleErrors, Table
from loka_jax.group import Cross
from loka_jax.measure.intervals import Interval, next_value
from loka_jax.nn import Site
from loka_jax.probe.live_errors import LiveErrors
from loka_jax.quality import MEASURES
from loka_jax.recipe import ROLES, Role
from loka_jax.site import Choice

LEAST_STEPS = 3.0  # observed steps, below which errors are not judged


@dataclasses.dataclass(frozen=True)
class Reviewer:
    """Reviews the plans of a model.

    Attributes:
        sites: of the model without a plan, as `list_sites` returns them.
        limits, rules, config: as in `make_plan`.
    """

    sites: Sequence[Site]
    performance: PerformanceModel
    limits: Limits = DEFAULT_LIMITS
    rules: Mapping[str, str] | None = None
    config: str = ""

    def review(
        self,
        plan: DispatchPlan,
        errors: Mapping[str, RoleErrors],
        demoted_before: Collection[str] = (),
    ) -> tuple[dict[str, Decision], dict[str, Decision]]:
        """Returns the demoted and the promoted sites of the plan that runs, by path.

        None are sites that rules decide.

        Args:
            errors: by path, of the sites to review (`live_intervals`).
            demoted_before: paths of the sites that earlier reviews have demoted.
        """
        within = self._decide(errors, self.limits)
        well_within = within
        if demoted_before:
            healthy, worst = self.limits.healthy, self.limits.worst_row
            near = dict(healthy=HOME * healthy, worst_row=HOME * worst)
            limits = dataclasses.replace(self.limits, **near)
            well_within = within | self._decide(errors, limits)
        demoted, promoted = {}, {}
        for path, now in plan.decisions:
            if path not in errors or within[path].choice == now.choice:
                continue
            best = (well_within if path in demoted_before else within)[path]
            if why := _why_unsafe(now.choice, errors[path], self.limits):
                demoted[path] = within[path]._replace(reason=why)
            elif _is_faster(best, now, self.limits):
                reason = "its live errors are within the limits"
                promoted[path] = best._replace(reason=reason)
        demoted |= self._followers(demoted, plan, within)
        promoted |= self._followers(promoted, plan, within)
        return demoted, {p: x for p, x in promoted.items() if p not in demoted}

    def _followers(
        self,
        changed: Mapping[str, Decision],
        plan: DispatchPlan,
        within: Mapping[str, Decision],
    ) -> dict[str, Decision]:
        """Returns new decisions on the other sites of networks with changed sites."""
        running = dict(plan.decisions)
        groups = [
            {member.path for member in group.members}
            for group in groups_of(self.sites)
            if any(isinstance(layer, Cross) for layer in group.layers)
        ]
        return {
            path: within[path]._replace(reason="as its cross network changes")
            for paths in groups
            if changed.keys() & paths
            for path in (paths & running.keys()) - changed.keys()
            if within[path].choice != running[path].choice
        }

    def is_well_within(self, choice: Choice, errors: RoleErrors) -> bool:
        """Returns whether the live errors of a choice let a site return to it."""
        shares = shares_of_limits(choice.recipe, errors, self.limits)
        return all(share <= HOME for share in shares.values())

    def _decide(
        self, errors: Mapping[str, RoleErrors], limits: Limits
    ) -> dict[str, Decision]:
        options = {"rules": self.rules, "config": self.config, "errors": errors}
        plan = make_plan(self.sites, self.performance, limits=limits, **options)
        return dict(plan.decisions)


def _why_unsafe(choice: Choice, errors: RoleErrors, limits: Limits) -> str | None:
    """Returns which live error of a choice is farthest above its limit, or None."""
    shares = shares_of_limits(choice.recipe, errors, limits, end="mean")
    worst = max(shares, key=lambda role: shares[role], default=None)
    if worst is None or shares[worst] <= 1:
        return None
    return f"the live error of its {worst} is {shares[worst]:.2f} times its limit"


def _is_faster(best: Decision, now: Decision, limits: Limits) -> bool:
    """Returns whether a decision is FP8 that is worth a change."""
    if not (best.choice.is_fp8 and now.choice.is_fp8):
        return best.choice.is_fp8  # it was compared with bfloat16
    if best.speedup is None or now.speedup is None:
        return False
    return best.speedup >= limits.speedup * now.speedup


# How much larger live errors are than drawn ones, by role and measure: the natural
# logarithm, with the interval that another site's lies in.
type Ratios = dict[Role, dict[str, Interval]]


def live_intervals(errors: LiveErrors, recipes: Sequence[str]) -> RoleErrors:
    """Returns the live errors of a site, of products seen in enough steps.

    Of a stack of layers they are those of the layer whose mean is the largest.
    """
    sums = _of_largest(np.asarray(errors.sums, np.float64))
    intervals: RoleErrors = {role: {} for role in ROLES}
    for recipe, by_role in zip(recipes, sums, strict=True):
        for role, by_measure in zip(ROLES, by_role, strict=True):
            weight, squares, *_ = by_measure[0]
            if weight**2 >= LEAST_STEPS * squares > 0:  # their effective number
                intervals[role][recipe] = {
                    measure: _next_step(values)
                    for measure, values in zip(MEASURES, by_measure, strict=True)
                }
    return intervals


def ratios(live: Mapping[str, RoleErrors], drawn: Mapping[str, RoleErrors]) -> Ratios:
    """Returns the ratios of live to drawn errors of a model.

    Recipes at a site err alike, and count once.
    """
    by_role: Ratios = {role: {} for role in ROLES}
    for role, measure in itertools.product(ROLES, MEASURES):
        logs = []
        for path in live.keys() & drawn.keys():
            ours, theirs = live[path][role], drawn[path][role]
            means = [
                (ours[recipe][measure].mean, theirs[recipe][measure].mean)
                for recipe in ours.keys() & theirs.keys()
            ]
            if at_site := [math.log(a / b) for a, b in means if a > 0 and b > 0]:
                logs.append(float(np.mean(at_site)))
        if len(logs) >= 2:
            mean, deviation = float(np.mean(logs)), float(np.std(logs, ddof=1))
            by_role[role][measure] = next_value(mean, deviation, len(logs))
    return by_role


def own_errors(live: RoleErrors, drawn: RoleErrors, ratios: Ratios) -> RoleErrors:
    """Returns the errors of a site: live ones, and corrected ones of other products.

    Drawn errors without a ratio to correct them are left out, unless nothing was seen
    live at all.
    """
    if not any(live.values()) and not any(ratios.values()):
        return drawn
    own: RoleErrors = {role: dict(live.get(role, {})) for role in ROLES}
    for role, by_measure in ratios.items():
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

    `config` is that of `make_plan`.
    """
    keys = {site.path: table_key(site.spec) for site in sites if site.path in live}
    keys = {path: key for path, key in keys.items() if key in table.sites}
    names = {path: f"{config} {path}" for path in keys}
    drawn = {p: table.sites[key].errors.get(names[p], {}) for p, key in keys.items()}
    by_role = ratios(live, {path: errors for path, errors in drawn.items() if errors})
    entries: dict = {}
    for path, key in keys.items():
        if own := own_errors(live[path], drawn[path], by_role):
            entries.setdefault(key, Entry()).errors[names[path]] = own
    return dataclasses.replace(table, sites=entries)


def _of_largest(sums: np.ndarray) -> np.ndarray:
    """Returns the sums [recipes, 3, measures, 4] of the largest mean in a stack."""
    sums = sums.reshape(-1, *sums.shape[-4:])
    weight, total = sums[..., 0], sums[..., 2]
    means = np.where(weight > 0, total / np.where(weight > 0, weight, 1.0), -1.0)
    place = np.argmax(means, axis=0)[None, ..., None]
    return np.take_along_axis(sums, place, axis=0)[0]


def _next_step(sums: np.ndarray) -> Interval:
    """Returns the mean over steps, with the interval of another step's error."""
    weight, squares, total, total_squares = map(float, sums)
    m2 = max(total_squares - total**2 / weight, 0.0)
    deviation = math.sqrt(m2 / (weight - squares / weight))
    return next_value(total / weight, deviation, weight**2 / squares)


def _corrected(drawn: Interval, ratio: Interval) -> Interval:
    """Returns a drawn error times the ratio of another site."""
    if not drawn.mean > 0:
        return drawn
    own = math.log(max(drawn.high / drawn.mean, 1.0))
    half, mean = math.hypot(ratio.half, own), drawn.mean * math.exp(ratio.mean)
    return Interval(mean, mean * math.exp(-half), mean * math.exp(half))
