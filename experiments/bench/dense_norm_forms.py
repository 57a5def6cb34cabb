"""The ways to run a dense layer with LayerNorm and swish that `dense_norm.py` times.

XLA's forms are the baselines: bfloat16 in two ways to write it, and FP8 with everything
cast beforehand. Ours are the fused kernel, and XLA's FP8 GEMM with norm and
quantization in one kernel ("library").

Inputs are N(0, 1) and weights N(0, 1 / K), so that the product is of size one.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loka_jax import fp8, quality, xla
from loka_jax.fp8 import E4M3, Fp8Array
from loka_jax.measure import reference
from loka_jax.measure.roofline import GemmDtype
from loka_jax.normed import (
    XHAT_SCALE_INV,
    Epilogue,
    Normed,
    NormResiduals,
    NormVectors,
    Outputs,
)
from loka_jax.ops.device import local_device
from loka_jax.pallas import dense_norm, norm_backward, norm_quantize
from loka_jax.site import SiteSpec

_F32, _BF16 = jnp.float32, jnp.bfloat16
_EPILOGUE = Epilogue("layer", "swish")
_Y_SCALE_INV = 1 / 16  # of FP8 activations under one scale: they reach 6 or so
_TO_BF16 = Outputs()
_TO_FP8 = Outputs(y=False, y_fp8="tensorwise")
_ROWS_TO_FP8 = Outputs(y=False, y_fp8="rowwise")
# Least SQNR, a few dB under what results rounded to bfloat16 and to E4M3 reach.
_BF16_DB, _E4M3_DB = 38.0, 28.0

XLA_BF16 = ("xla_bf16", "xla_bf16_f32_gemm")
XLA_FP8 = ("xla_fp8_to_bf16", "xla_fp8_to_fp8")
XLA_BACKWARD = ("xla_bwd_of_z", "xla_bwd_of_xhat")
# With bfloat16 inputs XLA's FP8 forms would have to cast them first.
READING_BF16 = ("bf16_twin", "bf16_quantized")
FUSED = ("fp8_to_fp8_tensor", "fp8_to_bf16", *READING_BF16)


class Form(NamedTuple):
    """One way to run a site, forward or backward.

    Attributes:
        name: in the result.
        run: from the operands to the results by name; fit for `jax.jit`.
        reads: names of the operands.
        least_db: SQNR that the results must have; None if they are not checked.
        why_not: why it does not run here, or None if it does.
    """

    name: str
    run: Callable[..., dict[str, Any]]
    reads: tuple[str, ...]
    least_db: float | None = None
    why_not: str | None = None

    @property
    def gemm(self) -> GemmDtype:
        """The dtype of its product."""
        return "fp8" if "w_nk_fp8" in self.reads else "bf16"


class Operands(NamedTuple):
    """Arrays by name: of every input set, and those that all sets share."""

    sets: list[dict[str, Any]]
    shared: dict[str, Any]

    def arguments(self, reads: tuple[str, ...]) -> list[tuple]:
        """Returns the operands of those names, a tuple for each input set."""
        return [
            tuple({**arrays, **self.shared}[name] for name in reads)
            for arrays in self.sets
        ]


def make_operands(spec: SiteSpec, num_sets: int) -> Operands:
    """Returns random operands of all forms, forward and backward."""
    # The generator that is quick on a GPU.
    key = jax.random.key(spec.m + 7 * spec.k + 13 * spec.n, impl="rbg")
    make = jax.jit(functools.partial(_make_rows, spec))
    sets = [make(jax.random.fold_in(key, i)) for i in range(num_sets)]
    return Operands(sets, jax.jit(functools.partial(_make_weights, spec))(key))


def _make_rows(spec: SiteSpec, key) -> dict[str, Any]:
    keys = jax.random.split(key, 4)
    x = jax.random.normal(keys[0], (spec.m, spec.k), _BF16)
    xhat = jax.random.normal(keys[1], (spec.m, spec.n), _BF16)
    xhat_fp8 = fp8.saturate(xhat.astype(_F32) / XHAT_SCALE_INV, E4M3)
    rstd = jax.random.uniform(keys[3], (spec.m,), minval=0.5, maxval=2.0)
    return {
        "x": x,
        "x_row": fp8.quantize(x, axes=(1,)),
        "x_tensor": fp8.quantize(x),
        "dy": jax.random.normal(keys[2], (spec.m, spec.n), _BF16),
        "residuals": NormResiduals(xhat, rstd),
        "residuals_fp8": NormResiduals(xhat_fp8, rstd),
    }


def _make_weights(spec: SiteSpec, key) -> dict[str, Any]:
    keys = jax.random.split(key, 3)
    kernel = jax.random.normal(keys[0], (spec.k, spec.n)) / math.sqrt(spec.k)
    kernel = kernel.astype(_BF16)
    gamma = 1 + 0.1 * jax.random.normal(keys[1], (spec.n,))
    beta = 0.1 * jax.random.normal(keys[2], (spec.n,))
    return {
        "w_kn": kernel,
        "w_nk": kernel.T,
        "w_nk_fp8": fp8.quantize(kernel.T),
        "vectors": NormVectors(gamma=gamma, beta=beta),
        "y_scale_inv": jnp.asarray(_Y_SCALE_INV, _F32),
    }


def forward_forms(spec: SiteSpec) -> list[Form]:
    """Returns the forms of the forward pass."""
    bind, why_not = functools.partial, functools.partial(_fused_why_not, spec)
    bf16, rows = ("x", "w_kn", "vectors"), ("x_row", "w_nk_fp8", "vectors")
    narrow = ("x_tensor", "w_nk_fp8", "vectors")
    to_fp8 = (*narrow, "y_scale_inv")
    library_why_not = (
        local_device().why_not_pallas
        or xla.why_not(spec.m, spec.k, spec.n)
        or norm_quantize.why_not(spec.m, spec.n, norm="layer")
    )
    return [
        Form("xla_bf16", bind(_xla_bf16, _BF16), bf16),
        Form("xla_bf16_f32_gemm", bind(_xla_bf16, _F32), bf16),
        Form("xla_fp8_to_bf16", bind(_xla_fp8, False), narrow),
        Form("xla_fp8_to_fp8", bind(_xla_fp8, True), narrow),
        Form("library_to_fp8_tensor", _library, to_fp8, _E4M3_DB, library_why_not),
        Form(
            "fp8_to_fp8_tensor",
            bind(_fused, _TO_FP8),
            to_fp8,
            _E4M3_DB,
            why_not(E4M3, _TO_FP8, x_scale_by_row=False),
        ),
        Form(
            "fp8_to_bf16",
            bind(_fused, _TO_BF16),
            rows,
            _BF16_DB,
            why_not(E4M3, _TO_BF16, x_scale_by_row=True),
        ),
        Form(
            "bf16_twin",
            bind(_fused, _TO_BF16),
            ("x", "w_nk", "vectors"),
            _BF16_DB,
            why_not(_BF16, _TO_BF16, x_scale_by_row=False),
        ),
        Form(
            "bf16_quantized",
            _quantized_fused,
            ("x", "w_nk_fp8", "vectors"),
            _E4M3_DB,
            why_not(E4M3, _TO_BF16, x_scale_by_row=True),
        ),
    ]


def backward_forms(spec: SiteSpec) -> list[Form]:
    """Returns the forms of the backward pass but for the gradient of the weight."""
    bf16 = ("dy", "residuals", "w_kn", "vectors")
    narrow = ("dy", "residuals_fp8", "w_kn", "vectors")
    why_not = local_device().why_not_pallas or norm_backward.why_not(
        spec.m, spec.n, norm="layer", xhat_dtype=E4M3
    )
    return [
        Form("xla_bwd_of_z", _xla_backward_of_z, bf16),
        Form("xla_bwd_of_xhat", _xla_backward_of_xhat, bf16),
        Form("bwd_bf16_of_fp8", _norm_backward, narrow, _BF16_DB, why_not),
    ]


def _fused_why_not(
    spec: SiteSpec, dtype, want: Outputs, *, x_scale_by_row: bool
) -> str | None:
    problem = dense_norm.Problem(
        spec=spec,
        dtype=dtype,
        want=want,
        has_affine=True,
        x_scale_by_row=x_scale_by_row,
    )
    return local_device().why_not_pallas or dense_norm.why_not(problem)


# XLA's forms.


def _xla_bf16(gemm_dtype, x, w_kn, vectors):
    z = jax.lax.dot(x, w_kn, preferred_element_type=gemm_dtype)
    return {"y": reference.norm_activation(z, vectors, _EPILOGUE).astype(_BF16)}


def _xla_fp8(writes_fp8: bool, x, w_nk, vectors):
    z = xla.fp8_matmul(x, w_nk, out_dtype=_BF16)
    y = reference.norm_activation(z, vectors, _EPILOGUE)
    if not writes_fp8:
        return {"y": y.astype(_BF16)}
    # Without the scale: a copy of it to the results would be a kernel.
    return {"y": fp8.cast(y, jnp.asarray(_Y_SCALE_INV, _F32), E4M3).data}


def _xla_backward_of_z(dy, residuals, w_kn, vectors):
    """The gradients as autodiff makes them from bfloat16 products."""

    def forward(z, vectors):
        return reference.norm_activation(z, vectors, _EPILOGUE).astype(_BF16)

    dz, gradients = jax.vjp(forward, residuals.xhat, vectors)[1](dy)
    return _with_dx(dz, w_kn, gradients.gamma, gradients.beta)


def _xla_backward_of_xhat(dy, residuals, w_kn, vectors):
    """The gradients from saved normalized rows, which spares their statistics."""
    dz, dgamma, dbeta = reference.norm_backward(dy, residuals, vectors, _EPILOGUE)
    return _with_dx(dz.astype(_BF16), w_kn, dgamma, dbeta)


def _with_dx(dz, w_kn, dgamma, dbeta):
    dims = (((1,), (1,)), ((), ()))
    dx = jax.lax.dot_general(dz, w_kn, dims, preferred_element_type=_BF16)
    return {"dx": dx, "dz": dz, "dgamma": dgamma, "dbeta": dbeta}


# Our forms.


def _fused(want: Outputs, x, w_nk, vectors, y_scale_inv=None):
    return _activations(
        dense_norm.dense_norm(
            x, w_nk, vectors, epilogue=_EPILOGUE, want=want, y_scale_inv=y_scale_inv
        )
    )


def _quantized_fused(x, w_nk, vectors):
    rows = norm_quantize.norm_quantize(x, epilogue=Epilogue("none"), want=_ROWS_TO_FP8)
    return _fused(_TO_BF16, rows.y_fp8, w_nk, vectors)


def _library(x, w_nk, vectors, y_scale_inv):
    return _activations(
        norm_quantize.norm_quantize(
            xla.fp8_product(x.data, w_nk.data, out_dtype=_BF16),
            (x.scale_inv, w_nk.scale_inv),
            vectors,
            epilogue=_EPILOGUE,
            want=_TO_FP8,
            y_scale_inv=y_scale_inv,
        )
    )


def _activations(normed: Normed) -> dict[str, Any]:
    # Without the FP8 scale, as XLA's form.
    return {"y": normed.y if normed.y_fp8 is None else normed.y_fp8.data}


def _norm_backward(dy, residuals, w_kn, vectors):
    gradients = norm_backward.norm_backward(dy, residuals, vectors, epilogue=_EPILOGUE)
    return _with_dx(gradients.dz, w_kn, gradients.dgamma, gradients.dbeta)


# Is it right?


def sqnr_db(form: Form, arguments: tuple, results: dict) -> dict[str, float]:
    """Returns the SQNR of each result against float32 on the operands of its form."""
    compare = _compare_backward if form.reads[0] == "dy" else _compare_forward
    return {name: float(db) for name, db in compare(arguments, results).items()}


@jax.jit
def _compare_forward(arguments, results):
    x, w_nk, vectors, *_ = arguments
    z = jnp.dot(_float32(x), _float32(w_nk).T, precision="highest")
    y = _float32(results["y"])
    if results["y"].dtype == E4M3:
        y = y * _Y_SCALE_INV
    exact = reference.norm_activation(z, vectors, _EPILOGUE)
    return {"y": quality.sqnr(exact, y)}


@jax.jit
def _compare_backward(arguments, results):
    dy, residuals, w_kn, vectors = arguments
    dz, _, _ = reference.norm_backward(dy, residuals, vectors, _EPILOGUE)
    dx = jnp.dot(dz, _float32(w_kn).T, precision="highest")
    return {
        "dx": quality.sqnr(dx, results["dx"]),
        "dz": quality.sqnr(dz, results["dz"]),
    }


def _float32(array):
    if isinstance(array, Fp8Array):
        return array.dequantize()
    return array.astype(_F32)
