"""A whole site as one differentiable operation: product, norm, activation, FP8.

    y = activation(gamma norm(lhs @ rhs + bias) + beta)

XLA runs it as the three products of `products.py` with the norm differentiated by JAX;
`kernel_site.py` runs it by Pallas kernels where `plan.py` finds some.

Sites in a row hand their activations on in FP8 (`Activations`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax import fp8, xla
from loka_jax.fp8 import E4M3, Fp8Array
from loka_jax.normed import (
    ActivationName,
    Epilogue,
    NormName,
    NormVectors,
    bounded_scale_inv,
)
from loka_jax.ops.kernel_site import KernelSite, run
from loka_jax.ops.matmul import matmul
from loka_jax.ops.plan import Implementation, Out, Plan, hand_over, plan
from loka_jax.ops.products import (
    Activations,
    Engine,
    HandOver,
    check_state,
    decide,
    equally_varying,
)
from loka_jax.recipe import ROLES, Cast, GemmRecipe, Recipe, Role
from loka_jax.scaling import DelayedScaling

__all__ = ["Activations", "Implementation", "Out", "dense_norm", "describe", "plan"]


def dense_norm(
    lhs: Float[Array, "*rows k"] | Activations,
    rhs: Float[Array, "k n"],
    *,
    bias: Float[Array, "n"] | None = None,
    gamma: Float[Array, "n"] | None = None,
    beta: Float[Array, "n"] | None = None,
    norm: NormName,
    activation: ActivationName = "none",
    epsilon: float = 1e-6,
    recipe: Recipe,
    state: DelayedScaling | None = None,
    out: Out = "compute",
    implementation: Implementation | None = None,
    axis_names: tuple[str, ...] = (),
    interpret: Any = None,
    observe: Callable[[Array, Array, Array], Array] | None = None,
) -> Float[Array, "*rows n"] | Activations:
    """Returns `activation(gamma norm(lhs @ rhs + bias) + beta)`.

    Differentiable in all arrays; gradients have their operands' dtypes. The gradient
    with respect to `state` is its value for the next step, as in `matmul`.

    Args:
        lhs: rows; what an earlier site handed over is read in FP8 if the recipe allows.
        rhs: the master weight, in float32.
        bias: added before the norm.
        gamma: factor after the norm ("layer" and "rms" only).
        beta: summand after the norm ("layer" and "rms" only).
        norm: see `loka_jax.normed`.
        activation: applied last.
        epsilon: added to the variance or mean square.
        recipe: the casts of each role.
        state: delayed-scaling state if `recipe.is_delayed`, else None.
        out: "compute" for an array in the compute dtype; "fp8" for the FP8 form, whose
            `y` is exact only where it is differentiated; "both" for the FP8 form and an
            exact `y`.
        implementation: "xla"; "triton" for its FP8 products within what XLA does;
            "pallas", or an error; None for Pallas's kernels where they serve the site
            on a Hopper GPU. `plan` tells which.
        axis_names: mesh axes over which rows are spread, under `shard_map`.
        interpret: `plgpu.InterpretGPUParams` to interpret the kernels on a CPU.
        observe: from the product, lhs and rhs to the product, for who wants to see
            them; XLA then runs the site, for kernels keep the product to themselves.

    Raises:
        ValueError: if the recipe needs a state and there is none, or the reverse; if
            gamma or beta are given to a norm without parameters; if kernels were asked
            for that do not serve this site.
    """
    check_state(recipe, state)
    if norm in ("block", "none") and not (gamma is None and beta is None):
        raise ValueError(f"norm {norm!r} takes neither gamma nor beta.")
    *leading, k = lhs.shape
    n = rhs.shape[1]
    m = 1
    for size in leading:
        m *= size
    rows = lhs.reshape(m, k)
    if not isinstance(rows, Activations):
        rows = rows.astype(recipe.compute_dtype)
    vectors = tuple(_float32(v) for v in (bias, gamma, beta))
    chosen = plan(
        recipe,
        m,
        k,
        n,
        norm=norm,
        activation=activation,
        out=out,
        has_bias=bias is not None,
        handed=lhs.scaling if isinstance(lhs, Activations) else None,
        implementation=implementation,
    )
    site = KernelSite(
        recipe=recipe,
        norm=norm,
        activation=activation,
        epsilon=epsilon,
        out=out,
        plan=chosen,
        is_pallas_asked=implementation == "pallas",
        axis_names=axis_names,
        interpret=interpret,
    )
    if chosen.is_served and observe is None:
        y = _by_kernels(site, rows, rhs, vectors, state)
    else:
        engine: Engine = "triton" if implementation == "triton" else "xla"
        y = _by_xla(site, rows, rhs, vectors, state, engine, observe)
    return y.reshape(*leading, n)


def describe(
    recipe: Recipe,
    chosen: Plan,
    m: int,
    k: int,
    n: int,
    handed: HandOver | None = None,
    engine: Engine = "xla",
) -> dict[Role, str]:
    """Returns in a few words what runs for each role of a site.

    Args:
        recipe: the casts of each role.
        chosen: the plan of the site.
        m, k, n: sizes.
        handed: how lhs is scaled, if it comes in FP8 from another site.
        engine: who multiplies in FP8 where no kernel does.
    """
    m = chosen.padded_rows(m)
    texts: dict[Role, str] = {}
    for role in ROLES:
        gemm = decide(recipe, role, m, k, n).gemm
        runs = {"fwd": chosen.forward, "dlhs": chosen.backward}.get(role)
        if role == "dlhs" and chosen.is_dlhs_wide:
            gemm = None
        first = _first_cast(recipe, role, runs, handed)
        if gemm is not None and first and gemm.first.granularity != "blockwise":
            gemm = dataclasses.replace(gemm, first=first)
        text = xla.describe(gemm, recipe.compute_dtype)
        if runs == "fused":
            text = f"pallas{text.removeprefix('xla')}"
        elif gemm is not None and engine == "triton":
            text = _by_triton(gemm)
        if runs == "norm":
            text += ", pallas norm"
        texts[role] = text
    return texts


def _by_triton(gemm: GemmRecipe) -> str:
    # Unlike XLA it multiplies blockwise operands in FP8, too.
    text = xla.describe(gemm, jnp.bfloat16).removesuffix(" operands")
    return text.replace("xla bf16 on", "triton fp8").replace("xla", "triton")


def _first_cast(
    recipe: Recipe, role: Role, runs: str | None, handed: HandOver | None
) -> Cast | None:
    """Returns how a kernel scales the first operand of an FP8 product, if one does."""
    rows = Cast(dtype=E4M3, granularity="rowwise")
    if role == "fwd" and handed is not None:
        return rows if handed == "rowwise" else Cast(dtype=E4M3)
    if role != "dlhs" or runs == "xla" or recipe.dlhs is None:
        return None
    is_known = recipe.scales_initialized and recipe.dlhs.first.scaling == "delayed"
    return None if is_known else rows


def _float32(vector: Array | None) -> Array | None:
    return None if vector is None else vector.astype(jnp.float32)


def _by_xla(site: KernelSite, lhs, rhs, vectors, state, engine: Engine, observe):
    """Runs a site by XLA, its norm differentiated by JAX."""
    recipe = site.recipe
    bias, gamma, beta = vectors
    z = matmul(
        lhs,
        rhs,
        state,
        recipe=recipe,
        axis_names=site.axis_names,
        engine=engine,
    )
    if observe is not None:
        z = observe(z, lhs.y if isinstance(lhs, Activations) else lhs, rhs)
    epilogue = Epilogue(site.norm, site.activation, site.epsilon)
    exact = xla.norm_activation(z, NormVectors(bias, gamma, beta), epilogue=epilogue)
    y = exact.astype(recipe.compute_dtype)
    if site.out == "compute":
        return y
    exact = jax.lax.stop_gradient(exact)
    if hand_over(site.norm) == "rowwise":
        return Activations(y, fp8.quantize(exact, E4M3, axes=(1,)))
    scale_inv = bounded_scale_inv(site.norm, rhs.shape[1], gamma, beta)
    return Activations(y, fp8.cast(exact, jax.lax.stop_gradient(scale_inv), E4M3))


def _by_kernels(site: KernelSite, lhs: Array | Activations, rhs, vectors, state):
    """Runs a site by kernels, on rows padded to whole tiles.

    Padding is zeros both ways, which add nothing to the gradients of the weights.
    """
    handed = None
    if isinstance(lhs, Activations):
        handed, lhs = (lhs.fp8.data, lhs.fp8.scale_inv), lhs.y
    m = lhs.shape[0]
    missing = site.plan.padded_rows(m) - m
    if missing:
        lhs = _pad_rows(lhs, missing, 0.0)
    if missing and handed is not None:
        data, scale_inv = handed
        if scale_inv.ndim:
            scale_inv = _pad_rows(scale_inv, missing, 1.0)
        handed = _pad_rows(data, missing, 0.0), scale_inv
    bias, gamma, beta = vectors
    operands = {"lhs": lhs, "rhs": rhs, "bias": bias, "gamma": gamma, "beta": beta}
    given = {name: x for name, x in operands.items() if x is not None}
    given = dict(zip(given, equally_varying(*given.values()), strict=True))
    out: Any = run(site, given, handed, state)
    y, *y_fp8 = out
    if not y_fp8:
        return y[:m]
    # It has no gradient: what flows back flows through y.
    data, scale_inv = (jax.lax.stop_gradient(x) for x in y_fp8)
    scale_inv = scale_inv[:m] if scale_inv.ndim else scale_inv
    return Activations(y[:m], Fp8Array(data[:m], scale_inv))


def _pad_rows(x, missing: int, value: float):
    return jnp.pad(x, ((0, missing), (0, 0)), constant_values=value)
