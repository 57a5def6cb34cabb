"""Products of the embeddings of an example, without a flat vector of them.

B is the batch, n the number of embeddings, d their dimension. The products are within
each example, or one for each embedding: sites without a choice, see `nn.batched`.
"""

from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from flax import linen
from jaxtyping import Array, Float

from loka_jax.nn.batched import BatchedSite
from loka_jax.nn.context import current
from loka_jax.nn.dense import default_kernel_init, product
from loka_jax.nn.norm_dense import NormParameters
from loka_jax.normed import NormVectors
from loka_jax.ops import fm_lcb as ops
from loka_jax.ops.device import local_device
from loka_jax.ops.joined_norm import joined_norm
from loka_jax.ops.residual import Residual
from loka_jax.recipe import Recipe
from loka_jax.site import SiteSpec


class Compress(linen.Module):
    """Linear combinations of embeddings, `W^T X`; one per feature.

    Attributes:
        features: m, the number of combinations.
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
        return _compressed(site, x, kernel)


class EachDense(linen.Module):
    """A dense layer for each embedding, `y_i = x_i W_i + b_i`, as one batched product.

    It runs in the dtype of x. The weights are float32, `kernel` (n, d, features) and
    `bias` (n, features).
    """

    features: int
    recipe: str | Recipe = "fp8_tensorwise"
    use_bias: bool = True
    kernel_init: Callable = linen.initializers.lecun_normal(batch_axis=(0,))
    bias_init: Callable = linen.initializers.zeros_init()

    @linen.compact
    def __call__(self, x: Float[Array, "B n d"]) -> Float[Array, "B n f"]:
        """Returns y."""
        (_, n, d), features = x.shape, self.features
        kernel = self.param("kernel", self.kernel_init, (n, d, features), jnp.float32)
        dims = ((2,), (1,)), ((1,), (0,))
        out = product(self, x, kernel.astype(x.dtype), dims).swapaxes(0, 1)
        if not self.use_bias:
            return out
        bias = self.param("bias", self.bias_init, (n, features), jnp.float32)
        return (out.astype(jnp.float32) + bias[None]).astype(out.dtype)


class FmLcb(linen.Module):
    """Wukong's factorization machine and linear compression, `X (X^T Y)`, `W_L^T X`.

    Both begin with one product, `[Y | W_L]^T X`, the site `compress`; `fm` is the
    second product of the former. On a Hopper GPU one kernel runs both, and one their
    backward pass, where `plan_fm_lcb` has no reason against it and Probe does not
    observe the products.

    Attributes:
        k: columns of Y.
        compressed: l, columns of W_L.
        implementation: "xla" to use XLA only; None to use kernels where they apply.
        kernel_init: initializer of [Y | W_L] (n, k + l).

    References:
        Wukong, arXiv 2403.02545, sections 3.4 and 3.5.
    """

    k: int
    compressed: int
    recipe: str | Recipe = "fp8_tensorwise"
    implementation: Literal["xla"] | None = None
    kernel_init: Callable = default_kernel_init

    @linen.compact
    def __call__(
        self, x: Float[Array, "B n d"], joined: tuple[int, ...] = ()
    ) -> tuple[Float[Array, "B n k"], Float[Array, "B l d"], Array | Residual]:
        """Returns FM and LCB of each example, and x for what follows.

        Args:
            joined: the embeddings of each part of a `joined_norm` that x is given to,
                and it alone. Where the backward kernel runs, x is returned as a
                `Residual`, whose gradient the kernel adds; else as it is.
        """
        (batch, n, d), k, m = x.shape, self.k, self.k + self.compressed
        kernel = self.param("kernel", self.kernel_init, (n, m), jnp.float32)
        first = BatchedSite(self.recipe, name="compress")
        second = BatchedSite(self.recipe, name="fm")
        if current().observer is None:
            plan = self._plan(x)
            first.announce(batch, SiteSpec(m=d, k=n, n=m), together=plan)
            second.announce(batch, SiteSpec(m=n, k=d, n=k), together=plan)
            if joined and plan.why_not_residual(joined) is None:
                return ops.fm_lcb_residual(x, kernel, k=k, counts=joined, plan=plan)
            return *ops.fm_lcb(x, kernel, k=k, plan=plan), x
        p = _compressed(first, x, kernel)
        p_k = p[:, :k].swapaxes(1, 2)
        return second(ops.product(x, p_k), x), p[:, k:], x

    @linen.nowrap
    def _plan(self, x: Array) -> ops.FmLcbPlan:
        """Returns which passes run by kernels."""
        if self.implementation == "xla":
            return ops.BY_XLA
        device = current().device or local_device()
        return ops.plan_fm_lcb(x, self.k + self.compressed, self.k, device)


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
        p = BatchedSite(self.recipe, name="compress")(ops.product(xt, y), xt)
        return BatchedSite(self.recipe, name="fm")(ops.product(x, p), x)


class JoinedNorm(NormParameters):
    """The norm of joined embeddings plus a residual, `norm([part_1; ...] + x)`.

    One kernel joins, adds and normalizes where it applies, see `ops.joined_norm`. A
    block norm is over all of d, which is at most 256.
    """

    @linen.compact
    def __call__(
        self, parts: tuple[Float[Array, "B _ d"], ...], x: Array | Residual
    ) -> Float[Array, "B n d"]:
        """Returns the norm over d of the parts, one below the other, plus x."""
        vectors = NormVectors(None, *super().__call__(parts[0].shape[2]))
        return joined_norm(parts, x, vectors, norm=self.norm)


def _compressed(site: BatchedSite, x: Array, kernel: Array) -> Array:
    """Returns `W^T X` [B, m, d], a site in the form `X^T W`."""
    out = ops.compress(x, kernel).swapaxes(1, 2)
    return site(out, x.swapaxes(1, 2)).swapaxes(1, 2)
