"""Wide layers in a row as one operation (`ops.wide_stack`): predicted times, choices.

Timed by itself, a site casts what in a stack the tail before it has written, and XLA's
FP8 of a wide site looks slower than it is in a stack. So the time of a layer within one
is counted, in what the device's limits allow:

    time = 1.10 FP8 flops / rate + 0.96 bfloat16 flops / rate + bytes moved / copy rate
           + 2.9 launches of each kernel

    forward     a tail reads z and writes each form of the next lhs
    backward    a tail reads dy and what forward kept, and writes each form of g
                (what a tail of whole rows reads, it reads twice)
    weights     are read in float32 and written in each form, and so is their gradient

The factors on flops are fitted on the stacks of `wide_stack_h200.json`: 9 % off at
three stacks of 1,024 to 7,680 features in the root mean square, 19 % at worst. That on
launches, what a kernel takes besides its work, is of 4,096 rows of a narrow cross
network on an H100.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from loka_jax import triton
from loka_jax.dispatch.candidates import table_key
from loka_jax.dispatch.policy import (
    Decision,
    Limits,
    Terms,
    accurate,
    largest_error,
    why_inaccurate,
)
from loka_jax.dispatch.table import Entry
from loka_jax.dispatch.work import roles_of
from loka_jax.measure.roofline import Roofline
from loka_jax.nn import Site
from loka_jax.ops import wide_stack
from loka_jax.ops.plan import KernelPlan, resolve
from loka_jax.recipe import ROLE_OPERANDS, ROLES, Operand, Recipe
from loka_jax.site import BF16, Choice, SiteSpec

SPREAD = 0.12  # of the logarithm of a predicted time
_FP8, _BF16 = 1.10, 0.96  # times at the rate of the roofline
_F32_BYTES, _BF16_BYTES, _FP8_BYTES = 4, 2, 1
_LAUNCH = 2.9  # times an empty kernel
# Of a layer: products, passes, and their sums; in FP8 the cast of its weight, too.
_KERNELS = {"training": 7, "inference": 2}

type _Pass = str  # "training" or "inference"


class Layers(NamedTuple):
    """The sites of a stack, the measurements of each, and the terms on each."""

    sites: Sequence[Site]
    entries: Sequence[Entry]
    terms: Sequence[Terms]

    @property
    def name(self) -> str:
        """The pass that is decided, "training" or "inference"."""
        return self.terms[0].pass_name

    def allowed(self, limits: Limits) -> list[list[Choice]]:
        """Returns the choices of each layer that are accurate and join."""
        return [
            [BF16, *(c for c in accurate(entry, limits, terms) if _joins(site, c))]
            for site, entry, terms in zip(*self, strict=True)
        ]


def stacks(sites: Sequence[Site]) -> list[range]:
    """Returns the sites of a chain that run as one operation by XLA's bfloat16.

    None where its tails, Triton's, are not installed.

    Args:
        sites: of a chain, in calling order.
    """
    if triton.why_not_installed() is not None or not all(site.joins for site in sites):
        return []
    return wide_stack.wide_runs([_plan(site, BF16) for site in sites])


def layer_us(
    spec: SiteSpec, recipe: Recipe, pass_name: _Pass, roofline: Roofline
) -> float:
    """Returns the predicted microseconds of a layer within a stack.

    Args:
        spec: the site.
        recipe: its precision.
        pass_name: "training" or "inference".
        roofline: of the device.
    """
    m, k, n = spec.m, spec.k, spec.n
    casts_weight = pass_name == "training" and any(map(recipe.gemm, ROLES))
    us = products_us(spec, recipe, pass_name, roofline)
    us += launches_us(_KERNELS[pass_name] + casts_weight, roofline)
    moved = m * k * (_BF16_BYTES + written_bytes("lhs", recipe, pass_name))
    again = m * n * spec.has_affine
    moved += again * _BF16_BYTES
    if pass_name == "training":
        kept = _FP8_BYTES if recipe.fwd is not None else _BF16_BYTES
        xhat = kept * (spec.norm != "none")
        g = written_bytes("g", recipe, pass_name)
        moved += m * n * (_BF16_BYTES + kept + xhat + g)
        moved += again * (_BF16_BYTES + xhat)
        moved += k * n * (2 * _F32_BYTES + written_bytes("rhs", recipe, pass_name))
    return us + moved / roofline.bytes_per_us


def launches_us(kernels: int, roofline: Roofline) -> float:
    """Returns the microseconds that kernels take besides their work."""
    return kernels * _LAUNCH * roofline.launch_us


def products_us(
    spec: SiteSpec, recipe: Recipe, pass_name: _Pass, roofline: Roofline
) -> float:
    """Returns the predicted microseconds of a site's products alone.

    Arguments are those of `layer_us`.
    """
    flops, us = 2.0 * spec.m * spec.k * spec.n, 0.0
    for role in roles_of(pass_name):
        if recipe.gemm(role) is None:
            us += _BF16 * flops / roofline.bf16_flops_per_us
        else:
            us += _FP8 * flops / roofline.fp8_flops_per_us
    return us


def decide_stack(
    layers: Layers, apart: Sequence[Decision], limits: Limits, roofline: Roofline
) -> list[Decision]:
    """Returns the decisions on a stack, as one operation unless `apart` is faster.

    FP8 must beat the fastest in bfloat16 by enough, here of the stack as a whole.

    Args:
        layers: of the stack.
        apart: the decisions on each site by itself.
        limits: on errors and speed.
        roofline: of the device.
    """
    if any(
        BF16.name not in entry.times.get(layers.name, {}) for entry in layers.entries
    ):
        return list(apart)

    def us(site: Site, choice: Choice) -> float:
        return layer_us(site.spec, choice.recipe, layers.name, roofline)

    fastest = [
        min(choices, key=lambda choice, site=site: us(site, choice))
        for site, choices in zip(layers.sites, layers.allowed(limits), strict=True)
    ]
    separate = [decision.choice for decision in apart]
    times = {
        tuple(choices): sum(map(us, layers.sites, choices))
        for choices in ([BF16] * len(apart), fastest)
    }
    # Choices that all join run as one operation in any case.
    if not all(map(_joins, layers.sites, separate)):
        times[tuple(separate)] = _apart_us(layers, apart)
    best = min(times, key=times.__getitem__)
    in_bf16 = [x for x in times if not any(choice.is_fp8 for choice in x)]
    best_bf16 = min(in_bf16, key=times.__getitem__)
    if times[best_bf16] / times[best] < limits.speedup:
        best = best_bf16
    if not all(map(_joins, layers.sites, best)):
        return list(apart)
    refused = _refused(layers, best, limits, us)
    return [
        Decision(
            choice,
            "the fastest as one operation with the layers beside it",
            speedup=entry.times[layers.name][BF16.name] / us(site, choice),
            error=largest_error(choice, entry, terms),
            runner_up=lost or _runner_up(before, choice),
            spread=SPREAD,
        )
        for site, entry, terms, before, choice, lost in zip(
            *layers, apart, best, refused, strict=True
        )
    ]


def _apart_us(layers: Layers, apart: Sequence[Decision]) -> float:
    """Returns the time of sites by themselves, or in chains."""
    return sum(
        entry.times[layers.name][BF16.name] / (decision.speedup or 1.0)
        for entry, decision in zip(layers.entries, apart, strict=True)
    )


def _joins(site: Site, choice: Choice) -> bool:
    """Returns True if a layer of a stack may run by a choice within it."""
    return wide_stack.why_not(_plan(site, choice)) is None


def _refused(
    layers: Layers, best: Sequence[Choice], limits: Limits, us: Callable
) -> Iterator[str | None]:
    """Yields a faster choice of each layer, and which limit on errors it breaks."""
    for site, entry, terms, choice in zip(*layers, best, strict=True):
        times = {c: us(site, c) for c in map(Choice.parse, entry.times[layers.name])}
        faster = [c for c in times if times[c] < us(site, choice) and _joins(site, c)]
        reasons = (
            f"{c.name}: {reason}"
            for c in sorted(faster, key=lambda c: times[c])
            if (reason := why_inaccurate(c, entry, limits, terms)) is not None
        )
        yield next(reasons, None)


def _runner_up(apart: Decision, choice: Choice) -> str | None:
    if apart.choice == choice:
        return apart.runner_up
    return f"{apart.choice.name}: the fastest of the site by itself"


def written_bytes(operand: Operand, recipe: Recipe, pass_name: _Pass) -> int:
    """Returns the bytes that an element takes in all forms that products read.

    Args:
        operand: of a product.
        recipe: of the site.
        pass_name: "training" or "inference".
    """
    gemms = [
        recipe.gemm(role)
        for role in roles_of(pass_name)
        if operand in ROLE_OPERANDS[role]
    ]
    in_fp8 = sum(gemm is not None for gemm in gemms)
    return _FP8_BYTES * in_fp8 + _BF16_BYTES * (in_fp8 < len(gemms))


def _plan(site: Site, choice: Choice) -> KernelPlan:
    """Returns the plan of a layer once its delayed scales are initialized."""
    choice = choice.with_initialized_scales()
    return resolve(table_key(site.spec), choice, site.plan.device)
