"""One kernel for `x W^T`, norm, activation and quantization.

    z = x W^T + bias        u = gamma norm(z) + beta        y = activation(u)

x (M, K) and the weight (N, K) come in FP8, or both in bfloat16; z stays in registers.
The columns of z are cut into N tiles of at most 256. A persistent CTA keeps the weight
of its N tile in shared memory and computes one row tile of 64 after another. Where a
norm or a row scale spans several N tiles, their CTAs form a cluster and exchange sums
through distributed shared memory.
"""

from typing import Any

from jaxtyping import Array, Float

from loka_jax.fp8 import Fp8Array
from loka_jax.normed import NO_VECTORS, Epilogue, Normed, NormVectors, Outputs
from loka_jax.pallas import tiles
from loka_jax.pallas.dense_norm_kernel import Kernel
from loka_jax.pallas.dense_norm_layout import (
    Inputs,
    LaunchLayout,
    Problem,
    TuningConfig,
    best_config,
    misfit,
    why_not,
)
from loka_jax.site import SiteSpec

__all__ = ["Problem", "TuningConfig", "dense_norm", "why_not"]


def dense_norm(
    x: Float[Array, "m k"] | Fp8Array,
    w: Float[Array, "n k"] | Fp8Array,
    vectors: NormVectors = NO_VECTORS,
    *,
    epilogue: Epilogue,
    want: Outputs,
    y_scale_inv: Float[Array, ""] | None = None,
    config: TuningConfig | None = None,
    interpret: Any = None,
) -> Normed:
    """Returns the requested outputs of `activation(norm(x @ w.T + bias))`.

    The variance is the mean square less the squared mean, in float32, as in Flax's
    LayerNorm: features whose mean is far larger than their deviation lose digits.

    Args:
        x: bfloat16, or E4M3 with `scale_inv` of shape `[]` or `[m, 1]`.
        w: of the same dtype, `scale_inv` of shape `[]` or `[n, 1]`.
        vectors: gamma and beta come together, and not with block norms.
        y_scale_inv: scale of the FP8 output if `want.y_fp8` is "tensorwise".
        interpret: `plgpu.InterpretGPUParams` to interpret the kernel on a CPU.

    Raises:
        ValueError: if the problem is not served (see `why_not`), or the config does not
            fit it.
    """
    assert isinstance(x, Fp8Array) == isinstance(w, Fp8Array)
    assert (vectors.gamma is None) == (vectors.beta is None)
    x_data, x_scale = _data_and_scales(x)
    w_data, w_scale = _data_and_scales(w)
    (m, k), n = x_data.shape, w_data.shape[0]
    spec = SiteSpec(
        m=m,
        k=k,
        n=n,
        norm=epilogue.norm,
        activation=epilogue.activation,
        use_bias=vectors.bias is not None,
    )
    problem = Problem(
        spec=spec,
        dtype=x_data.dtype,
        want=want,
        has_affine=vectors.gamma is not None,
        x_scale_by_row=_is_vector(x_scale),
        w_scale_by_column=_is_vector(w_scale),
    )
    reason = why_not(problem)
    if reason is not None:
        raise ValueError(f"pallas dense_norm does not serve this site: {reason}.")
    config = config or best_config(problem)
    reason = misfit(problem, config)
    if reason is not None:
        raise ValueError(f"{config} does not fit: {reason}.")
    y_scale = None if y_scale_inv is None else y_scale_inv.reshape(1)
    inputs = Inputs(x_data, w_data, x_scale, w_scale, *vectors, y_scale)
    return _launch((problem, config, epilogue.epsilon), inputs, interpret)


@tiles.lowered_once
def _launch(static, inputs: Inputs, interpret) -> Normed:
    problem, config, epsilon = static
    return Kernel(LaunchLayout(problem, config), epsilon).launch(inputs, interpret)


def _data_and_scales(x):
    if isinstance(x, Fp8Array):
        return x.data, x.scale_inv.reshape(-1)
    return x, None


def _is_vector(scale) -> bool:
    return scale is not None and scale.shape[0] > 1
