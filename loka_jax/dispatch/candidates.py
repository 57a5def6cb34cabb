"""The candidates of a site: the choices that can run there exactly as requested.

A candidate is a `Choice` for a whole site, because its products share work: a cast of g
serves dlhs and drhs, and the norm's kernel makes that of dlhs.
"""

import dataclasses
from collections.abc import Iterator

from loka_jax.ops.device import HOPPER, Device
from loka_jax.ops.plan import resolve
from loka_jax.site import ALONE, Choice, SiteSpec

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
        reason = reason or why_no_kernels(device)
    return reason or resolve(spec, choice, device).refusal


def why_no_kernels(device: Device) -> str | None:
    """Returns why none of our kernels run on a device, or None: all are for Hopper."""
    return device.why_not_pallas


def why_no_fp8(device: Device) -> str | None:
    """Returns why a device has no FP8, or None if it has it or emulates it."""
    capability = device.compute_capability
    if capability is None or tuple(map(int, capability.split("."))) >= _FIRST_WITH_FP8:
        return None
    return f"its compute capability is {capability}, and FP8 needs 8.9"


def candidates(
    spec: SiteSpec, device: Device = HOPPER, recipes: tuple[str, ...] = RECIPES
) -> Iterator[Choice]:
    """Yields the candidates of a site on a device, XLA's bfloat16 first."""
    for provider in ALONE:
        for name in recipes:
            choice = Choice.parse(f"{provider} {name}")
            if why_not(choice, spec, device) is None:
                yield choice
