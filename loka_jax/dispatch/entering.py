"""Whether FP8 that a run may enter saves more of the run than entering takes.

    saves    (time of the sites now - by the faster plan) * steps left
    costs    the steps that are compiled for it: FP8's first and later ones, and one
             that observes if none has yet

Both are estimates by the times of the sites and by their number, so that runs on one
kind of device decide alike.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from loka_jax.dispatch.first_use import sites_us
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.nn import Site

# Of a step with so many sites; Wukong M's 30 took 37 s on an H200.
_COMPILE_SECONDS_A_SITE = 1.2
_PROGRAMS = 2


class Entering(NamedTuple):
    """The seconds of a run that FP8 saves, and those that entering it costs."""

    saves: float
    costs: float

    @property
    def pays(self) -> bool:
        """True if it saves more than it costs."""
        return self.saves > self.costs

    def __str__(self) -> str:
        """Returns both as a clause."""
        return (
            f"FP8 may save {self.saves:,.0f} s of the rest of the run, and entering it "
            f"takes some {self.costs:,.0f} s"
        )


def entering(
    sites: Sequence[Site],
    performance: PerformanceModel,
    plan: DispatchPlan,
    faster: DispatchPlan,
    steps: int,
    *,
    is_observed: bool,
) -> Entering:
    """Returns what a faster plan saves of some steps, and what entering it costs.

    Args:
        is_observed: a step that observes has been compiled.
    """
    now, then = (sites_us(x, sites, performance) for x in (plan, faster))
    programs = _PROGRAMS + (not is_observed)
    costs = programs * _COMPILE_SECONDS_A_SITE * len(sites)
    return Entering((now - then) * steps / 1e6, costs)


def steps_meanwhile(
    sites: Sequence[Site], performance: PerformanceModel, plan: DispatchPlan
) -> int:
    """Returns the steps by a plan that take as long as one program's compilation.

    At most: a step takes longer than its sites.
    """
    us = sites_us(plan, sites, performance)
    return math.ceil(_COMPILE_SECONDS_A_SITE * len(sites) * 1e6 / us)
