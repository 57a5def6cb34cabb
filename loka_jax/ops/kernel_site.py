"""A site run by Pallas kernels, forward and backward.

    forward     y, and for the backward pass xhat = norm(...) and rstd
    backward    dy, xhat, rstd -> dz, dgamma, dbeta

Forward runs in one kernel, or in XLA's product and a kernel. The products of the
backward pass, dlhs = dz rhs^T and drhs = lhs^T dz, are XLA's. Where they take dz in
FP8, the kernel of the norm writes that form too: with the scale stored from earlier
steps, or for dlhs with one scale per row. One scale for all of this step's dz would
take another pass.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import custom_vjp
from jaxtyping import Array

from loka_jax import pallas, xla
from loka_jax.fp8 import E4M3, Fp8Array
from loka_jax.normed import (
    Epilogue,
    Normed,
    NormGradients,
    NormResiduals,
    NormVectors,
    Outputs,
    bounded_scale_inv,
)
from loka_jax.ops import kernels
from loka_jax.ops.plan import KernelPlan
from loka_jax.ops.products import Products, SiteOperand, with_copy
from loka_jax.recipe import Cast
from loka_jax.scaling import DelayedScaling
from loka_jax.site import SiteSpec


class KernelRun(NamedTuple):
    """The static arguments of a site that kernels run.

    Attributes:
        axis_names: mesh axes over which rows are spread.
    """

    plan: KernelPlan
    epsilon: float
    axis_names: tuple[str, ...]

    @property
    def products(self) -> Products:
        """The products of the site."""
        return Products.of(self.plan, self.axis_names)

    @property
    def static(self) -> dict[str, Any]:
        """Arguments that all kernels of the site share."""
        spec = self.plan.spec
        epilogue = Epilogue(spec.norm, spec.activation, self.epsilon)
        return dict(epilogue=epilogue, interpret=self.plan.device.interpret)


class _Residuals(NamedTuple):
    """The values of the forward pass that the backward pass reads."""

    lhs: SiteOperand
    rhs: SiteOperand
    vectors: NormVectors
    norm: NormResiduals
    state: DelayedScaling | None


class _Gradients(NamedTuple):
    """The gradients of a site except that of rhs; None for an absent parameter.

    That of the bias is None, too, where no kernel sums it.
    """

    lhs: Array
    g: SiteOperand
    gamma: Array | None
    beta: Array | None
    bias: Array | None = None


# FP8 goes in and out as data and scale_inv: under `custom_vjp` JAX fills containers
# with objects that are not arrays.
@functools.partial(custom_vjp, nondiff_argnums=(0,))
def run(
    site: KernelRun,
    arrays: dict[str, Array],
    fp8_lhs: tuple[Array, Array] | None,
    state: DelayedScaling | None,
) -> tuple[Array, ...]:
    """Returns y, and if the site hands FP8 on, its data and `scale_inv`.

    Args:
        fp8_lhs: data and `scale_inv` of an lhs in FP8 from another site.
        state: delayed-scaling state; its gradient is its next value.
    """
    lhs, rhs = _read(site, arrays, fp8_lhs, state)
    spec = site.plan.spec
    scaling = None if spec.out == "compute" else spec.fp8_out
    want = Outputs(y=spec.out != "fp8", y_fp8=scaling)
    return _out(_run_forward(site, lhs, rhs, arrays, want))


def _forward(site: KernelRun, arrays, fp8_lhs, state):
    plan, products = site.plan, site.products
    if plan.is_strict and plan.dlhs.kernel is None:
        raise ValueError(
            f"{plan.choice.name!r} does not serve the backward pass: "
            f"{plan.dlhs.why_not_kernel}."
        )
    lhs, rhs = _read(site, arrays, fp8_lhs, state)
    want = pallas.training_outputs(plan.spec, plan.recipe)
    normed = _run_forward(site, lhs, rhs, arrays, want)
    assert normed.xhat is not None
    products = products.backward()
    residuals = _Residuals(
        lhs=products.keep("lhs", lhs),
        rhs=products.keep("rhs", rhs),
        vectors=_vectors(arrays),
        norm=NormResiduals(normed.xhat, normed.rstd),
        state=state,
    )
    return _out(normed), residuals


def _backward(site: KernelRun, residuals: _Residuals, out_gradients):
    products = site.products.backward()
    dy, *_ = out_gradients
    gradients = _run_backward(site, dy, residuals)
    lhs, g = products.reread(residuals.lhs, residuals.state), gradients.g
    drhs = products.multiply("drhs", lhs, g, out_dtype=residuals.rhs.dtype)
    by_name = {
        "lhs": gradients.lhs,
        "rhs": drhs,
        "gamma": gradients.gamma,
        "beta": gradients.beta,
        "bias": gradients.bias,
    }
    if residuals.vectors.bias is not None and gradients.bias is None:
        assert g.value is not None
        by_name["bias"] = jnp.sum(g.value, axis=0, dtype=jnp.float32)
    by_name = {name: x for name, x in by_name.items() if x is not None}
    state = products.next_state(residuals.state, lhs, residuals.rhs, g)
    return by_name, None, state


run.defvjp(_forward, _backward)


def _vectors(arrays: dict[str, Array]) -> NormVectors:
    """Returns the parameters of the norm."""
    return NormVectors(arrays.get("bias"), arrays.get("gamma"), arrays.get("beta"))


def _out(normed: Normed) -> tuple[Array, ...]:
    """Returns y, and data and `scale_inv` of the FP8 output if there is one."""
    if normed.y_fp8 is None:
        assert normed.y is not None
        return (normed.y,)
    # Where this site is not differentiated, y is read by a drhs of the next site only.
    y = normed.y_fp8.dequantize(jnp.bfloat16) if normed.y is None else normed.y
    return y, normed.y_fp8.data, normed.y_fp8.scale_inv


def _read(site: KernelRun, arrays, fp8_lhs, state) -> tuple[SiteOperand, SiteOperand]:
    """Returns lhs and rhs as the products read them."""
    products = site.products
    rhs = products.read("rhs", arrays["rhs"], state)
    if fp8_lhs is None or not site.plan.reads_fp8:
        return _read_rows(site, arrays["lhs"], state), rhs
    return products.read("lhs", arrays["lhs"], state, handed=Fp8Array(*fp8_lhs)), rhs


def _read_rows(site: KernelRun, x, state) -> SiteOperand:
    """Returns an lhs in the compute dtype, quantized by a kernel if one can.

    The kernel takes two thirds of the time of XLA's cast (measured on an H200).
    """
    products = site.products
    cast = products.cast("fwd", "lhs")
    if cast is None or not _has_quantize(site.plan, x):
        return products.read("lhs", x, state)
    device = site.plan.device
    kernel, interpret = device.kernels.norm_quantize, device.interpret
    if cast.granularity == "rowwise":
        rows, _ = kernels.quantize(kernel, x, interpret=interpret)
        return products.read("lhs", x, state, handed=rows)
    if cast.scaling != "delayed" or not products.recipe.scales_initialized:
        return products.read("lhs", x, state)
    scale_inv = products.stored_scale_inv("lhs", cast, state)
    copy, amaxes = kernels.quantize(kernel, x, scale_inv, interpret=interpret)
    assert amaxes is not None
    return with_copy(x, copy, amaxes)


def _has_quantize(plan: KernelPlan, x: Array) -> bool:
    """Returns True if the kernel of the norm serves these rows without a norm."""
    rows = SiteSpec(m=x.shape[0], k=0, n=x.shape[1])
    return plan.device.kernels.norm_quantize.why_not(rows, plan.recipe) is None


def _run_forward(
    site: KernelRun, lhs: SiteOperand, rhs: SiteOperand, arrays, want: Outputs
) -> Normed:
    """Returns the outputs of the forward pass."""
    plan, products = site.plan, site.products
    vectors = _vectors(arrays)
    y_scale_inv = None
    if want.y_fp8 == "tensorwise":
        y_scale_inv = bounded_scale_inv(
            site.static["epilogue"], plan.spec.n, vectors.gamma, vectors.beta
        )
    options = dict(site.static, want=want, scale_inv={"y_scale_inv": y_scale_inv})
    assert plan.fwd.kernel is not None
    if plan.is_fused:
        x, w = products.view("fwd", "lhs", lhs), products.view("fwd", "rhs", rhs)
        vectors = kernels.with_affine(vectors)
        return kernels.launch(plan.fwd.kernel, x, w, vectors, **options)
    dtype = plan.recipe.compute_dtype
    z, scales = products.multiply_unscaled("fwd", lhs, rhs, out_dtype=dtype)
    return kernels.launch(plan.fwd.kernel, z, scales, vectors, **options)


def _run_backward(site: KernelRun, dy, residuals: _Residuals) -> _Gradients:
    """Returns the gradients of all but rhs, and that of z as the products read it."""
    if site.plan.dlhs.kernel is None:
        return _backward_by_xla(site, dy, residuals)
    cast = _stored_cast(site)
    if cast is not None:
        return _backward_under_stored_scale(site, cast, dy, residuals)
    products = site.products.backward()
    gemm = products.recipe.dlhs
    norm = _norm_backward(site, dy, residuals, dz_fp8=None if gemm is None else E4M3)
    g = _read_g(site, norm.dz, residuals.state)
    if gemm is None:
        dlhs = products.multiply("dlhs", g, residuals.rhs, out_dtype=dy.dtype)
        return _Gradients(dlhs, g, *norm.of_vectors)
    weight = products.view("dlhs", "rhs", residuals.rhs)
    assert isinstance(weight, Fp8Array) and norm.dz_fp8 is not None
    dlhs = xla.fp8_matmul(
        norm.dz_fp8,
        weight,
        out_dtype=dy.dtype,
        fast_accumulation=gemm.fast_accumulation,
    )
    dlhs = dlhs[:, : site.plan.spec.k]  # the weight may be padded
    return _Gradients(dlhs, g, *norm.of_vectors)


def _stored_cast(site: KernelRun) -> Cast | None:
    """Returns the cast of g whose scale is stored from earlier steps, if any."""
    products = site.products.backward()
    if not products.recipe.scales_initialized:
        return None
    casts = (products.cast(role, "g") for role in ("dlhs", "drhs"))
    return next((c for c in casts if c and c.scaling == "delayed"), None)


def _backward_under_stored_scale(
    site: KernelRun, cast: Cast, dy, residuals: _Residuals
) -> _Gradients:
    products = site.products.backward()
    scale_inv = products.stored_scale_inv("g", cast, residuals.state)
    norm = _norm_backward(site, dy, residuals, scale_inv, dz_fp8=cast.dtype)
    assert norm.dz_fp8 is not None and norm.dz_amax is not None
    g = with_copy(norm.dz, norm.dz_fp8, norm.dz_amax)
    dlhs = products.multiply("dlhs", g, residuals.rhs, out_dtype=dy.dtype)
    return _Gradients(dlhs, g, *norm.of_vectors)


def _norm_backward(
    site: KernelRun, dy, residuals: _Residuals, dz_scale_inv=None, *, dz_fp8
) -> NormGradients:
    """Returns the gradients from the kernel of norm and activation."""
    kernel, vectors = site.plan.dlhs.kernel, residuals.vectors
    assert kernel is not None
    if site.plan.spec.norm != "none":
        vectors = vectors._replace(bias=None)
    scale_inv = {"dz_scale_inv": dz_scale_inv}
    options = dict(site.static, dz_fp8=dz_fp8, scale_inv=scale_inv)
    return kernels.launch(kernel, dy, residuals.norm, vectors, **options)


def _backward_by_xla(site: KernelRun, dy, residuals: _Residuals) -> _Gradients:
    products, vectors = site.products.backward(), residuals.vectors
    epilogue = site.static["epilogue"]
    dz, dgamma, dbeta = xla.norm_backward(
        dy, residuals.norm, vectors._replace(bias=None), epilogue=epilogue
    )
    g = products.read("g", dz.astype(dy.dtype), residuals.state)
    dlhs = products.multiply("dlhs", g, residuals.rhs, out_dtype=dy.dtype)
    return _Gradients(dlhs, g, dgamma, dbeta)


def _read_g(site: KernelRun, dz, state) -> SiteOperand:
    """Returns g for drhs and for a dlhs in high precision.

    Before delayed scales are initialized, g is measured even if no product here reads
    its scale: another plan may continue from this state.
    """
    if not site.plan.recipe.scales_initialized:
        return site.products.read("g", dz, state)
    return site.products.backward().read("g", dz, state, roles=("drhs",))
