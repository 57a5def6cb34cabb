"""Confirms on validation examples that FP8 of a plan costs no quality.

    rise = sum(weight (loss by the plan - loss in bfloat16)) / sum(weight loss in bf16)

Both are of the same parameters and examples, so that the interval of the rise is far
narrower than that of a loss. Errors of single products do not show what they add up to.
"""

import dataclasses

import numpy as np

from loka_jax.dispatch.attention import in_bf16
from loka_jax.dispatch.plan import make_plan
from loka_jax.dispatch.policy import Decision
from loka_jax.measure.intervals import Interval, interval
from loka_jax.train.build import Run
from loka_jax.train.evaluation import Evaluated
from loka_jax.train.watch.host_state import Progress
from loka_jax.train.watch.replan import Change


def is_due(run: Run, progress: Progress) -> bool:
    """Returns whether FP8 that the plan has chosen was not compared with bfloat16."""
    return progress.confirmed != progress.replanned and bool(_in_fp8(run))


def in_bfloat16(run: Run) -> Run:
    """Returns the run without FP8 that its plan has chosen."""
    return run.replanned(run.plan.changed(_leaving(run, "bfloat16")))


def confirmed(
    run: Run, progress: Progress, by_plan: Evaluated, in_bf16: Evaluated
) -> tuple[str, Change]:
    """Returns a sentence on the rise of the loss on these examples, and what follows.

    The plan stays unless the rise is beyond `Limits.loss`, and beyond zero at the lower
    end of its interval. Sites that leave FP8 stay in bfloat16.
    """
    with np.errstate(invalid="ignore"):
        rise = rise_of(by_plan, in_bf16)
    limit = run.config.dispatch.limits.loss
    sentence = (
        f"step {progress.step:,}: by FP8 the validation loss is {rise.mean:+.3%} "
        f"± {rise.half:.3%} of that in bfloat16 ({limit:.2%} is allowed)"
    )
    after = dataclasses.replace(progress, confirmed=progress.replanned)
    if not (rise.mean > limit and rise.low > 0) and np.isfinite(rise.mean):
        return f"{sentence}.", Change(run.plan, (), after)
    left = _leaving(run, "the validation loss rose by FP8")
    # A plan without FP8 needs no confirmation.
    after = dataclasses.replace(after, broken=(*progress.broken, *left))
    said = f"{sentence}: {len(left)} sites run in bfloat16 now."
    return said, Change(run.plan.changed(left), (said,), after)


def rise_of(by_plan: Evaluated, in_bf16: Evaluated) -> Interval:
    """Returns the relative rise of the loss, with its 95 % interval."""
    losses = in_bf16.losses
    rise = interval(by_plan.losses - losses)
    return Interval(*(x / np.mean(losses) for x in rise))


def _in_fp8(run: Run) -> list[str]:
    """Returns the sites in FP8 that no rule of the user decides."""
    in_fp8 = [path for path, choice in run.plan.choices if choice.is_fp8]
    rules = run.config.dispatch.by_pattern
    if not in_fp8 or not rules:
        return in_fp8
    ruled = {path for path, _ in make_plan(run.sites, None, rules=rules).decisions}
    return [path for path in in_fp8 if path not in ruled]


def _leaving(run: Run, reason: str) -> dict[str, Decision]:
    in_fp8 = {*_in_fp8(run)}
    return {
        site.path: Decision(in_bf16(site), reason)
        for site in run.sites
        if site.path in in_fp8
    }
