"""Whether a candidate is safe and fast enough at a role of a site, and why not."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from loka_jax.fp8 import E5M2
from loka_jax.recipe import Recipe, Role
from loka_jax.survey.config import Limits

# Relative L2 of products of Gaussian operands, by whether one of them is in E5M2.
_HEALTHY = {False: 0.037, True: 0.059}


class Verdict(NamedTuple):
    """What a candidate is worth at a role of a site.

    Attributes:
        is_safe: its error keeps the limits.
        is_fast: it is faster than bfloat16 by the limit; None if not measured.
        reason: why it is not safe, or not fast; what it reaches if it is both.
    """

    is_safe: bool
    is_fast: bool | None
    reason: str


def healthy(recipe: Recipe, role: Role) -> float:
    """Returns the relative L2 error of a role's formats on Gaussian operands."""
    gemm = recipe.gemm(role)
    assert gemm is not None
    formats = {jnp.dtype(cast.dtype) for cast in (gemm.first, gemm.second)}
    return _HEALTHY[jnp.dtype(E5M2) in formats]


def judge(
    measured: dict[str, dict[str, float]],
    speedup: float | None,
    unit: float,
    limits: Limits,
) -> Verdict:
    """Returns the verdict on a candidate.

    Args:
        measured: its errors from one source of operands.
        speedup: over bfloat16; None if not measured.
        unit: the healthy relative L2 error of its formats.
        limits: to keep.
    """
    why_unsafe = _why_unsafe(measured, unit, limits)
    is_fast = None if speedup is None else speedup >= limits.speedup
    if why_unsafe is not None:
        return Verdict(False, is_fast, why_unsafe)
    reached = f"relative L2 {measured['relative_l2']['mean']:.3f}"
    if speedup is None:
        return Verdict(True, None, reached)
    if not is_fast:
        return Verdict(True, False, f"{speedup:.2f} times bfloat16")
    return Verdict(True, True, f"{speedup:.2f} times bfloat16, {reached}")


def _why_unsafe(
    measured: dict[str, dict[str, Any]], unit: float, limits: Limits
) -> str | None:
    # The mean's upper bound must hold; NaN is no number below a limit.
    bounds = {
        "relative_l2": limits.healthy * unit,
        "worst_row": limits.worst_row * unit,
        "mere": limits.mere,
    }
    for name, bound in bounds.items():
        high = measured[name]["high"]
        if bound is not None and not high <= bound:
            return f"{name.replace('_', ' ')} {high:.3g} is above {bound:.3g}"
    return None
