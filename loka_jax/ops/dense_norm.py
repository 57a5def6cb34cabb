"""A whole site as one differentiable operation: product, norm, activation, FP8.

    y = activation(gamma norm(lhs @ rhs + bias) + beta)

XLA runs it as the three products of `products.py` with the norm differentiated by JAX.
The Pallas kernels run it in one kernel each way, drhs apart, which stays with XLA, or
the norm in one kernel each way where the weight is too large for that:

    forward     y, and for the backward pass xhat = norm(...) and rstd
    backward    dy, xhat, rstd -> dlhs, dz, dgamma, dbeta        drhs = lhs^T dz

The backward kernel casts dz to E4M3 with one scale a row where the recipe has dlhs in
FP8, for a scale of the whole tensor would need a pass of its own.

Sites in a row hand their activations on in FP8 (`Activations`), with one scale a row.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax import fp8, xla
from loka_jax.fp8 import E4M3, Fp8Array
from loka_jax.normed import ActivationName, Normed, NormName, Outputs
from loka_jax.ops import kernels
from loka_jax.ops.kernels import Implementation, Out, Plan, plan
from loka_jax.ops.matmul import matmul
from loka_jax.ops.products import (
    Activations,
    Products,
    check_state,
    decide,
    equally_varying,
    takes_rows,
)
from loka_jax.recipe import ROLES, Cast, Recipe, Role
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
    out: Out = "wide",
    implementation: Implementation | None = None,
    axis_names: tuple[str, ...] = (),
    interpret: Any = None,
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
        out: "wide" for an array in the compute dtype; "fp8" for the FP8 form, whose `y`
            is exact only where it is differentiated; "both" for the FP8 form and an
            exact `y`.
        implementation: "xla"; "pallas", or an error; None for the kernels where they
            serve the site on a Hopper GPU. `plan` tells which.
        axis_names: mesh axes over which rows are spread, under `shard_map`.
        interpret: `plgpu.InterpretGPUParams` to interpret the kernels on a CPU.

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
        is_handed=isinstance(lhs, Activations),
        implementation=implementation,
    )
    site = _Site(
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
    run = _by_kernels if chosen.is_served else _by_xla
    y = run(site, rows, rhs, vectors, state)
    return y.reshape(*leading, n)


def describe(
    recipe: Recipe, chosen: Plan, m: int, k: int, n: int, *, is_handed: bool = False
) -> dict[Role, str]:
    """Returns in a few words what runs for each role of a site.

    Args:
        recipe: the casts of each role.
        chosen: the plan of the site.
        m, k, n: sizes.
        is_handed: lhs comes in FP8 from another site.
    """
    m = chosen.padded_rows(m)
    rows = Cast(dtype=E4M3, granularity="rowwise")
    texts: dict[Role, str] = {}
    for role in ROLES:
        gemm = decide(recipe, role, m, k, n).gemm
        runs = {"fwd": chosen.forward, "dlhs": chosen.backward}.get(role)
        is_fused = runs == "fused"
        takes_rows = is_handed if role == "fwd" else runs in ("fused", "norm")
        if gemm is not None and takes_rows and gemm.first.granularity != "blockwise":
            gemm = dataclasses.replace(gemm, first=rows)
        text = xla.describe(gemm, recipe.compute_dtype)
        if is_fused:
            text = f"pallas{text.removeprefix('xla')}"
        if runs == "norm":
            text += ", pallas norm"
        texts[role] = text
    return texts


def _float32(vector: Array | None) -> Array | None:
    return None if vector is None else vector.astype(jnp.float32)


def _by_xla(site: "_Site", lhs, rhs, vectors, state):
    """Runs a site by XLA, its norm differentiated by JAX."""
    recipe = site.recipe
    bias, gamma, beta = vectors
    z = matmul(lhs, rhs, state, recipe=recipe, axis_names=site.axis_names)
    exact = xla.norm_activation(
        z,
        bias=bias,
        gamma=gamma,
        beta=beta,
        norm=site.norm,
        activation=site.activation,
        epsilon=site.epsilon,
    )
    y = exact.astype(recipe.compute_dtype)
    if site.out == "wide":
        return y
    return Activations(y, fp8.quantize(jax.lax.stop_gradient(exact), E4M3, axes=(1,)))


def _by_kernels(site: "_Site", lhs: Array | Activations, rhs, vectors, state):
    """Runs a site by kernels, on rows padded to whole tiles.

    Padding is zeros both ways, which add nothing to the gradients of the weights.
    """
    handed = lhs.fp8 if isinstance(lhs, Activations) else None
    lhs = lhs.y if isinstance(lhs, Activations) else lhs
    m = lhs.shape[0]
    padding = ((0, site.plan.padded_rows(m) - m), (0, 0))
    if padding[0][1]:
        lhs = jnp.pad(lhs, padding)
        if handed is not None:
            scale_inv = jnp.pad(handed.scale_inv, padding, constant_values=1.0)
            handed = Fp8Array(jnp.pad(handed.data, padding), scale_inv)
    bias, gamma, beta = vectors
    operands = {"lhs": lhs, "rhs": rhs, "bias": bias, "gamma": gamma, "beta": beta}
    given = {name: x for name, x in operands.items() if x is not None}
    given = dict(zip(given, equally_varying(*given.values()), strict=True))
    rows = None if handed is None else (handed.data, handed.scale_inv)
    out: Any = _run(site, given, rows, state)
    y, *y_fp8 = out
    if not y_fp8:
        return y[:m]
    # It has no gradient: what flows back flows through y.
    data, scale_inv = (jax.lax.stop_gradient(x[:m]) for x in y_fp8)
    return Activations(y[:m], Fp8Array(data, scale_inv))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Site:
    """What is static of a site that kernels run."""

    recipe: Recipe
    norm: NormName
    activation: ActivationName
    epsilon: float
    out: Out
    plan: Plan
    is_pallas_asked: bool
    axis_names: tuple[str, ...]
    interpret: Any

    def products(self, lhs, rhs) -> Products:
        """Returns the products of a site with such operands."""
        return Products(
            self.recipe, (lhs.shape[0], lhs.shape[1], rhs.shape[1]), self.axis_names
        )

    def read(self, products: Products, given, handed, state):
        """Returns lhs and rhs as the products read them."""
        rows = None
        if handed is not None and takes_rows(self.recipe, *products.sizes):
            rows = Fp8Array(*handed)
        lhs = products.read("lhs", given["lhs"], state, handed=rows)
        return lhs, products.read("rhs", given["rhs"], state)

    def forward(self, products: Products, lhs, rhs, given, want: Outputs) -> Normed:
        """Returns what the kernels of the forward pass write."""
        call = functools.partial(
            kernels.dense_norm
            if self.plan.forward == "fused"
            else kernels.norm_quantize,
            norm=self.norm,
            activation=self.activation,
            epsilon=self.epsilon,
            want=want,
            interpret=self.interpret,
        )
        if self.plan.forward == "fused":
            rows = products.view("fwd", "lhs", lhs), products.view("fwd", "rhs", rhs)
        else:
            dtype = self.recipe.compute_dtype
            rows = products.multiply_unscaled("fwd", lhs, rhs, out_dtype=dtype)
        return call(*rows, *(given.get(name) for name in ("bias", "gamma", "beta")))

    def backward(self, products: Products, dy, xhat, rstd, rhs, kept, state):
        """Returns the gradients of all but rhs, and that of z as products read it."""
        gamma, beta = kept.get("gamma"), kept.get("beta")
        if self.plan.backward == "fused":
            dlhs, dz, dgamma, dbeta = kernels.dense_norm_backward(
                dy,
                xhat,
                rstd,
                products.view("dlhs", "rhs", rhs),
                gamma,
                beta,
                norm=self.norm,
                activation=self.activation,
                interpret=self.interpret,
            )
            # The kernel took care of dlhs.
            g = products.read("g", dz, state, roles=("drhs",))
        elif self.plan.backward == "norm":
            gemm = products.gemm("dlhs")
            found = kernels.norm_backward(
                dy,
                xhat,
                rstd,
                gamma,
                beta,
                norm=self.norm,
                activation=self.activation,
                quantize=gemm is not None,
                interpret=self.interpret,
            )
            dz, dz_fp8, dgamma, dbeta = found
            g = products.read("g", dz, state, roles=("drhs",))
            if gemm is None:
                dlhs = products.multiply("dlhs", g, rhs, out_dtype=dy.dtype)
            else:
                weight = products.view("dlhs", "rhs", rhs)
                assert isinstance(weight, Fp8Array) and dz_fp8 is not None
                dlhs = xla.fp8_matmul(
                    dz_fp8,
                    weight,
                    out_dtype=dy.dtype,
                    fast_accumulation=gemm.fast_accumulation,
                )
        else:
            dz, dgamma, dbeta = xla.norm_backward(
                dy,
                xhat,
                rstd,
                gamma=gamma,
                beta=beta,
                norm=self.norm,
                activation=self.activation,
            )
            g = products.read("g", dz.astype(dy.dtype), state)
            dlhs = products.multiply("dlhs", g, rhs, out_dtype=dy.dtype)
        dbias = jnp.sum(dz, axis=0, dtype=jnp.float32) if "bias" in kept else None
        found = {"lhs": dlhs, "bias": dbias, "gamma": dgamma, "beta": dbeta}
        return found, g


# What is in FP8 goes in and out as data and scale_inv: on its way through an operation
# with a gradient of its own, JAX puts other things than arrays into containers.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(
    site: _Site,
    given: dict[str, Array],
    handed: tuple[Array, Array] | None,
    state: DelayedScaling | None,
) -> tuple[Array, ...]:
    products = site.products(given["lhs"], given["rhs"])
    lhs, rhs = site.read(products, given, handed, state)
    rows = None if site.out == "wide" else "row"
    want = Outputs(y=site.out != "fp8", y_fp8=rows)
    normed = site.forward(products, lhs, rhs, given, want)
    return _out(normed)


def _out(normed: Normed) -> tuple[Array, ...]:
    """Returns y, and what was written in FP8."""
    if normed.y_fp8 is None:
        assert normed.y is not None
        return (normed.y,)
    # In place of y, which only a drhs would read: the next site's, where this one is
    # not differentiated.
    y = normed.y_fp8.dequantize(jnp.bfloat16) if normed.y is None else normed.y
    return y, normed.y_fp8.data, normed.y_fp8.scale_inv


def _run_forward(site: _Site, given, handed, state):
    if site.is_pallas_asked and site.plan.backward == "xla":
        raise ValueError(
            "implementation='pallas' does not serve the backward pass: "
            f"{site.plan.why_not_backward}."
        )
    products = site.products(given["lhs"], given["rhs"])
    lhs, rhs = site.read(products, given, handed, state)
    recipe, sizes = site.recipe, products.sizes
    want = kernels.training_outputs(recipe, *sizes, site.norm, site.out)
    normed = site.forward(products, lhs, rhs, given, want)
    operands = products.keep("lhs", lhs), products.keep("rhs", rhs)
    kept = {name: x for name, x in given.items() if name not in ("lhs", "rhs")}
    return _out(normed), (operands, kept, normed.xhat, normed.rstd, state)


def _run_backward(site: _Site, residuals, gradients):
    (lhs, rhs), kept, xhat, rstd, state = residuals
    products = site.products(lhs, rhs)
    dy, *_ = gradients
    found, g = site.backward(products, dy, xhat, rstd, rhs, kept, state)
    lhs = products.reread(lhs, state)
    found["rhs"] = products.multiply("drhs", lhs, g, out_dtype=rhs.dtype)
    found = {name: x for name, x in found.items() if x is not None}
    return found, None, products.next_state(state, lhs, rhs, g)


_run.defvjp(_run_forward, _run_backward)
