"""From a site and a choice to the kernels that run: `resolve`.

    spec, choice, device -> KernelPlan: kernel, cast and reason for each role

Forward runs in one Pallas kernel, in a Pallas kernel after XLA's product, or by XLA
alone; backward with a Pallas kernel before XLA's products, or by XLA alone. Products in
FP8 are XLA's or Triton's.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp

from loka_jax import fp8, pallas, triton, xla
from loka_jax.fp8 import E4M3
from loka_jax.ops.device import Device
from loka_jax.recipe import OPERANDS, ROLES, Cast, GemmRecipe, Recipe, Role
from loka_jax.site import Choice, SiteKernel, SiteSpec

# Fewest features at which FP8 makes dlhs faster after the norm's kernel: XLA applies
# the scales in an extra pass over dlhs (measured on an H200).
_LEAST_FP8_DLHS = 2048


class RolePlan(NamedTuple):
    """The product and kernel of one role of a site.

    Attributes:
        gemm: the casts of the FP8 product; None for a product in the compute dtype.
        kernel: the Pallas kernel of the role; None if XLA runs all but the product.
        why_not_fp8: why the product is not in FP8 though the recipe asks for it.
        why_not_kernel: why no Pallas kernel runs, or for fwd, why none includes the
            product; None without such a reason.
    """

    gemm: GemmRecipe | None
    kernel: SiteKernel | None = None
    why_not_fp8: str | None = None
    why_not_kernel: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelPlan:
    """The products and kernels of a site: hashable, static under jit.

    Attributes:
        recipe: the choice's recipe, without FP8 in products whose sizes rule it out.
        padding: rows that are added for the kernels.
        why_not: why the choice cannot run here at all, or None if it can.
        is_strict: a backward pass without a kernel of the provider is an error.
    """

    spec: SiteSpec
    choice: Choice
    device: Device
    recipe: Recipe
    fwd: RolePlan
    dlhs: RolePlan
    drhs: RolePlan
    padding: int = 0
    why_not: str | None = None
    is_strict: bool = True

    def role(self, role: Role) -> RolePlan:
        """Returns the plan of a role."""
        return {"fwd": self.fwd, "dlhs": self.dlhs, "drhs": self.drhs}[role]

    @property
    def is_fused(self) -> bool:
        """True if one kernel runs the whole forward pass."""
        return self.fwd.kernel is not None and self.fwd.why_not_kernel is None

    @property
    def runs_kernels(self) -> bool:
        """True if a Pallas kernel runs the norm of the forward pass."""
        return self.fwd.kernel is not None

    @property
    def reads_fp8(self) -> bool:
        """True if fwd can read an lhs in FP8 from another site: E4M3, not in tiles."""
        gemm = self.recipe.fwd
        if gemm is None or gemm.is_tiled:
            return False
        return jnp.dtype(gemm.first.dtype) == jnp.dtype(E4M3)

    @property
    def backward_recipe(self) -> Recipe:
        """The recipe of the backward pass, whose dlhs may stay in the compute dtype."""
        return dataclasses.replace(self.recipe, dlhs=self.dlhs.gemm)

    @property
    def refusal(self) -> str | None:
        """Why the choice cannot train here exactly as requested, or None if it can."""
        for role in ROLES:
            reason = self.role(role).why_not_fp8
            if reason is not None:
                return f"{role}: {reason}"
        if self.why_not is None and self.choice.provider == "pallas":
            return self.dlhs.why_not_kernel
        return self.why_not

    @property
    def why_no_fp8(self) -> str | None:
        """Why no role runs in FP8, or None if one does."""
        roles = [self.role(role) for role in ROLES]
        if any(self.recipe.gemm(role) is not None for role in ROLES):
            return None
        reasons = (role.why_not_fp8 for role in roles if role.why_not_fp8)
        return next(reasons, f"recipe {self.choice.recipe.name}")


@functools.cache
def resolve(spec: SiteSpec, choice: Choice, device: Device) -> KernelPlan:
    """Returns the plan of a site under a choice.

    If the choice does not serve the site, `KernelPlan.why_not` has the reason.
    """
    if choice.provider == "pallas":
        return _with_kernels(spec, choice, device)
    why_not = None
    if choice.provider == "triton":
        why_not = _why_not_triton(spec, choice.recipe, device)
    why_no_kernel = f"provider {choice.provider!r}"
    plan = _without_kernels(spec, choice, device, why_no_kernel, why_not)
    if choice.provider == "group":
        return dataclasses.replace(plan, why_not=_why_not_group(plan))
    return plan


@functools.cache
def resolve_served(spec: SiteSpec, recipe: Recipe, device: Device) -> KernelPlan:
    """Returns the plan of Pallas kernels where they serve a site, else XLA's."""
    plan = resolve(spec, Choice("pallas", recipe), device)
    if plan.why_not is None:
        return dataclasses.replace(plan, is_strict=False)
    xla_choice = Choice("xla", recipe)
    return _without_kernels(spec, xla_choice, device, plan.why_not, None)


def describe(plan: KernelPlan) -> dict[Role, str]:
    """Returns a short description of each role."""
    return {role: _describe_role(plan, role) for role in ROLES}


def _with_kernels(spec: SiteSpec, choice: Choice, device: Device) -> KernelPlan:
    """Returns the plan of Pallas kernels; `why_not` is set if none serves the site.

    Rows are padded only if no kernel takes them as they are: the copies would cost more
    than a product in a kernel of its own.
    """
    padded = dataclasses.replace(spec, m=spec.m + -spec.m % pallas.ROWS)
    recipe, reasons = _feasible(padded, choice.recipe)
    why_not = pallas.why_not(spec, choice.recipe) or reasons.get("fwd")
    why_not = why_not or device.why_not_pallas
    if why_not is not None:
        return _without_kernels(spec, choice, device, why_not, why_not)
    fused, norm, backward = device.kernels
    forward = (fused, norm)
    rows = next((s for s in (spec, padded) if _any_serves(forward, s, recipe)), padded)
    why_not_fused = fused.why_not(rows, recipe)
    if why_not_fused is not None and norm.why_not(rows, recipe) is not None:
        return _without_kernels(spec, choice, device, why_not_fused, why_not_fused)
    why_not_backward = backward.why_not(rows, recipe)
    has_backward = why_not_backward is None
    is_fp8_dlhs = not has_backward or spec.n >= _LEAST_FP8_DLHS
    return KernelPlan(
        spec=spec,
        choice=choice,
        device=device,
        recipe=recipe,
        fwd=RolePlan(
            recipe.fwd,
            fused if why_not_fused is None else norm,
            reasons.get("fwd"),
            why_not_fused,
        ),
        dlhs=RolePlan(
            recipe.dlhs if is_fp8_dlhs else None,
            backward if has_backward else None,
            reasons.get("dlhs"),
            why_not_backward,
        ),
        drhs=RolePlan(recipe.drhs, None, reasons.get("drhs")),
        padding=rows.m - spec.m,
    )


def _any_serves(kernels: tuple[SiteKernel, ...], spec: SiteSpec, recipe: Recipe):
    return any(kernel.why_not(spec, recipe) is None for kernel in kernels)


def _without_kernels(
    spec: SiteSpec,
    choice: Choice,
    device: Device,
    why_no_kernel: str,
    why_not: str | None,
) -> KernelPlan:
    recipe, reasons = _feasible(spec, choice.recipe)
    fwd, dlhs, drhs = (
        RolePlan(recipe.gemm(role), None, reasons.get(role), why_no_kernel)
        for role in ROLES
    )
    return KernelPlan(
        spec=spec,
        choice=choice,
        device=device,
        recipe=recipe,
        fwd=fwd,
        dlhs=dlhs,
        drhs=drhs,
        why_not=why_not,
    )


def _feasible(spec: SiteSpec, recipe: Recipe) -> tuple[Recipe, dict[Role, str]]:
    """Returns the recipe with FP8 where the sizes allow it, and why not elsewhere."""
    reasons: dict[Role, str] = {}
    for role in ROLES:
        if recipe.gemm(role) is not None:
            reason = xla.why_not(*spec.gemm_sizes(role))
            if reason is not None:
                reasons[role] = reason
    without = {role: None for role in reasons}
    return dataclasses.replace(recipe, **without), reasons


def _why_not_triton(spec: SiteSpec, recipe: Recipe, device: Device) -> str | None:
    missing = triton.why_not_installed() or device.why_not_triton
    if missing is not None:
        return missing
    roles: list[Role] = [role for role in ROLES if recipe.gemm(role) is not None]
    if not roles:
        return "it multiplies in FP8 only"
    if any(c.granularity == "mx" for x in OPERANDS for c in recipe.casts(x)):
        return f"recipe {recipe.name!r} is multiplied by XLA only"
    reasons = (triton.why_not(*spec.gemm_sizes(role)) for role in roles)
    return next((reason for reason in reasons if reason is not None), None)


def _why_not_group(plan: KernelPlan) -> str | None:
    """Returns why a site does not run in a group, or None if it does."""
    recipe, spec = plan.choice.recipe, plan.spec
    if spec.fp8_in is not None or spec.out != "compute":
        return "it hands FP8 on, or takes it"
    if jnp.dtype(recipe.compute_dtype) != jnp.bfloat16:
        return f"{jnp.dtype(recipe.compute_dtype).name} is not bfloat16"
    if not plan.choice.is_fp8:
        return None
    casts = [cast for operand in OPERANDS for cast in recipe.casts(operand)]
    if any(cast.scaling != "delayed" for cast in casts):
        return f"recipe {recipe.name!r} does not scale every operand by earlier amaxes"
    if not recipe.scales_initialized:
        return "delayed scales are not initialized"
    return plan.refusal


def _describe_role(plan: KernelPlan, role: Role) -> str:
    gemm, kernel = plan.role(role).gemm, plan.role(role).kernel
    first = _first_cast(plan, role)
    if gemm is not None and first and not gemm.is_tiled:
        gemm = dataclasses.replace(gemm, first=first)
    text = xla.describe(gemm, plan.recipe.compute_dtype)
    if role == "fwd" and plan.is_fused:
        return f"pallas{text.removeprefix('xla')}"
    if plan.choice.provider == "group":
        return f"{text}{_group_padding(plan)}, tails"
    if gemm is not None and plan.choice.provider == "triton":
        text = _by_triton(text)
    elif gemm is not None and xla.is_padded(gemm, *_rows(plan).gemm_sizes(role)):
        text = f"{text}, padded"
    return text if kernel is None else f"{text}, pallas norm"


def _group_padding(plan: KernelPlan) -> str:
    spec = plan.spec
    is_whole = not any(size % fp8.SIZE_MULTIPLE for size in (spec.m, spec.k, spec.n))
    return "" if is_whole else ", padded"


def _rows(plan: KernelPlan) -> SiteSpec:
    """Returns the site with the rows that are added for kernels."""
    return dataclasses.replace(plan.spec, m=plan.spec.m + plan.padding)


def _by_triton(text: str) -> str:
    # Unlike XLA it multiplies blockwise operands in FP8, too.
    text = text.removesuffix(" operands").replace("xla bf16 on", "triton fp8")
    return text.replace("xla", "triton")


def _first_cast(plan: KernelPlan, role: Role) -> Cast | None:
    """Returns how a kernel scales the first operand of an FP8 product, if one does."""
    rows = Cast(dtype=E4M3, granularity="rowwise")
    if role == "fwd" and plan.spec.fp8_in is not None:
        return rows if plan.spec.fp8_in == "rowwise" else Cast(dtype=E4M3)
    recipe = plan.recipe
    if role != "dlhs" or plan.dlhs.kernel is None or recipe.dlhs is None:
        return None
    is_stored = recipe.scales_initialized and recipe.dlhs.first.scaling == "delayed"
    return None if is_stored else rows
