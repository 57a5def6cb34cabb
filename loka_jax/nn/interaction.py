"""Feature interactions: pairwise dot products and cross layers.

B is the batch, n the number of vectors, D their dimension.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from jaxtyping import Array, Float

from loka_jax.nn.dense import Dense, default_kernel_init
from loka_jax.recipe import Recipe


def pad_features(x: Float[Array, "B k"], multiple: int = 16) -> Float[Array, "B p"]:
    """Returns `x` with zero features appended up to a multiple of `multiple`.

    FP8 GEMMs take sizes in multiples of 16, and concatenated features rarely have one:
    zeros cost less than a GEMM in high precision.
    """
    return jnp.pad(x, ((0, 0), (0, -x.shape[-1] % multiple)))


@jax.custom_vjp
def dot_interaction(x: Float[Array, "B n D"]) -> Float[Array, "B p"]:
    """Returns the dot products of all pairs of distinct vectors, p = n (n - 1) / 2.

    `z_ij = <x_i, x_j>` for i > j, row by row. The gradient is written as one gather
    and one product, `dx = S x` with `S_ij = S_ji = g_ij`: the derivative of a gather
    would be a scatter, which is slow on GPUs in 16 bit.

    References:
        DLRM, arXiv 1906.00091, section 2.1.3.
    """
    n = x.shape[1]
    gram = jnp.einsum("bnd,bmd->bnm", x, x, preferred_element_type=x.dtype)
    rows, cols = np.tril_indices(n, -1)
    return gram.reshape(-1, n * n)[:, rows * n + cols]


def _dot_interaction_fwd(x):
    return dot_interaction(x), x


def _dot_interaction_bwd(x, g):
    n = x.shape[1]
    if n == 1:  # no pairs: nothing to gather
        return (jnp.zeros_like(x),)
    pair_of, has_pair = _pair_index(n)
    symmetric = jnp.where(has_pair[None, :], g[:, pair_of], jnp.zeros((), g.dtype))
    symmetric = symmetric.reshape(-1, n, n)
    dx = jnp.einsum("bnm,bmd->bnd", symmetric, x, preferred_element_type=x.dtype)
    return (dx,)


dot_interaction.defvjp(_dot_interaction_fwd, _dot_interaction_bwd)


@functools.cache
def _pair_index(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns each element's pair in a flat (n, n) matrix, and whether it has one."""
    index = np.zeros((n, n), np.int32)
    rows, cols = np.tril_indices(n, -1)
    index[rows, cols] = index[cols, rows] = np.arange(len(rows))
    return index.ravel(), ~np.eye(n, dtype=bool).ravel()


class CrossNet(linen.Module):
    """Cross layers on the flat feature vector: `x_{l+1} = x_0 * (W_l x_l + b_l) + x_l`.

    Attributes:
        num_layers: number of cross layers; layer l adds interactions of order l + 1.
        rank: `W_l = U_l V_l` of that rank (equation 2); full if None.
        recipe: of its sites.
        kernel_init: initializer of the kernels.

    References:
        DCN V2, arXiv 2008.13535, equations 1 and 2.
    """

    num_layers: int
    rank: int | None = None
    recipe: str | Recipe = "fp8_tensorwise"
    kernel_init: Callable = default_kernel_init

    @linen.compact
    def __call__(self, x0: Float[Array, "B k"]) -> Float[Array, "B k"]:
        """Returns the features after the last cross layer."""
        x = x0
        for i in range(self.num_layers):
            hidden = x
            if self.rank is not None:
                hidden = self._dense(self.rank, f"v_{i}", use_bias=False)(hidden)
            crossed = self._dense(x0.shape[-1], f"u_{i}", use_bias=True)(hidden)
            x = x0 * crossed + x
        return x

    def _dense(self, features: int, name: str, *, use_bias: bool) -> Dense:
        return Dense(
            features,
            recipe=self.recipe,
            use_bias=use_bias,
            kernel_init=self.kernel_init,
            name=name,
        )
