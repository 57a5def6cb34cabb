"""The products of MLPerf's DLRM-DCNv2, in the forms that `wide_tail.py` times.

out (m, n) = lhs (m, k) rhs (n, k)^T        both operands K-major
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench.wide_tail_forms import Form
from loka_jax import fp8, xla
from loka_jax.fp8 import E4M3, E5M2, Fp8Array
from loka_jax.measure.compiling import NO_CAPTURE

_BF16, _F32 = jnp.bfloat16, jnp.float32
_WIDTH, _RANK, _OVER = 3456, 512, (1024, 1024, 512, 256)
# Without it the products below whose operands are dequantized may become Triton's.
_BY_CUBLAS = (*NO_CAPTURE.items(), ("xla_gpu_enable_triton_gemm", False))


def sizes(batch: int) -> dict[tuple[int, int, int], list[str]]:
    """Returns m, k and n of the products of a training step, and what they compute."""
    layers = [("v", _WIDTH, _RANK), ("u", _RANK, _WIDTH)]
    widths = (_WIDTH, *_OVER)
    layers += [
        (f"over {i}", k, n) for i, (k, n) in enumerate(zip(widths, _OVER, strict=False))
    ]
    names: dict[tuple[int, int, int], list[str]] = {}
    for name, k, n in layers:
        names.setdefault((batch, k, n), []).append(f"{name} fwd")
        names.setdefault((batch, n, k), []).append(f"{name} dlhs")
        names.setdefault((k, batch, n), []).append(f"{name} drhs")
    return names


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def make_operands(m: int, k: int, n: int) -> dict[str, Any]:
    """Returns random operands of all forms, for results of size one."""
    keys = jax.random.split(jax.random.key(m + 7 * k + 13 * n, impl="rbg"))
    lhs = jax.random.normal(keys[0], (m, k), _BF16)
    rhs = jax.random.normal(keys[1], (n, k), _BF16) / math.sqrt(k)
    return {
        "lhs": lhs,
        "rhs": rhs.astype(_BF16),
        "lhs8": fp8.quantize(lhs),
        "rhs8": fp8.quantize(rhs),
        "lhs8_e5m2": fp8.quantize(lhs, E5M2),
        "scale_inv": jnp.asarray(2.0**-5, _F32),
    }


def product_forms() -> list[Form]:
    """Returns the forms of a product."""
    fp8s, to_fp8 = ("lhs8", "rhs8"), ("lhs8", "rhs8", "scale_inv")
    return [
        Form("bf16", _high_precision, ("lhs", "rhs")),
        Form("fp8 unscaled, fast", functools.partial(_unscaled, True), fp8s),
        Form("fp8 unscaled", functools.partial(_unscaled, False), fp8s),
        Form(
            "fp8 e5m2 unscaled",
            functools.partial(_unscaled, False),
            ("lhs8_e5m2", "rhs8"),
        ),
        Form("fp8 scaled by another pass", _scaled_after, fp8s),
        Form("fp8 scaled", _folded, fp8s, options=_BY_CUBLAS),
        Form("fp8 to fp8", _to_fp8, to_fp8, options=_BY_CUBLAS),
        Form("fp8 to fp8, amax", _to_fp8_amax, to_fp8, options=_BY_CUBLAS),
    ]


def _high_precision(lhs, rhs):
    return xla.high_precision_matmul(lhs, rhs, compute_dtype=_BF16, out_dtype=_BF16)


def _unscaled(fast: bool, lhs: Fp8Array, rhs: Fp8Array):
    return xla.fp8_product(lhs.data, rhs.data, out_dtype=_BF16, fast_accumulation=fast)


def _scaled_after(lhs: Fp8Array, rhs: Fp8Array):
    return xla.fp8_matmul(lhs, rhs, out_dtype=_BF16, fast_accumulation=True)


def _folded(lhs: Fp8Array, rhs: Fp8Array):
    """The pattern that XLA turns into an FP8 product with its scales."""
    a, b = (x.data.astype(_BF16) * x.scale_inv.astype(_BF16) for x in (lhs, rhs))
    return _high_precision(a, b)


def _to_fp8(lhs: Fp8Array, rhs: Fp8Array, scale_inv):
    return _cast(_folded(lhs, rhs), scale_inv)


def _to_fp8_amax(lhs: Fp8Array, rhs: Fp8Array, scale_inv):
    out = _folded(lhs, rhs)
    return _cast(out, scale_inv), jnp.max(jnp.abs(out))


def _cast(out, scale_inv):
    """The pattern of a result in FP8: division by a scalar, clamp, conversion."""
    limit = jnp.asarray(fp8.fp8_max(E4M3), _BF16)
    scaled = out / scale_inv.astype(_BF16)
    return jnp.clip(scaled, -limit, limit).astype(E4M3)
