"""Norm, activation and quantization of rows in one pass, by Triton.

    z' = z + bias        u = gamma norm(z') + beta        y = activation(u)

The companion of a product that writes z (M, N): the kernel reads z once and writes y in
bfloat16, in E4M3, or both. All arithmetic between is float32. `normed` has the norms.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax.fp8 import E4M3, Fp8Array, fp8_max
from loka_jax.normed import NORM_BLOCK, ActivationName, Normed, NormName, Outputs
from loka_jax.triton.launch import launch, power_of_two, require_triton

_WIDEST = 8192  # columns; one program holds whole rows in registers
_VALUES = 32  # of z that a thread holds: hides latencies, leaves registers
_NARROW_WARPS = 4


def why_not(m: int, n: int) -> str | None:
    """Returns why rows of this shape are not served, or None if they are."""
    if m <= 0 or n <= 0:
        return f"m={m}, n={n}: there is nothing to normalize"
    if n > _WIDEST:
        return f"n={n} is more than {_WIDEST}"
    return None


def norm_quantize(
    z: Float[Array, "m n"],
    *,
    bias: Float[Array, "n"] | None = None,
    gamma: Float[Array, "n"] | None = None,
    beta: Float[Array, "n"] | None = None,
    norm: NormName,
    activation: ActivationName,
    epsilon: float = 1e-6,
    want: Outputs,
    y_scale_inv: Float[Array, ""] | None = None,
) -> Normed:
    """Returns `activation(gamma norm(z + bias) + beta)` in bfloat16, FP8 or both.

    Args:
        z: bfloat16 or float32 rows.
        bias: float32, added before the norm.
        gamma: float32 factor after it.
        beta: float32 summand after it.
        norm: "layer" and "rms" over all columns, "block" over blocks of 256, or "none".
        activation: applied last.
        epsilon: added to the variance or mean square.
        want: the outputs, `y` and `y_fp8`. With a scale a row, a power of two, a row of
            zeros has a positive scale and a row with a NaN or an infinity is NaN.
        y_scale_inv: scale of the FP8 output if `want.y_fp8` is "tensorwise"; larger
            values saturate.

    Raises:
        ValueError: if this shape or these outputs are not served.
        ImportError: if jax-triton is not installed.
    """
    m, n = z.shape
    reason = why_not(m, n)
    if reason is not None:
        raise ValueError(f"norm_quantize: {reason}.")
    if want.xhat is not None or want.rstd or want.y_amax:
        raise ValueError(f"norm_quantize writes y and y_fp8 only, not all of {want}.")
    assert (want.y_fp8 == "tensorwise") == (y_scale_inv is not None)
    require_triton()
    from loka_jax.triton import norm_quantize_kernel  # not above: it imports Triton

    width = power_of_two(min(n, NORM_BLOCK) if norm == "block" else n)
    num_blocks = power_of_two(-(-n // width))
    num_warps, block_rows = _launch(num_blocks * width)
    # The kernel has a pointer for everything: z and single elements stand for nothing.
    y, y_fp8, row_scale_inv = launch(
        norm_quantize_kernel.norm_quantize_kernel,
        *(z if x is None else x for x in (z, bias, gamma, beta, y_scale_inv)),
        outputs=[
            jax.ShapeDtypeStruct((m, n) if want.y else (1, 1), jnp.bfloat16),
            jax.ShapeDtypeStruct((m, n) if want.y_fp8 else (1, 1), E4M3),
            jax.ShapeDtypeStruct((m if want.y_fp8 == "rowwise" else 1, 1), jnp.float32),
        ],
        grid=-(-m // block_rows),
        num_warps=num_warps,
        num_stages=1,
        constants=dict(
            m=m,
            n=n,
            num_blocks=num_blocks,
            width=width,
            block_rows=block_rows,
            norm=norm,
            activation=activation,
            epsilon=epsilon,
            has_bias=bias is not None,
            has_gamma=gamma is not None,
            has_beta=beta is not None,
            writes_y=want.y,
            writes_fp8=want.y_fp8 or "none",
            fp8_max=fp8_max(E4M3),
            # As in `fp8.compute_scale_inv`: no scale overflows, none is subnormal.
            least_amax=2 * fp8_max(E4M3) * float(jnp.finfo(jnp.float32).tiny),
        ),
    )
    scale_inv = row_scale_inv if y_scale_inv is None else y_scale_inv
    return Normed(
        y=y if want.y else None,
        y_fp8=Fp8Array(y_fp8, scale_inv) if want.y_fp8 else None,
        xhat=None,
        rstd=None,
    )


def _launch(columns: int) -> tuple[int, int]:
    """Returns the warps of a program and its rows, for padded rows of so many columns.

    A program of four warps takes several narrow rows, wide ones get more warps.
    """
    values = 32 * _NARROW_WARPS * _VALUES
    if columns <= values:
        return _NARROW_WARPS, values // columns
    return columns // (32 * _VALUES), 1
