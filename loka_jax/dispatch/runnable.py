"""Whether a plan from a file can run on this machine."""

from collections.abc import Sequence

from loka_jax.dispatch.candidates import why_no_fp8, why_not
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.nn import Site
from loka_jax.ops.device import local_device
from loka_jax.site import BF16


def why_not_runnable(plan: DispatchPlan, sites: Sequence[Site]) -> str | None:
    """Returns a clause on a choice that cannot run here, or None if all can."""
    choices = dict(plan.choices)
    kernels = [where for where, choice in plan.choices if choice.provider != "xla"]
    if kernels and local_device().why_not_pallas is not None:
        return (
            f"it has kernels for a Hopper GPU at {', '.join(kernels)}, and this "
            "machine has none"
        )
    for site in sites:
        choice = choices.get(site.path, BF16)
        reason = why_no_fp8(local_device()) if choice.is_fp8 else None
        if site.path in kernels:
            reason = reason or why_not(choice, site.spec)
        if reason is not None:
            return f"{choice.name} cannot run at {site.path}: {reason}"
    return None
