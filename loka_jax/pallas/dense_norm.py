"""One kernel for `x W^T`, norm, activation and quantization.

    z = x W^T + bias        u = gamma norm(z) + beta        y = activation(u)

x (M, K) and the weight (N, K) come in FP8, or both in bfloat16; z stays in registers.
The columns of z are cut into slabs of at most 256. A CTA keeps its slab of W in shared
memory for the whole launch and walks over row tiles of 64. Where a norm or a row scale
needs more than one slab, their CTAs form a cluster and exchange sums through
distributed shared memory.
"""

from typing import Any

from jaxtyping import Array, Float

from loka_jax.fp8 import Fp8Array
from loka_jax.normed import ActivationName, Normed, NormName, Outputs
from loka_jax.pallas.dense_norm_kernel import Kernel
from loka_jax.pallas.dense_norm_plan import (
    Inputs,
    Plan,
    Problem,
    Settings,
    best_settings,
    misfit,
    why_not,
)


def dense_norm(
    x: Float[Array, "m k"] | Fp8Array,
    w: Float[Array, "n k"] | Fp8Array,
    *,
    bias: Float[Array, "n"] | None = None,
    gamma: Float[Array, "n"] | None = None,
    beta: Float[Array, "n"] | None = None,
    norm: NormName,
    activation: ActivationName,
    epsilon: float = 1e-6,
    want: Outputs,
    y_scale_inv: Float[Array, ""] | None = None,
    settings: Settings | None = None,
    interpret: Any = None,
) -> Normed:
    """Returns what `want` asks for of `activation(norm(x @ w.T + bias))`.

    Args:
        x: bfloat16, or E4M3 with `scale_inv` of shape `[]` or `[m, 1]`.
        w: of the same dtype, `scale_inv` of shape `[]` or `[n, 1]`.
        bias: float32, added before the norm.
        gamma: float32 factor after the norm, with `beta`; both or none.
        beta: float32 summand after the norm.
        norm: "layer" and "rms" over all columns, "block" over blocks of 256 without
            gamma and beta, or "none".
        activation: applied last.
        epsilon: added to the variance or mean square.
        want: the outputs.
        y_scale_inv: scale of the FP8 output if `want.y_fp8` is "tensorwise".
        settings: the layout of the launch; the best one known if None.
        interpret: `plgpu.InterpretGPUParams` to interpret the kernel on a CPU.

    The variance is the mean square less the squared mean, in float32, as Flax's
    LayerNorm has it: features with a mean far beyond their deviation lose digits.

    Raises:
        ValueError: if the problem is not served (see `why_not`).
    """
    assert isinstance(x, Fp8Array) == isinstance(w, Fp8Array)
    assert (gamma is None) == (beta is None)
    x_data, x_scale = _data_and_scales(x)
    w_data, w_scale = _data_and_scales(w)
    inputs = Inputs(
        x=x_data,
        w=w_data,
        x_scale=x_scale,
        w_scale=w_scale,
        bias=bias,
        gamma=gamma,
        beta=beta,
        y_scale=None if y_scale_inv is None else y_scale_inv.reshape(1),
    )
    (m, k), n = inputs.x.shape, inputs.w.shape[0]
    problem = Problem(
        m=m,
        k=k,
        n=n,
        dtype=inputs.x.dtype,
        norm=norm,
        activation=activation,
        want=want,
        has_bias=bias is not None,
        has_affine=gamma is not None,
        x_scale_by_row=_is_vector(inputs.x_scale),
        w_scale_by_column=_is_vector(inputs.w_scale),
    )
    reason = why_not(problem)
    if reason is not None:
        raise ValueError(f"pallas dense_norm does not serve this site: {reason}.")
    settings = settings or best_settings(problem)
    reason = misfit(problem, settings)
    if reason is not None:
        raise ValueError(f"{settings} does not fit: {reason}.")
    return Kernel(Plan(problem, settings), epsilon).launch(inputs, interpret)


def _data_and_scales(x):
    if isinstance(x, Fp8Array):
        return x.data, x.scale_inv.reshape(-1)
    return x, None


def _is_vector(scale) -> bool:
    return scale is not None and scale.shape[0] > 1
