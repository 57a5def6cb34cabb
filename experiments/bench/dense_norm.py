"""Times dense layers with LayerNorm and swish: XLA's forms and our kernels.

    python experiments/bench/dense_norm.py --out dense_norm.json

For every shape: kernel time of each form by JAX's profiler, median over input sets that
together exceed twice the L2, and its speed over XLA's bfloat16. Ours are checked
against float32 first and not timed if they are wrong. XLA's FP8 forms have everything
cast beforehand. "bwd" is the backward pass but for the gradient of the weight.

Without a GPU times are wall clock and only XLA's forms run, to try the script:
`--m 128 --shapes 128x128`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import tyro

from experiments.bench import result as results
from experiments.bench.forms import Form, num_sets, print_records, time_forms
from loka_jax import fp8, xla
from loka_jax.fp8 import E4M3
from loka_jax.measure import reference
from loka_jax.normed import (
    XHAT_SCALE_INV,
    Epilogue,
    NormResiduals,
    NormVectors,
    Outputs,
)
from loka_jax.ops.device import local_device
from loka_jax.pallas import dense_norm, norm_backward
from loka_jax.site import SiteSpec

_F32, _BF16 = jnp.float32, jnp.bfloat16
_EPILOGUE = Epilogue("layer", "swish")
_Y_SCALE_INV = 1 / 16  # of FP8 activations under one scale: they reach 6 or so
_TO_FP8 = Outputs(y=False, y_fp8="tensorwise")
# Least SQNR, a few dB under what results rounded to bfloat16 and to E4M3 reach.
_BF16_DB, _E4M3_DB = 38.0, 28.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(results.Options):
    """Options of the benchmark.

    Attributes:
        m: rows.
        shapes: input by output features, as "512x256".
    """

    m: tuple[int, ...] = (131072, 32768, 8192, 2048)
    shapes: tuple[str, ...] = ("128x128", "256x256", "512x256", "512x512")

    def specs(self) -> list[SiteSpec]:
        """Returns the layers, small ones first."""
        return [
            SiteSpec(m=m, k=k, n=n, norm="layer", activation="swish")
            for k, n in (map(int, shape.split("x")) for shape in self.shapes)
            for m in self.m
        ]


class Way(NamedTuple):
    """A way to run a layer, forward or backward.

    Attributes:
        run: from the operands to the results.
        reads: names of the operands.
        exact: computes the results in float32; None if they are not checked.
        least_db: SQNR that the results must have.
        why_not: why it does not run here, or None if it does.
    """

    run: Callable[..., Any]
    reads: tuple[str, ...]
    exact: Callable[..., Any] | None = None
    least_db: float = 0.0
    why_not: str | None = None


def main(arguments: Arguments) -> None:
    """Measures, prints and writes the result."""
    about = {"inputs": "N(0, 1); weights N(0, 1 / K)", "rows": []}
    result = results.head("dense_norm", arguments) | about
    for spec in results.in_time(arguments.specs(), result, arguments):
        records = measure(spec)
        result["rows"].append({"m": spec.m, "k": spec.k, "n": spec.n, "forms": records})
        print(spec)
        print_records(records)


def measure(spec: SiteSpec) -> dict[str, Any]:
    """Returns a record of every form by name, as `time_forms` does.

    A form that does not serve the shape has `why_not`; the others have their speed over
    XLA's bfloat16, `vs_xla`.
    """
    ways = ways_of(spec)
    count = num_sets(spec.m * (spec.k + spec.n))  # the least that a call touches
    operands = make_operands(spec, count)
    forms = {
        name: Form(
            way.run,
            [tuple(arrays[key] for key in way.reads) for arrays in operands],
            way.exact,
            way.least_db,
        )
        for name, way in ways.items()
        if way.why_not is None
    }
    records: dict[str, dict[str, Any]] = time_forms(forms)
    for name, record in records.items():
        base = records["xla_bwd_of_z" if "bwd" in name else "xla_bf16"].get("us")
        if base and "us" in record:
            record["vs_xla"] = base / record["us"]
    return records | {
        k: {"why_not": way.why_not} for k, way in ways.items() if way.why_not
    }


def make_operands(spec: SiteSpec, count: int) -> list[dict[str, Any]]:
    """Returns sets of random operands by name; weights are in all of them."""
    # The generator that is quick on a GPU.
    key = jax.random.key(spec.m + 7 * spec.k + 13 * spec.n, impl="rbg")
    weights = jax.jit(functools.partial(_make_weights, spec))(key)
    make = jax.jit(functools.partial(_make_rows, spec))
    return [make(jax.random.fold_in(key, i)) | weights for i in range(count)]


def _make_rows(spec: SiteSpec, key) -> dict[str, Any]:
    keys = jax.random.split(key, 4)
    x = jax.random.normal(keys[0], (spec.m, spec.k), _BF16)
    xhat = jax.random.normal(keys[1], (spec.m, spec.n), _BF16)
    xhat_fp8 = fp8.saturate(xhat.astype(_F32) / XHAT_SCALE_INV, E4M3)
    rstd = jax.random.uniform(keys[3], (spec.m,), minval=0.5, maxval=2.0)
    return {
        "x": x,
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
        "w_nk_fp8": fp8.quantize(kernel.T),
        "vectors": NormVectors(gamma=gamma, beta=beta),
        "y_scale_inv": jnp.asarray(_Y_SCALE_INV, _F32),
    }


def ways_of(spec: SiteSpec) -> dict[str, Way]:
    """Returns the ways to run a layer."""
    bf16, tensor = ("x", "w_kn", "vectors"), ("x_tensor", "w_nk_fp8", "vectors")
    backward = ("dy", "residuals", "w_kn", "vectors")
    problem = dense_norm.Problem(spec=spec, dtype=E4M3, want=_TO_FP8, has_affine=True)
    no_kernels = local_device().why_not_pallas
    return {
        "xla_bf16": Way(functools.partial(_xla_bf16, _BF16), bf16),
        "xla_bf16_f32_gemm": Way(functools.partial(_xla_bf16, _F32), bf16),
        "xla_fp8_to_bf16": Way(functools.partial(_xla_fp8, False), tensor),
        "xla_fp8_to_fp8": Way(functools.partial(_xla_fp8, True), tensor),
        "fp8_to_fp8_tensor": Way(
            _fused,
            (*tensor, "y_scale_inv"),
            _exact_forward,
            _E4M3_DB,
            no_kernels or dense_norm.why_not(problem),
        ),
        "xla_bwd_of_z": Way(_xla_backward_of_z, backward),
        "xla_bwd_of_xhat": Way(_xla_backward_of_xhat, backward),
        "bwd_bf16_of_fp8": Way(
            _norm_backward,
            ("dy", "residuals_fp8", "w_kn", "vectors"),
            _exact_backward,
            _BF16_DB,
            no_kernels
            or norm_backward.why_not(spec.m, spec.n, norm="layer", xhat_dtype=E4M3),
        ),
    }


def _xla_bf16(gemm_dtype, x, w_kn, vectors):
    z = jax.lax.dot(x, w_kn, preferred_element_type=gemm_dtype)
    return reference.norm_activation(z, vectors, _EPILOGUE).astype(_BF16)


def _xla_fp8(writes_fp8: bool, x, w_nk, vectors):
    z = xla.fp8_matmul(x, w_nk, out_dtype=_BF16)
    y = reference.norm_activation(z, vectors, _EPILOGUE)
    if not writes_fp8:
        return y.astype(_BF16)
    # Without the scale: a copy of it to the results would be a kernel.
    return fp8.cast(y, jnp.asarray(_Y_SCALE_INV, _F32), E4M3).data


def _fused(x, w_nk, vectors, y_scale_inv):
    normed = dense_norm.dense_norm(
        x, w_nk, vectors, epilogue=_EPILOGUE, want=_TO_FP8, y_scale_inv=y_scale_inv
    )
    assert normed.y_fp8 is not None
    return normed.y_fp8.data


def _xla_backward_of_z(dy, residuals, w_kn, vectors):
    """Returns the gradients as autodiff makes them from bfloat16 products."""

    def forward(z, vectors):
        return reference.norm_activation(z, vectors, _EPILOGUE).astype(_BF16)

    dz, gradients = jax.vjp(forward, residuals.xhat, vectors)[1](dy)
    return _dx(dz, w_kn), dz, gradients.gamma, gradients.beta


def _xla_backward_of_xhat(dy, residuals, w_kn, vectors):
    """Returns the gradients from normalized rows, which spares their statistics."""
    dz, *vectors = reference.norm_backward(dy, residuals, vectors, _EPILOGUE)
    return _dx(dz.astype(_BF16), w_kn), dz.astype(_BF16), *vectors


def _norm_backward(dy, residuals, w_kn, vectors):
    grads = norm_backward.norm_backward(dy, residuals, vectors, epilogue=_EPILOGUE)
    return _dx(grads.dz, w_kn), grads.dz, grads.dgamma, grads.dbeta


def _dx(dz, w_kn):
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(dz, w_kn, dims, preferred_element_type=dz.dtype)


def _exact_forward(x, w_nk, vectors, y_scale_inv):
    z = jnp.dot(x.dequantize(), w_nk.dequantize().T)
    return reference.norm_activation(z, vectors, _EPILOGUE) / y_scale_inv


def _exact_backward(dy, residuals, w_kn, vectors):
    dz, *vectors = reference.norm_backward(dy, residuals, vectors, _EPILOGUE)
    return _dx(dz, w_kn.astype(_F32)), dz, *vectors


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
