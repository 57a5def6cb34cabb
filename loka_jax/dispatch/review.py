"""A plan reviewed while training, by errors on the operands of observed steps.

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
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from loka_jax.dispatch.cross_networks import networks
from loka_jax.dispatch.drift import HOME
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.plan import DispatchPlan, chains_of, make_plan
from loka_jax.dispatch.policy import (
    DEFAULT_LIMITS,
    Decision,
    Limits,
    shares_of_limits,
)
from loka_jax.dispatch.table import RoleErrors
from loka_jax.nn import Site
from loka_jax.site import Choice


class Review(NamedTuple):
    """Decisions that replace those of a plan, with their reasons.

    Attributes:
        demoted: by path, of the sites whose FP8 is not accurate enough.
        promoted: by path, of the sites with faster FP8.
    """

    demoted: Mapping[str, Decision]
    promoted: Mapping[str, Decision]


@dataclasses.dataclass(frozen=True)
class Reviewer:
    """Reviews the plans of a model.

    Attributes:
        sites: of the model without a plan, as `list_sites` returns them.
        performance: times, measured or predicted.
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
    ) -> Review:
        """Returns what live errors change; nothing at sites that rules decide.

        Args:
            plan: that runs.
            errors: by path, of the sites to review (`live.live_intervals`).
            demoted_before: paths of the sites that earlier reviews have demoted.
        """
        within = self._decide(errors, self.limits)
        well_within = within
        if demoted_before:
            well_within = within | self._decide(errors, _part(self.limits, HOME))
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
        return Review(demoted, {p: x for p, x in promoted.items() if p not in demoted})

    def _followers(
        self,
        changed: Mapping[str, Decision],
        plan: DispatchPlan,
        within: Mapping[str, Decision],
    ) -> dict[str, Decision]:
        """Returns new decisions on the other sites of networks with changed sites.

        Args:
            changed: the new decisions, by path.
            plan: that runs.
            within: the decisions on all sites.
        """
        running = dict(plan.decisions)
        crossed = networks(chains_of(self.sites))
        groups = [{site.path for site in (*x.sites, *x.beside)} for x in crossed]
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
        plan = make_plan(
            self.sites,
            self.performance,
            limits=limits,
            rules=self.rules,
            config=self.config,
            errors=errors,
        )
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


def _part(limits: Limits, share: float) -> Limits:
    """Returns the limits with a share of those on errors."""
    return dataclasses.replace(
        limits,
        healthy=share * limits.healthy,
        worst_row=share * limits.worst_row,
        mere=None if limits.mere is None else share * limits.mere,
    )
