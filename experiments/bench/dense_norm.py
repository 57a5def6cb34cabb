"""Times dense layers with LayerNorm and swish: XLA's forms and our kernels.

    python experiments/bench/dense_norm.py --out dense_norm.json

For every shape: kernel time of each form by JAX's profiler, median over input sets that
together exceed twice the L2; its share of the floor (its operands and results moved
once, or its product) by the copy bandwidth and GEMM rates measured first; and its speed
over XLA's bfloat16. Ours are checked against float32 first and not timed if they are
wrong. XLA's FP8 forms have everything cast beforehand. "library" is XLA's FP8 GEMM, and
norm and quantization in one kernel; "bwd" the backward pass but for the gradient of the
weight.

Without a GPU times are wall clock and only XLA's forms run, to try the script:
`--m 128 --shapes 128x128`.
"""

import dataclasses
import functools
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import tyro

from experiments.bench import result as results
from experiments.bench.forms import Form, num_sets, print_records, time_forms
from loka_jax import fp8, xla
from loka_jax.fp8 import E4M3, Fp8Array
from loka_jax.measure import reference
from loka_jax.measure.roofline import GemmDtype, Roofline, measure_roofline
from loka_jax.normed import (
    XHAT_SCALE_INV,
    Epilogue,
    NormResiduals,
    NormVectors,
    Outputs,
)
from loka_jax.ops.device import local_device
from loka_jax.pallas import dense_norm, norm_backward, norm_quantize
from loka_jax.site import SiteSpec

SHAPES = ("128x128", "256x256", "512x256", "512x512")
SHAPES += ("1024x512", "1024x1024", "2048x1024")
MAX_BACKWARD = 512  # K and N of the shapes whose backward pass is timed
_F32, _BF16 = jnp.float32, jnp.bfloat16
_EPILOGUE = Epilogue("layer", "swish")
_Y_SCALE_INV = 1 / 16  # of FP8 activations under one scale: they reach 6 or so
_TO_BF16, _TO_FP8 = Outputs(), Outputs(y=False, y_fp8="tensorwise")
# Least SQNR, a few dB under what results rounded to bfloat16 and to E4M3 reach.
_BF16_DB, _E4M3_DB = 38.0, 28.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        out: where to write the JSON, after every shape; printed only if None.
        m: rows.
        shapes: input by output features, as "512x256".
        budget_s: begin no shape after that many seconds.
    """

    out: pathlib.Path | None = None
    m: tuple[int, ...] = (131072, 32768, 8192, 2048)
    shapes: tuple[str, ...] = SHAPES
    budget_s: float | None = None

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
        least_db: SQNR that the results must have; None if they are not checked.
        why_not: why it does not run here, or None if it does.
    """

    run: Callable[..., Any]
    reads: tuple[str, ...]
    least_db: float | None = None
    why_not: str | None = None

    @property
    def gemm(self) -> GemmDtype:
        """The dtype of its product."""
        return "fp8" if "w_nk_fp8" in self.reads else "bf16"


def main(arguments: Arguments) -> dict[str, Any]:
    """Measures, prints, writes and returns the result."""
    start = time.perf_counter()
    roofline = measure_roofline()
    print(f"{jax.devices()[0].device_kind}: {roofline}")
    result = results.head("dense_norm", arguments) | {
        "inputs": "N(0, 1); weights N(0, 1 / K)",
        "roofline": dataclasses.asdict(roofline),
        "rows": [],
    }
    for spec in arguments.specs():
        seconds = time.perf_counter() - start
        if arguments.budget_s is not None and seconds > arguments.budget_s:
            result["stopped_before"] = str(spec)
            print(f"stopped before {spec}: {seconds:.0f} s are over the budget")
            break
        records = measure(spec, roofline)
        result["rows"].append({"m": spec.m, "k": spec.k, "n": spec.n, "forms": records})
        result["seconds"] = time.perf_counter() - start
        print(f"{spec} [{result['seconds']:.0f} s]")
        print_records(records)
        results.write(arguments.out, result)
    return result


def measure(spec: SiteSpec, roofline: Roofline) -> dict[str, Any]:
    """Returns a record of every form by name, as `time_forms` does.

    A form that does not serve the shape has `why_not`; the others have their speed over
    XLA's bfloat16, `vs_xla`, and their share of the floor.
    """
    ways = forward_ways(spec)
    if max(spec.k, spec.n) <= MAX_BACKWARD:
        ways |= backward_ways(spec)
    count = num_sets(spec.m * (spec.k + spec.n))  # the least that a call touches
    operands = make_operands(spec, count)
    forms = {
        name: Form(
            way.run,
            [tuple(arrays[key] for key in way.reads) for arrays in operands],
            None if way.least_db is None else _exact_of(name),
            way.least_db or 0.0,
        )
        for name, way in ways.items()
        if way.why_not is None
    }
    records: dict[str, dict[str, Any]] = time_forms(forms)
    records |= {k: {"why_not": way.why_not} for k, way in ways.items() if way.why_not}
    for name, record in records.items():
        if "us" in record:
            flops, gemm = 2.0 * spec.m * spec.k * spec.n, ways[name].gemm
            record["floor_us"] = roofline.floor_us(record["num_bytes"], flops, gemm)
            record["of_floor"] = record["floor_us"] / record["us"]
            base = records["xla_bwd_of_z" if "bwd" in name else "xla_bf16"].get("us")
            record["vs_xla"] = base and base / record["us"]
    return records


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


def forward_ways(spec: SiteSpec) -> dict[str, Way]:
    """Returns the ways to run the forward pass."""
    bf16, tensor = ("x", "w_kn", "vectors"), ("x_tensor", "w_nk_fp8", "vectors")
    to_fp8 = (*tensor, "y_scale_inv")
    pallas = local_device().why_not_pallas
    library = (
        pallas
        or xla.why_not(spec.m, spec.k, spec.n)
        or norm_quantize.why_not(spec.m, spec.n, norm="layer")
    )

    def fused(dtype, want: Outputs, x_scale_by_row: bool) -> str | None:
        problem = dense_norm.Problem(
            spec=spec,
            dtype=dtype,
            want=want,
            has_affine=True,
            x_scale_by_row=x_scale_by_row,
        )
        return pallas or dense_norm.why_not(problem)

    to_bf16 = functools.partial(_fused, _TO_BF16)
    return {
        "xla_bf16": Way(functools.partial(_xla_bf16, _BF16), bf16),
        "xla_bf16_f32_gemm": Way(functools.partial(_xla_bf16, _F32), bf16),
        "xla_fp8_to_bf16": Way(functools.partial(_xla_fp8, False), tensor),
        "xla_fp8_to_fp8": Way(functools.partial(_xla_fp8, True), tensor),
        "library_to_fp8_tensor": Way(_library, to_fp8, _E4M3_DB, library),
        "fp8_to_fp8_tensor": Way(
            functools.partial(_fused, _TO_FP8),
            to_fp8,
            _E4M3_DB,
            fused(E4M3, _TO_FP8, False),
        ),
        "fp8_to_bf16": Way(
            to_bf16,
            ("x_row", "w_nk_fp8", "vectors"),
            _BF16_DB,
            fused(E4M3, _TO_BF16, True),
        ),
        "bf16_twin": Way(
            to_bf16, ("x", "w_nk", "vectors"), _BF16_DB, fused(_BF16, _TO_BF16, False)
        ),
    }


def backward_ways(spec: SiteSpec) -> dict[str, Way]:
    """Returns the ways to run the backward pass but for the gradient of the weight."""
    bf16 = ("dy", "residuals", "w_kn", "vectors")
    why_not = local_device().why_not_pallas or norm_backward.why_not(
        spec.m, spec.n, norm="layer", xhat_dtype=E4M3
    )
    return {
        "xla_bwd_of_z": Way(_xla_backward_of_z, bf16),
        "xla_bwd_of_xhat": Way(_xla_backward_of_xhat, bf16),
        "bwd_bf16_of_fp8": Way(
            _norm_backward,
            ("dy", "residuals_fp8", "w_kn", "vectors"),
            _BF16_DB,
            why_not,
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


def _fused(want: Outputs, x, w_nk, vectors, y_scale_inv=None):
    normed = dense_norm.dense_norm(
        x, w_nk, vectors, epilogue=_EPILOGUE, want=want, y_scale_inv=y_scale_inv
    )
    return normed.y if normed.y_fp8 is None else normed.y_fp8.data


def _library(x, w_nk, vectors, y_scale_inv):
    normed = norm_quantize.norm_quantize(
        xla.fp8_product(x.data, w_nk.data, out_dtype=_BF16),
        (x.scale_inv, w_nk.scale_inv),
        vectors,
        epilogue=_EPILOGUE,
        want=_TO_FP8,
        y_scale_inv=y_scale_inv,
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


def _exact_of(name: str) -> Callable[..., Any]:
    """Returns the function that computes a form's results in float32."""
    if "bwd" in name:
        return _exact_backward
    scale = _Y_SCALE_INV if "to_fp8" in name else 1.0
    return functools.partial(_exact_forward, scale)


def _exact_forward(scale, x, w_nk, vectors, *_):
    z = jnp.dot(_float32(x), _float32(w_nk).T)
    return reference.norm_activation(z, vectors, _EPILOGUE) / scale


def _exact_backward(dy, residuals, w_kn, vectors):
    dz, *vectors = reference.norm_backward(dy, residuals, vectors, _EPILOGUE)
    return _dx(dz, _float32(w_kn)), dz, *vectors


def _float32(array):
    if isinstance(array, Fp8Array):
        return array.dequantize()
    return array.astype(_F32)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
