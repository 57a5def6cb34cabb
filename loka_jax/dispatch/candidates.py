"""The candidates of a site: the choices that can run there exactly as requested.

A candidate is a `Choice` for a whole site, because its products share work: a cast of g
serves dlhs and drhs, and the norm's kernel makes that of dlhs.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from loka_jax.nn import Site
from loka_jax.ops.device import HOPPER, Device, local_device
from loka_jax.ops.plan import resolve
from loka_jax.site import ALONE, BF16, Choice, SiteSpec

# Each FP8 recipe for the forward product alone, for it and dlhs, and for all.
_FP8 = ("fp8_tensorwise", "fp8_tensorwise_delayed", "fp8_rowwise")
RECIPES = (
    "bf16",
    *(f"{name}/bf16/bf16" for name in _FP8),
    *(f"{name}/{name}/bf16" for name in _FP8),
    *_FP8,
    "fp8_rowwise_bf16_drhs",  # dlhs reads the weight with one scale
    "fp8_blockwise",  # multiplied in bfloat16: no part of it can be fast alone
)

_FIRST_WITH_FP8 = (8, 9)  # compute capability


def table_key(spec: SiteSpec) -> SiteSpec:
    """Returns a site as tables name it: forms of input and output are passes there."""
    return dataclasses.replace(spec, fp8_in=None, out="compute")


def why_not(choice: Choice, spec: SiteSpec, device: Device = HOPPER) -> str | None:
    """Returns why a choice is no candidate at a site of exactly these rows, or None."""
    reason = why_no_fp8(device) if choice.is_fp8 else None
    if choice.provider == "triton":
        reason = reason or device.why_not_pallas  # all kernels are for Hopper
    return reason or resolve(spec, choice, device).refusal


def why_no_fp8(device: Device) -> str | None:
    """Returns why a device has no FP8, or None if it has it or emulates it."""
    capability = device.compute_capability
    if capability is None or tuple(map(int, capability.split("."))) >= _FIRST_WITH_FP8:
        return None
    return f"its compute capability is {capability}, and FP8 needs 8.9"


def why_not_runnable(
    choices: Mapping[str, Choice], sites: Sequence[Site]
) -> str | None:
    """Returns a clause on a choice, by path, that cannot run here; None if all can."""
    attention = {x.path: x.attention for x in sites if x.attention is not None}
    kernels = [
        path
        for path, choice in choices.items()
        if choice.provider != "xla" and path not in attention
    ]
    if kernels and local_device().why_not_pallas is not None:
        return (
            f"it has kernels for a Hopper GPU at {', '.join(kernels)}, and this "
            "machine has none"
        )
    for site in sites:
        choice = choices.get(site.path, BF16)
        reason = why_no_fp8(local_device()) if choice.is_fp8 else None
        if choice.provider != "xla" and site.path in attention:
            reason = reason or attention[site.path].why_xla
        elif site.path in kernels:
            reason = reason or why_not(choice, site.spec)
        if reason is not None:
            return f"{choice.name} cannot run at {site.path}: {reason}"
    return None


def candidates(
    spec: SiteSpec, device: Device = HOPPER, recipes: tuple[str, ...] = RECIPES
) -> Iterator[Choice]:
    """Yields the candidates of a site on a device, XLA's bfloat16 first."""
    for provider in ALONE:
        for name in recipes:
            choice = Choice.parse(f"{provider} {name}")
            if why_not(choice, spec, device) is None:
                yield choice
