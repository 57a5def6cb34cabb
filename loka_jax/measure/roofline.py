"""The measured limits of the device: copy bandwidth, rates of large GEMMs, a launch."""

import dataclasses

import jax
import jax.numpy as jnp

from loka_jax import fp8, xla
from loka_jax.measure.timing import Case, time_kernels


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Measured limits.

    Attributes:
        bytes_per_us: read and written together by a copy of 256 MiB.
        fp8_flops_per_us: of XLA's FP8 GEMM of a cube, bfloat16 written.
        bf16_flops_per_us: of XLA's bfloat16 GEMM of the same cube.
        launch_us: the time of a kernel that does next to nothing.
    """

    bytes_per_us: float
    fp8_flops_per_us: float
    bf16_flops_per_us: float
    launch_us: float
    sms: int


def measure_roofline() -> Roofline:
    """Measures with normal inputs; tiny ones without a GPU, to try a benchmark."""
    is_gpu = jax.default_backend() == "gpu"
    side, copied = (8192, 1 << 26) if is_gpu else (128, 1 << 12)
    keys = jax.random.split(jax.random.key(0), 4)
    few = jnp.ones((8, 128))
    copies = [(jax.random.normal(key, (copied,)),) for key in keys]
    lhs, rhs = (jax.random.normal(key, (side, side), jnp.bfloat16) for key in keys[:2])
    cast = jax.jit(lambda x: fp8.saturate(x, fp8.E4M3))
    times = time_kernels(
        {
            "copy": Case(jax.jit(lambda x: 1.5 * x), copies),
            "fp8": Case(jax.jit(_fp8_gemm), [(cast(lhs), cast(rhs))]),
            "bf16": Case(jax.jit(_bf16_gemm), [(lhs, rhs)]),
            "launch": Case(jax.jit(lambda x: 1.5 * x), [(few,)]),
        },
        min_calls=8,
    )
    flops = 2 * side**3
    return Roofline(
        bytes_per_us=2 * 4 * copied / times["copy"].median_us,
        fp8_flops_per_us=flops / times["fp8"].median_us,
        bf16_flops_per_us=flops / times["bf16"].median_us,
        launch_us=times["launch"].median_us,
        sms=int(getattr(jax.devices()[0], "core_count", 1)),
    )


def _fp8_gemm(lhs, rhs):
    one = jnp.ones((), jnp.float32)  # known to the compiler: no pass for the scales
    lhs, rhs = fp8.Fp8Array(lhs, one), fp8.Fp8Array(rhs, one)
    return xla.fp8_matmul(lhs, rhs, out_dtype=jnp.bfloat16)


def _bf16_gemm(lhs, rhs):
    return xla.high_precision_matmul(
        lhs, rhs, compute_dtype=jnp.bfloat16, out_dtype=jnp.bfloat16
    )
