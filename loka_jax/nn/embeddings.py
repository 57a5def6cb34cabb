"""Interactions among the embeddings of an example, without a flat vector of them.

B is the batch, n the number of embeddings, d their dimension. Their products are within
each example: sites without a choice, see `nn.batched`.
"""

from collections.abc import Callable

import jax.numpy as jnp
from flax import linen
from jaxtyping import Array, Float

from loka_jax.nn.batched import BatchedSite
from loka_jax.nn.context import current
from loka_jax.nn.dense import default_kernel_init
from loka_jax.ops import fm_lcb as ops
from loka_jax.recipe import Recipe
from loka_jax.site import SiteSpec


class Compress(linen.Module):
    """Linear combinations of embeddings, `W^T X`; one per feature.

    Attributes:
        features: m, the number of combinations.
        recipe: of its site, for its compute dtype.
        kernel_init: initializer of W (n, m).
    """

    features: int
    recipe: str | Recipe = "fp8_tensorwise"
    kernel_init: Callable = default_kernel_init

    @linen.compact
    def __call__(self, x: Float[Array, "B n d"]) -> Float[Array, "B m d"]:
        """Returns `W^T X` of each example."""
        shape = (x.shape[1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        site = BatchedSite(self.recipe, name="compress")
        return _seen(site, ops.compress(x, kernel), x, kernel)


class FmLcb(linen.Module):
    """Wukong's factorization machine and linear compression, `X (X^T Y)`, `W_L^T X`.

    Both begin with one product, `[Y | W_L]^T X`, the site `compress`; `fm` is the
    second product of the former.

    Attributes:
        k: columns of Y.
        compressed: l, columns of W_L.
        recipe: of its sites, for their compute dtype.
        kernel_init: initializer of [Y | W_L] (n, k + l).

    References:
        Wukong, arXiv 2403.02545, sections 3.4 and 3.5.
    """

    k: int
    compressed: int
    recipe: str | Recipe = "fp8_tensorwise"
    kernel_init: Callable = default_kernel_init

    @linen.compact
    def __call__(
        self, x: Float[Array, "B n d"]
    ) -> tuple[Float[Array, "B n k"], Float[Array, "B l d"]]:
        """Returns FM and LCB of each example."""
        (batch, n, d), k, m = x.shape, self.k, self.k + self.compressed
        kernel = self.param("kernel", self.kernel_init, (n, m), jnp.float32)
        first = BatchedSite(self.recipe, name="compress")
        second = BatchedSite(self.recipe, name="fm")
        if current().observer is None:
            first.announce(batch, SiteSpec(m=d, k=n, n=m))
            second.announce(batch, SiteSpec(m=n, k=d, n=k))
            return ops.fm_lcb(x, kernel, k=k)
        p = _seen(first, ops.compress(x, kernel), x, kernel)
        p_k = p[:, :k].swapaxes(1, 2)
        return second(ops.product(x, p_k), x, p_k), p[:, k:]


class Fm(linen.Module):
    """Wukong's factorization machine `X (X^T Y)` with a Y of each example's own.

    Attributes:
        recipe: of its sites, for their compute dtype.
    """

    recipe: str | Recipe = "fp8_tensorwise"

    @linen.compact
    def __call__(
        self, x: Float[Array, "B n d"], y: Float[Array, "B n k"]
    ) -> Float[Array, "B n k"]:
        """Returns FM of each example."""
        xt = x.swapaxes(1, 2)
        p = BatchedSite(self.recipe, name="compress")(ops.product(xt, y), xt, y)
        return BatchedSite(self.recipe, name="fm")(ops.product(x, p), x, p)


def _seen(site: BatchedSite, out: Array, x: Array, kernel: Array) -> Array:
    """Returns `out = W^T X` [B, m, d], a site in the form `X^T W`."""
    return site(out.swapaxes(1, 2), x.swapaxes(1, 2), kernel).swapaxes(1, 2)
