"""Whether a candidate is safe and fast enough at a role of a site, and why not."""

from collections.abc import Mapping
from typing import NamedTuple

from loka_jax.dispatch.policy import Limits, why_unsafe
from loka_jax.measure.intervals import Interval


class Verdict(NamedTuple):
    """The verdict on a candidate at a role of a site.

    Attributes:
        is_safe: its error is within the limits.
        is_fast: it is faster than bfloat16 by the limit; None if not measured.
        reason: why it is not safe, or not fast; its speed and error if it is both.
    """

    is_safe: bool
    is_fast: bool | None
    reason: str


def judge(
    errors: Mapping[str, Interval], speedup: float | None, limits: Limits
) -> Verdict:
    """Returns the verdict on a candidate.

    Args:
        errors: from one source of operands, by measure.
        speedup: over bfloat16; None if not measured.
        limits: on errors and speed.
    """
    why_not = why_unsafe(errors, limits)
    is_fast = None if speedup is None else speedup >= limits.speedup
    if why_not is not None:
        return Verdict(False, is_fast, why_not)
    error = f"relative L2 {errors['relative_l2'].mean:.3f}"
    if speedup is None:
        return Verdict(True, None, error)
    if not is_fast:
        return Verdict(True, False, f"{speedup:.2f} times bfloat16")
    return Verdict(True, True, f"{speedup:.2f} times bfloat16, {error}")
