"""The ways to run a dense layer with norm and activation that `dense_norm.py` compares.

XLA's forms are the baselines: plain bfloat16 in the ways to write it, and FP8 with
everything done for it beforehand. Ours are the fused kernels, and XLA's FP8 GEMM with
the norm and quantization in one kernel ("library").
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from experiments.bench.dense_norm_site import (
    EPSILON,
    Y_SCALE_INV,
    Site,
    finish,
    norm_backward,
    normalize,
)
from experiments.bench.roofline import GemmDtype
from loka_jax import fp8, xla
from loka_jax.normed import (
    NORM_BLOCK,
    XHAT_MAX_FEATURES,
    Epilogue,
    NormResiduals,
    NormVectors,
    Outputs,
)
from loka_jax.site import SiteSpec

_F32, _BF16, _E4M3 = jnp.float32, jnp.bfloat16, fp8.E4M3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """One way to run a site, forward or backward.

    Attributes:
        name: what the table calls it.
        run: from the operands to the results by name; fit for `jax.jit`.
        reads: names of the operands.
        num_bytes: that it must read and write at least.
        gemm: dtype of its product, for the floor.
        is_ours: checked against the reference; the others are the baselines.
        is_backward: whether it is a form of the backward pass.
        casts_rows: whether it quantizes bfloat16 rows first.
        why_not: says why it does not run at this site, or None.
    """

    name: str
    run: Callable[..., dict[str, Any]]
    reads: tuple[str, ...]
    num_bytes: float
    gemm: GemmDtype
    is_ours: bool = True
    is_backward: bool = False
    casts_rows: bool = False
    why_not: Callable[[], str | None] = lambda: None


def forward_forms(site: Site) -> list[Form]:
    """Returns the forms of the forward pass."""
    return _xla_forms(site) + _our_forms(site)


def backward_forms(site: Site) -> list[Form]:
    """Returns the forms of the backward pass but for the gradient of the weight."""
    m, k, n = site.m, site.k, site.n
    parameters = ("gamma", "beta")
    xla_form = functools.partial(Form, gemm="bf16", is_ours=False, is_backward=True)
    wide = 2 * (m * n + m * n + k * n + m * k + m * n)  # dy, z, W; dx, dz
    of_z = xla_form(
        name="xla_bwd_of_z",
        run=functools.partial(_xla_backward_of_z, site),
        reads=("dy", "xhat", "w_kn", *parameters),
        num_bytes=wide,
    )
    of_xhat = xla_form(
        name="xla_bwd_of_xhat",
        run=functools.partial(_xla_backward_of_xhat, site),
        reads=("dy", "xhat", "rstd", "w_kn", *parameters),
        num_bytes=wide + 4 * m,
    )
    return [of_z, of_xhat, *_norm_backward_forms(site)]


def _norm_backward_forms(site: Site) -> list[Form]:
    """Returns the forms with the norm's backward pass in a kernel before XLA's GEMM.

    In FP8, dz is scaled by a number known in advance, as of delayed scaling.
    """
    m, k, n = site.m, site.k, site.n
    parameters = ("gamma", "beta")
    num_bytes = 2 * (m * n + m * n + m * k) + 4 * m  # dy; dz, dx
    narrow = Form(
        name="bwd_fp8",
        run=functools.partial(_norm_backward, site, fp8.E5M2),
        reads=("dy", "xhat_fp8", "rstd", "w_kn_fp8", "dz_scale_inv", *parameters),
        num_bytes=num_bytes + m * n + k * n,
        gemm="fp8",
        is_backward=True,
        why_not=functools.partial(_norm_backward_why_not, site, _E4M3),
    )
    wide = Form(
        name="bwd_bf16",
        run=functools.partial(_norm_backward, site, None),
        reads=("dy", "xhat", "rstd", "w_kn", *parameters),
        num_bytes=num_bytes + 2 * m * n + 2 * k * n,
        gemm="bf16",
        is_backward=True,
        why_not=functools.partial(_norm_backward_why_not, site, _BF16),
    )
    half = dataclasses.replace(
        wide,
        name="bwd_bf16_of_fp8",
        reads=("dy", "xhat_fp8", "rstd", "w_kn", *parameters),
        num_bytes=num_bytes + m * n + 2 * k * n,
        why_not=narrow.why_not,
    )
    return [narrow, wide, half]


def _xla_forms(site: Site) -> list[Form]:
    m, k, n = site.m, site.k, site.n
    wide = functools.partial(
        Form,
        reads=("x", "w_kn", "gamma", "beta"),
        num_bytes=2 * (m * k + k * n + m * n),
        gemm="bf16",
        is_ours=False,
    )
    narrow = functools.partial(
        Form, reads=("x_tensor", "w_nk_fp8", "gamma", "beta"), gemm="fp8", is_ours=False
    )
    bind = functools.partial
    return [
        wide(name="xla_bf16", run=bind(_xla_bf16, site, _BF16)),
        wide(name="xla_bf16_f32_gemm", run=bind(_xla_bf16, site, _F32)),
        narrow(
            name="xla_fp8_to_bf16",
            run=bind(_xla_fp8, site, False),
            num_bytes=m * k + k * n + 2 * m * n,
        ),
        narrow(
            name="xla_fp8_to_fp8",
            run=bind(_xla_fp8, site, True),
            num_bytes=m * k + k * n + m * n,
        ),
    ]


def _our_forms(site: Site) -> list[Form]:
    m, k, n = site.m, site.k, site.n
    to_bf16, to_fp8 = Outputs(), Outputs(y=False, y_fp8="rowwise")
    to_fp8_tensor = Outputs(y=False, y_fp8="tensorwise")
    features = min(n, NORM_BLOCK) if site.norm == "block" else n
    fits = site.norm != "none" and features <= XHAT_MAX_FEATURES
    xhat = _E4M3 if fits else _BF16
    training = Outputs(y_fp8="tensorwise", xhat=xhat, rstd=site.norm != "none")
    kept = (1 if fits else 2) * m * n + 4 * m  # xhat and deviations
    rest = ("w_nk_fp8", "gamma", "beta")
    read = m * k + k * n
    bind = functools.partial

    def fused(name, want, x, num_bytes, extra=()):
        return Form(
            name=name,
            run=bind(_ours, site, want),
            reads=(x, *rest, *extra),
            num_bytes=num_bytes + (4 * m if x == "x_row" else 0),
            gemm="fp8",
            why_not=bind(_why_not, site, _E4M3, want, x == "x_row"),
        )

    def library(name, want, num_bytes, extra=()):
        return Form(
            name=name,
            run=bind(_library, site, want),
            reads=("x_tensor", *rest, *extra),
            num_bytes=num_bytes,
            gemm="fp8",
            why_not=bind(_library_why_not, site),
        )

    return [
        library("library_to_fp8", to_fp8, read + m * n + 4 * m),
        library("library_to_fp8_tensor", to_fp8_tensor, read + m * n, ("y_scale_inv",)),
        library("library_to_bf16", to_bf16, read + 2 * m * n),
        fused("fp8_to_fp8", to_fp8, "x_row", read + m * n + 4 * m),
        fused(
            "fp8_to_fp8_tensor",
            to_fp8_tensor,
            "x_tensor",
            read + m * n,
            ("y_scale_inv",),
        ),
        fused("fp8_to_bf16", to_bf16, "x_row", read + 2 * m * n),
        Form(
            name="bf16_twin",
            run=bind(_ours, site, to_bf16),
            reads=("x", "w_nk", "gamma", "beta"),
            num_bytes=2 * (read + m * n),
            gemm="bf16",
            why_not=bind(_why_not, site, _BF16, to_bf16, False),
        ),
        Form(
            name="bf16_quantized",
            run=bind(_ours_quantized, site),
            reads=("x", *rest),
            num_bytes=2 * m * k + k * n + 2 * m * n,
            gemm="fp8",
            casts_rows=True,
            why_not=bind(_why_not, site, _E4M3, to_bf16, True),
        ),
        fused(
            "training",
            training,
            "x_tensor",
            read + 3 * m * n + kept,
            ("y_scale_inv",),
        ),
    ]


# XLA's forms.


def _activated(site: Site, z, gamma, beta):
    xhat, _ = normalize(site, z)
    return finish(site, xhat, gamma, beta)


def _xla_bf16(site: Site, gemm_dtype, x, w_kn, gamma, beta):
    z = jax.lax.dot(x, w_kn, preferred_element_type=gemm_dtype)
    return {"y": _activated(site, z.astype(_F32), gamma, beta).astype(_BF16)}


def _xla_fp8(site: Site, writes_fp8: bool, x_tensor, w_nk_fp8, gamma, beta):
    z = xla.fp8_matmul(x_tensor, w_nk_fp8, out_dtype=_BF16).astype(_F32)
    y = _activated(site, z, gamma, beta)
    if writes_fp8:
        # Without the scale: a copy of it to the results would be a kernel.
        return {"y_fp8": fp8.cast(y, jnp.asarray(Y_SCALE_INV, _F32), _E4M3).data}
    return {"y": y.astype(_BF16)}


def _xla_backward_of_z(site: Site, dy, z, w_kn, gamma, beta):
    """The gradients as autodiff makes them from bfloat16 products."""

    def forward(z, gamma, beta):
        return _activated(site, z.astype(_F32), gamma, beta).astype(_BF16)

    dz, dgamma, dbeta = jax.vjp(forward, z, gamma, beta)[1](dy)
    return _backward_results(dz, w_kn, dgamma, dbeta)


def _xla_backward_of_xhat(site: Site, dy, xhat, rstd, w_kn, gamma, beta):
    """The gradients from saved normalized rows, which spares their statistics."""
    dz, dgamma, dbeta = norm_backward(site, dy, xhat, rstd, gamma, beta)
    return _backward_results(dz.astype(_BF16), w_kn, dgamma, dbeta)


def _backward_results(dz, w_kn, dgamma, dbeta):
    dims = (((1,), (1,)), ((), ()))
    dx = jax.lax.dot_general(dz, w_kn, dims, preferred_element_type=_BF16)
    return {"dx": dx, "dz": dz, "dgamma": dgamma, "dbeta": dbeta}


# Our forms.


def _ours(site: Site, want: Outputs, x, w_nk, gamma, beta, y_scale_inv=None):
    from loka_jax.pallas.dense_norm import dense_norm

    normed = dense_norm(
        x,
        w_nk,
        NormVectors(gamma=gamma, beta=beta),
        epilogue=_epilogue(site),
        want=want,
        y_scale_inv=y_scale_inv,
        interpret=_interpreter(site),
    )
    return _by_name(normed)


def _ours_quantized(site: Site, x, w_nk_fp8, gamma, beta):
    from loka_jax.pallas.norm_quantize import norm_quantize

    x_fp8 = norm_quantize(
        x,
        epilogue=Epilogue("none"),
        want=Outputs(y=False, y_fp8="rowwise"),
        interpret=_interpreter(site),
    ).y_fp8
    return _ours(site, Outputs(), x_fp8, w_nk_fp8, gamma, beta)


def _library(
    site: Site, want: Outputs, x_tensor, w_nk_fp8, gamma, beta, y_scale_inv=None
):
    from loka_jax.pallas.norm_quantize import norm_quantize

    normed = norm_quantize(
        xla.fp8_product(x_tensor.data, w_nk_fp8.data, out_dtype=_BF16),
        (x_tensor.scale_inv, w_nk_fp8.scale_inv),
        NormVectors(gamma=gamma, beta=beta),
        epilogue=_epilogue(site),
        want=want,
        y_scale_inv=y_scale_inv,
        interpret=_interpreter(site),
    )
    return _by_name(normed)


def _norm_backward(site: Site, dz_fp8, dy, xhat, rstd, w_kn, *rest):
    from loka_jax.pallas.norm_backward import norm_backward

    *scale_inv, gamma, beta = rest
    found = norm_backward(
        dy,
        NormResiduals(xhat, rstd),
        NormVectors(gamma=gamma, beta=beta),
        epilogue=_epilogue(site),
        dz_fp8=dz_fp8,
        dz_scale_inv=scale_inv[0] if scale_inv else None,
        interpret=_interpreter(site),
    )
    if found.dz_fp8 is None:
        return _backward_results(found.dz, w_kn, found.dgamma, found.dbeta)
    dx = xla.fp8_matmul(found.dz_fp8, w_kn, out_dtype=_BF16)
    return {"dx": dx, "dz": found.dz, "dgamma": found.dgamma, "dbeta": found.dbeta}


def _epilogue(site: Site) -> Epilogue:
    return Epilogue(site.norm, site.activation, EPSILON)


def _interpreter(site: Site):
    return plgpu.InterpretGPUParams() if site.interpret else None


def _by_name(results) -> dict[str, Any]:
    found = {k: v for k, v in results._asdict().items() if v is not None}
    y_fp8 = found.get("y_fp8")
    if y_fp8 is not None and y_fp8.scale_inv.ndim == 0:
        # Without the scale, as XLA's form: a copy of it would be a kernel.
        found["y_fp8"] = y_fp8.data
    return found


def _why_not(site: Site, dtype, want: Outputs, x_scale_by_row: bool) -> str | None:
    from loka_jax.pallas.dense_norm import Problem, why_not

    spec = SiteSpec(
        m=site.m, k=site.k, n=site.n, norm=site.norm, activation=site.activation
    )
    problem = Problem(
        spec=spec,
        dtype=dtype,
        want=want,
        has_affine=spec.has_affine,
        x_scale_by_row=x_scale_by_row,
    )
    return why_not(problem)


def _library_why_not(site: Site) -> str | None:
    from loka_jax.pallas.norm_quantize import why_not

    return xla.why_not(site.m, site.k, site.n) or why_not(
        site.m, site.n, norm=site.norm
    )


def _norm_backward_why_not(site: Site, dtype) -> str | None:
    from loka_jax.pallas.norm_backward import why_not

    is_none = site.norm == "none"
    dtype = _BF16 if is_none else dtype
    reason = why_not(site.m, site.n, norm=site.norm, xhat_dtype=dtype)
    return reason or xla.why_not(site.m, site.n, site.k)
