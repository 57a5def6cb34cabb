"""The words of a site with a norm in it: what a provider can write, and what it wrote.

    z = x W^T + bias        xhat = norm(z)        y = activation(gamma xhat + beta)

A norm divides by a deviation of the row, `rstd` its reciprocal:

    layer   xhat = (z - mean(z)) rstd      1 / rstd^2 = mean((z - mean(z))^2) + epsilon
    rms     xhat = z rstd                  1 / rstd^2 = mean(z^2) + epsilon
    block   rms over each block of `NORM_BLOCK` columns, without gamma and beta
    none    xhat = z
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax.fp8 import E4M3, Fp8Array, fp8_max

NormName = Literal["none", "layer", "rms", "block"]
ActivationName = Literal["none", "relu", "swish", "hard_swish", "gelu"]

NORM_BLOCK = 256  # columns that share a statistic of a block norm

# Normalized rows are stored in E4M3 under one constant scale: |xhat| is at most the
# root of the features that share a statistic, so 16 |xhat| <= 448 up to 784 of them.
XHAT_SCALE_INV = 1 / 16
XHAT_MAX_FEATURES = 784

_LEAST_SCALE_INV = 1e-30  # of activations that are all zero


def norm_features(norm: NormName, n: int) -> int:
    """Returns how many of a row's n features share a statistic."""
    return min(n, NORM_BLOCK) if norm == "block" else n


def bounded_scale_inv(
    norm: NormName,
    n: int,
    gamma: Float[Array, "n"] | None,
    beta: Float[Array, "n"] | None,
) -> Float[Array, ""]:
    """Returns a `scale_inv` for all activations after a norm, known without them.

    A normalized row of F features is at most `sqrt(F)` anywhere, and no activation
    exceeds its argument, so

        |y| <= max_j (sqrt(F) |gamma_j| + |beta_j|)

    and nothing saturates E4M3. The bound is a few times what rows reach, which costs a
    few of the 17 octaves of the format, no precision above its least ones.
    """
    # Scaled before the maximum is taken: XLA makes that one kernel, not two.
    limit = fp8_max(E4M3)
    bound = jnp.full((1,), math.sqrt(norm_features(norm, n)) / limit, jnp.float32)
    if gamma is not None:
        bound = bound * jnp.abs(gamma)
    if beta is not None:
        bound = bound + jnp.abs(beta) / limit
    return jnp.max(jnp.maximum(bound, _LEAST_SCALE_INV))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outputs:
    """What a forward kernel is asked to write.

    Attributes:
        y: the activations in bfloat16.
        y_fp8: the activations in E4M3, with one scale a row ("rowwise"), or one for all
            rows that is given in advance ("tensorwise").
        xhat: dtype of the normalized rows kept for the backward pass: bfloat16 or E4M3
            (times 1 / `XHAT_SCALE_INV`). Without a norm, what enters the activation.
        rstd: the reciprocal deviations kept for the backward pass.
        y_amax: the largest magnitude of each row of activations, for delayed scaling.
    """

    y: bool = True
    y_fp8: Literal["rowwise", "tensorwise"] | None = None
    xhat: DTypeLike | None = None
    rstd: bool = False
    y_amax: bool = False


class Normed(NamedTuple):
    """What a forward kernel wrote; None for what was not asked for.

    Attributes:
        y: bfloat16 activations.
        y_fp8: E4M3 activations, `scale_inv` float32 `[M, 1]` or `[]`.
        xhat: bfloat16, or E4M3 to be multiplied by `XHAT_SCALE_INV`.
        rstd: float32, `[M]`, or `[N / 256, M]` for block norms wider than a block.
        y_amax: float32 `[P, M]`, of P parts of each row.
    """

    y: Float[Array, "m n"] | None
    y_fp8: Fp8Array | None
    xhat: Float[Array, "m n"] | None
    rstd: Float[Array, "..."] | None
    y_amax: Float[Array, "p m"] | None = None


class NormGradients(NamedTuple):
    """What a backward kernel of norm and activation alone wrote.

    Attributes:
        dz: bfloat16, of the product's result.
        dz_fp8: the same in FP8, `scale_inv` float32 `[M, 1]`, or the `[]` that was
            given; None if not asked for.
        dz_amax: float32 `[P]`, amaxes of P parts of dz, where a scale was given.
        dgamma, dbeta: float32, summed over the rows; None for what was not given.
    """

    dz: Float[Array, "m n"]
    dz_fp8: Fp8Array | None
    dz_amax: Float[Array, "p"] | None
    dgamma: Float[Array, "n"] | None
    dbeta: Float[Array, "n"] | None
