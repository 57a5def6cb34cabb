"""A plan reviewed while training, by errors on the operands of observed steps."""

from collections.abc import Mapping, Sequence

from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.plan import DispatchPlan, make_plan
from loka_jax.dispatch.policy import DEFAULT_LIMITS, Limits
from loka_jax.dispatch.table import RoleErrors
from loka_jax.nn import Site


def review(
    plan: DispatchPlan,
    sites: Sequence[Site],
    performance: PerformanceModel,
    errors: Mapping[str, RoleErrors],
    *,
    limits: Limits = DEFAULT_LIMITS,
    rules: Mapping[str, str] | None = None,
    config: str = "",
) -> DispatchPlan:
    """Returns the plan with the sites decided anew whose own errors are known.

    A site in bfloat16 is promoted to FP8 that is fast and accurate enough; one in FP8
    that is no longer accurate enough gets another choice. Other sites keep theirs.

    Args:
        plan: that runs.
        sites: of the model.
        performance: times, measured or predicted.
        errors: of the sites' own products, by path (`live.live_intervals`).
        limits, rules, config: as in `make_plan`.
    """
    anew = make_plan(
        sites, performance, limits=limits, rules=rules, config=config, errors=errors
    )
    known = {path: x for path, x in anew.decisions if path in errors}
    decisions = dict(plan.decisions)
    changed = {
        path: decision
        for path, decision in known.items()
        if path not in decisions or decision.choice != decisions[path].choice
    }
    return DispatchPlan(tuple((decisions | changed).items()))
