"""What runs for a site `activation(norm(lhs @ rhs))`: fused kernels, or XLA.

Forward runs in one kernel ("fused"), with a kernel for norm, activation and
quantization after XLA's product ("norm"), or by XLA alone ("xla"); backward with a
kernel before XLA's products ("norm"), or by XLA alone. `plan` chooses, and says why
not the kernels.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from loka_jax.fp8 import E4M3
from loka_jax.normed import (
    XHAT_MAX_FEATURES,
    ActivationName,
    NormName,
    Outputs,
    norm_features,
)
from loka_jax.ops.products import HandOver, decide
from loka_jax.pallas import dense_norm as _forward
from loka_jax.pallas import norm_backward as _norm_backward
from loka_jax.pallas import norm_quantize as _norm
from loka_jax.recipe import OPERANDS, Cast, GemmRecipe, Recipe
from loka_jax.site import SiteSpec

Implementation = Literal["xla", "pallas", "triton"]
Out = Literal["compute", "fp8", "both"]

_ROWS = 64  # a kernel takes rows in multiples of it; callers pad
# Features from which dlhs gains by FP8 after the norm's kernel: XLA applies its scales
# in a pass of its own over dlhs (measured on an H200).
_LEAST_FP8_DLHS = 2048


class Plan(NamedTuple):
    """What runs for a site.

    Attributes:
        forward: one kernel ("fused"), a kernel after XLA's product ("norm"), or "xla".
        backward: a kernel before XLA's products ("norm"), or "xla".
        why_not: why forward is not fused, or None if it is.
        why_not_backward: why backward has no kernel, or None if it has.
        is_dlhs_wide: dlhs runs in the compute dtype whatever the recipe says, which is
            faster here.
    """

    forward: Literal["fused", "norm", "xla"]
    backward: Literal["norm", "xla"]
    why_not: str | None
    why_not_backward: str | None
    is_dlhs_wide: bool = False

    @property
    def is_served(self) -> bool:
        """True if a kernel runs the norm of the forward pass."""
        return self.forward != "xla"

    def padded_rows(self, m: int) -> int:
        """Returns the rows that are computed for m of them."""
        return m + -m % _ROWS if self.is_served else m


BY_XLA = Plan("xla", "xla", None, None)  # a site without a norm


def plan(
    recipe: Recipe,
    m: int,
    k: int,
    n: int,
    *,
    norm: NormName,
    activation: ActivationName,
    out: Out = "compute",
    has_bias: bool = False,
    handed: HandOver | None = None,
    implementation: Implementation | None = None,
) -> Plan:
    """Returns what runs for a site with lhs (m, k) and rhs (k, n).

    Args:
        recipe: the casts of each role.
        m, k, n: sizes; kernels pad m to a multiple of 64.
        norm: norm of the site.
        activation: activation of the site.
        out: in which form the activations leave.
        has_bias: a bias is added before the norm.
        handed: how lhs is scaled, if it comes in FP8 from another site.
        implementation: "xla" for XLA alone, "triton" for XLA around Triton's products;
            "pallas" for kernels, or an error; None for kernels where there is a Hopper
            GPU and they serve the site.

    Raises:
        ValueError: if kernels were asked for and none serves the forward pass.
    """
    why_not = _why_no_kernel(recipe, m, k, n, implementation)
    if why_not is not None:
        if implementation == "pallas":
            raise _not_served(recipe, m, k, n, norm, why_not)
        return Plan("xla", "xla", why_not, why_not)
    rows = m + -m % _ROWS
    want = training_outputs(recipe, rows, k, n, norm, out)
    fwd = decide(recipe, "fwd", rows, k, n).gemm
    why_not = _why_not_fused(
        fwd, rows, k, n, norm, activation, want, has_bias=has_bias, handed=handed
    )
    why_not_norm = _norm.why_not(rows, n, norm=norm)
    if why_not is not None and why_not_norm is not None:
        if implementation == "pallas":
            raise _not_served(recipe, m, k, n, norm, why_not)
        return Plan("xla", "xla", why_not, why_not)
    forward = "fused" if why_not is None else "norm"
    assert want.xhat is not None
    why_not_backward = _norm_backward.why_not(rows, n, norm=norm, xhat_dtype=want.xhat)
    if why_not_backward is not None:
        return Plan(forward, "xla", why_not, why_not_backward)
    return Plan(forward, "norm", why_not, None, n < _LEAST_FP8_DLHS)


def hand_over(norm: NormName) -> HandOver:
    """Returns how a site scales the activations that it hands over.

    After a norm they are bounded, and one scale is known before any of them is.
    """
    return "rowwise" if norm == "none" else "tensorwise"


def training_outputs(
    recipe: Recipe, m: int, k: int, n: int, norm: NormName, out: Out
) -> Outputs:
    """Returns what a differentiated forward pass writes.

    The activations as `out` says, and in bfloat16 always: the gradient of the next
    weight reads them. Normalized rows are kept in E4M3 where dlhs is in FP8 too, for an
    error of the same size, and where all values that a norm can give fit it.
    """
    fits = norm != "none" and norm_features(norm, n) <= XHAT_MAX_FEATURES
    is_fp8 = decide(recipe, "dlhs", m, k, n).gemm is not None
    return Outputs(
        y=True,
        y_fp8=None if out == "compute" else hand_over(norm),
        xhat=E4M3 if is_fp8 and fits else jnp.bfloat16,
        rstd=norm != "none",
    )


@functools.cache
def has_hopper() -> bool:
    """Returns True if JAX's default device is a Hopper GPU, which kernels need."""
    if jax.default_backend() != "gpu":
        return False
    return getattr(jax.devices()[0], "compute_capability", None) == "9.0"


def _why_not_fused(
    fwd: GemmRecipe | None,
    m: int,
    k: int,
    n: int,
    norm: NormName,
    activation: ActivationName,
    want: Outputs,
    *,
    has_bias: bool,
    handed: HandOver | None,
) -> str | None:
    by_row = by_column = False
    if fwd is not None:
        by_row = _is_by_row(fwd.first) if handed is None else handed == "rowwise"
        by_column = _is_by_row(fwd.second)
    spec = SiteSpec(m=m, k=k, n=n, norm=norm, activation=activation, use_bias=has_bias)
    problem = _forward.Problem(
        spec=spec,
        dtype=jnp.bfloat16 if fwd is None else E4M3,
        want=want,
        has_affine=spec.has_affine,
        x_scale_by_row=by_row,
        w_scale_by_column=by_column,
    )
    return _forward.why_not(problem)


def _is_by_row(cast: Cast) -> bool:
    return cast.granularity == "rowwise"


def _not_served(recipe, m, k, n, norm, why_not) -> ValueError:
    return ValueError(
        f"implementation='pallas' does not serve lhs ({m}, {k}), rhs ({k}, {n}) "
        f"with recipe {recipe.name!r}, norm {norm!r}: {why_not}."
    )


def _why_no_kernel(
    recipe: Recipe, m: int, k: int, n: int, implementation: Implementation | None
) -> str | None:
    """Returns why no kernel at all can or shall run, or None."""
    if implementation in ("xla", "triton"):
        return f"implementation {implementation!r}"
    for name, size in (("m", m), ("k", k), ("n", n)):
        if size == 0:
            return f"{name}=0"
    if jnp.dtype(recipe.compute_dtype) != jnp.bfloat16:
        return f"recipe {recipe.name!r} computes in {jnp.dtype(recipe.compute_dtype)}"
    casts = [cast for operand in OPERANDS for cast in recipe.casts(operand)]
    if any(cast.granularity == "blockwise" for cast in casts):
        return f"recipe {recipe.name!r} scales in blocks"
    if recipe.fwd is not None:
        formats = {jnp.dtype(c.dtype) for c in (recipe.fwd.first, recipe.fwd.second)}
        if formats != {jnp.dtype(E4M3)}:
            return f"recipe {recipe.name!r} has a forward product that is not E4M3"
        why_not = decide(recipe, "fwd", m + -m % _ROWS, k, n).why_not
        if why_not is not None:
            return why_not
    if implementation is None and not has_hopper():
        return "no Hopper GPU"
    return None
