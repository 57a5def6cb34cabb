"""Cross layers. `ops.interaction` has pairwise dot products.

B is the batch, k the number of features.
"""

from collections.abc import Callable

from flax import linen
from jaxtyping import Array, Float

from loka_jax.nn.dense import Dense, default_kernel_init
from loka_jax.recipe import Recipe


class CrossNet(linen.Module):
    """Cross layers on the flat feature vector: `x_{l+1} = x_0 * (W_l x_l + b_l) + x_l`.

    Attributes:
        num_layers: number of cross layers; layer l adds interactions of order l + 1.
        use_bias: add `b_l`.
        rank: `W_l = U_l V_l` of that rank (equation 2); full if None.
        recipe: of its sites.
        kernel_init: initializer of the kernels.

    References:
        DCN V2, arXiv 2008.13535, equations 1 and 2.
    """

    num_layers: int
    rank: int | None = None
    use_bias: bool = True
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
            u = self._dense(x0.shape[-1], f"u_{i}", use_bias=self.use_bias)
            x = x0 * u(hidden) + x
        return x

    def _dense(self, features: int, name: str, *, use_bias: bool) -> Dense:
        return Dense(
            features,
            recipe=self.recipe,
            use_bias=use_bias,
            kernel_init=self.kernel_init,
            name=name,
        )
