"""The norm of a site: its equations, its arrays, and what a kernel writes.

    z = x W^T + bias        xhat = norm(z)        y = activation(gamma xhat + beta)

A norm divides each row by its standard deviation or root mean square, whose reciprocal
is `rstd`:

    layer   xhat = (z - mean(z)) rstd      1 / rstd^2 = mean((z - mean(z))^2) + epsilon
    rms     xhat = z rstd                  1 / rstd^2 = mean(z^2) + epsilon
    block   rms over each block of `NORM_BLOCK` columns, without gamma and beta
    none    xhat = z

In a group (`ops.group`) a value r may be added, or be a factor (of a gate, where
another product makes it), in one of several orders:

    sum_norm_act    y = drop(activation(gamma norm(z + r) + beta))
    norm_act_sum    y = drop(activation(gamma norm(z) + beta)) + r
    act_sum_norm    y = gamma norm(drop(activation(z)) + r) + beta
    act_norm        the same without r
    norm_act_mul    y = drop(activation(gamma norm(z) + beta)) * r
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax.fp8 import E4M3, Fp8Array, fp8_max

NormName = Literal["none", "layer", "rms", "block"]
# "gelu" is the form by tanh, "exact_gelu" that by erf.
ActivationName = Literal[
    "none", "relu", "swish", "hard_swish", "gelu", "exact_gelu", "tanh", "sigmoid"
]

Order = Literal[
    "sum_norm_act", "norm_act_sum", "act_sum_norm", "act_norm", "norm_act_mul"
]

NORM_BLOCK = 256  # columns that share a statistic of a block norm

# The scale of normalized rows in E4M3 where at most so many features share a statistic
# (see `xhat_scale_inv`). Sites by Pallas keep longer rows in bfloat16.
XHAT_SCALE_INV = 1 / 16
XHAT_MAX_FEATURES = 784

_MIN_SCALE_INV = 1e-30  # of activations that are all zero


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What follows a product."""

    norm: NormName
    activation: ActivationName = "none"
    epsilon: float = 1e-6
    order: Order = "sum_norm_act"

    @property
    def acts_first(self) -> bool:
        """True if the activation, and dropout, come before the norm."""
        return self.order in ("act_sum_norm", "act_norm")

    def keeps_product(self, summands: int) -> bool:
        """Returns True if an activation reads the product and its bias alone.

        Args:
            summands: the product, and what is added to it somewhere.
        """
        is_alone = summands == 1 or self.adds_last or self.multiplies
        is_first = self.acts_first or (self.norm == "none" and is_alone)
        return self.activation != "none" and is_first

    @property
    def adds_last(self) -> bool:
        """True if the residual is added after all else."""
        return self.order == "norm_act_sum"

    @property
    def multiplies(self) -> bool:
        """True if a factor comes last."""
        return self.order == "norm_act_mul"


class NormVectors(NamedTuple):
    """The float32 vectors of a norm's equations; None where absent.

    Attributes:
        gamma: factor after a "layer" or "rms" norm.
        beta: added after a "layer" or "rms" norm.
    """

    bias: Float[Array, "n"] | None = None
    gamma: Float[Array, "n"] | None = None
    beta: Float[Array, "n"] | None = None


NO_VECTORS = NormVectors()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outputs:
    """The arrays that a forward kernel writes.

    Attributes:
        y_fp8: the activations in E4M3, with one scale per row ("rowwise"), or under one
            scale for all rows that the caller passes in ("tensorwise").
        xhat: dtype of the normalized rows kept for the backward pass: bfloat16 or E4M3
            (under `xhat_scale_inv`). Without a norm, the activation's input.
        y_amax: the largest magnitude of each row of activations, for delayed scaling.
    """

    y: bool = True
    y_fp8: Literal["rowwise", "tensorwise"] | None = None
    xhat: DTypeLike | None = None
    rstd: bool = False
    y_amax: bool = False


class Normed(NamedTuple):
    """The outputs of a forward kernel; None where not requested.

    Attributes:
        y: bfloat16 activations.
        y_fp8: E4M3 activations, `scale_inv` float32 `[M, 1]` or `[]`.
        xhat: bfloat16, or E4M3 to be multiplied by `xhat_scale_inv`.
        rstd: float32, `[M]`, or `[N / 256, M]` for block norms over several blocks.
        y_amax: float32 `[P, M]`, for P parts of each row, or `[M]` of whole rows.
    """

    y: Float[Array, "m n"] | None
    y_fp8: Fp8Array | None
    xhat: Float[Array, "m n"] | None
    rstd: Float[Array, "..."] | None
    y_amax: Float[Array, "p m"] | None = None


class NormResiduals(NamedTuple):
    """What the forward pass keeps for the backward pass, as in `Normed`.

    Attributes:
        xhat: the normalized rows; without a norm the activation's input.
    """

    xhat: Float[Array, "m n"]
    rstd: Float[Array, "..."] | None


class NormGradients(NamedTuple):
    """The outputs of a backward kernel of norm and activation.

    Attributes:
        dz: bfloat16 gradient of z.
        dz_fp8: the same in FP8, `scale_inv` float32 `[M, 1]`, or the `[]` passed in;
            None if not requested.
        dz_amax: float32 `[P]`, amaxes of P parts of dz, if a scale was passed in.
        dgamma, dbeta: float32, summed over the rows; None without gamma, beta.
        dbias: the same, where there is no norm; None otherwise: the sum of dz.
    """

    dz: Float[Array, "m n"]
    dz_fp8: Fp8Array | None
    dz_amax: Float[Array, "p"] | None
    dgamma: Float[Array, "n"] | None
    dbeta: Float[Array, "n"] | None
    dbias: Float[Array, "n"] | None = None

    @property
    def of_vectors(self) -> tuple[Float[Array, "n"] | None, ...]:
        """The gradients of gamma, beta and bias."""
        return self.dgamma, self.dbeta, self.dbias


def norm_features(norm: NormName, n: int) -> int:
    """Returns how many of a row's n features share a statistic."""
    return min(n, NORM_BLOCK) if norm == "block" else n


def xhat_scale_inv(norm: NormName, n: int) -> float:
    """Returns the `scale_inv` of normalized rows of n features in E4M3.

    The least power of two with `sqrt(F) / scale_inv <= 448`, and 1/16 at least: |xhat|
    is at most the root of the F features that share a statistic.
    """
    bound = math.sqrt(norm_features(norm, n)) / fp8_max(E4M3)
    return max(XHAT_SCALE_INV, 2.0 ** math.ceil(math.log2(bound)))


def bounded_scale_inv(
    epilogue: Epilogue,
    n: int,
    gamma: Float[Array, "n"] | None,
    beta: Float[Array, "n"] | None,
) -> Float[Array, ""]:
    """Returns a `scale_inv` that no activation after a norm exceeds.

    A normalized row of F features is at most `sqrt(F)` anywhere, and no activation but
    the sigmoid, which is at most 1, exceeds its argument, so

        |y| <= max_j (sqrt(F) |gamma_j| + |beta_j|)

    and nothing saturates E4M3. The bound is a few times larger than actual rows, which
    costs a few of the format's 17 octaves, but no precision above its smallest values.
    It holds for exact statistics: where the mean of a row is thousands of times its
    deviation, a variance taken in one pass cancels, and the cast saturates.
    """
    # Scaled before the maximum is taken: XLA makes that one kernel, not two.
    limit = fp8_max(E4M3)
    root = math.sqrt(norm_features(epilogue.norm, n))
    bound = jnp.full((1,), root / limit, jnp.float32)
    if gamma is not None:
        bound = bound * jnp.abs(gamma)
    if beta is not None:
        bound = bound + jnp.abs(beta) / limit
    least = 1 / limit if epilogue.activation == "sigmoid" else _MIN_SCALE_INV
    return jnp.max(jnp.maximum(bound, least))
