"""Cross layers. `ops.interaction` has pairwise dot products.

B is the batch, k the number of features.
"""

import itertools
from collections.abc import Callable
from typing import Any, Literal

from flax import linen
from jaxtyping import Array, Float

from loka_jax.nn.context import current
from loka_jax.nn.dense import Dense, DenseVariables, default_kernel_init
from loka_jax.nn.norms import check_choice
from loka_jax.ops import cross
from loka_jax.ops.cross import Crossed
from loka_jax.ops.interaction import join_features, padded
from loka_jax.ops.plan import KernelPlan
from loka_jax.recipe import Recipe
from loka_jax.site import SiteSpec


class CrossNet(linen.Module):
    """Cross layers on the flat feature vector: `x_{l+1} = x_0 * (W_l x_l + b_l) + x_l`.

    Attributes:
        num_layers: number of cross layers; layer l adds interactions of order l + 1.
        use_bias: add `b_l`.
        rank: `W_l = U_l V_l` of that rank (equation 2); full if None.
        implementation: "xla" runs the layers one by one even if `fused`.
        fused: run all layers as one operation (`ops.cross`) where that serves their
            plans.

    References:
        DCN V2, arXiv 2008.13535, equations 1 and 2.
    """

    num_layers: int
    rank: int | None = None
    use_bias: bool = True
    recipe: str | Recipe = "fp8_tensorwise"
    implementation: Literal["xla"] | None = None
    kernel_init: Callable = default_kernel_init
    fused: bool = False

    @linen.compact
    def __call__(
        self,
        x0: Float[Array, "B k"] | tuple[Float[Array, "B _"], Float[Array, "B _"]],
        *,
        hand_on: bool = False,
    ) -> Any:
        """Returns the features after the last cross layer.

        Args:
            x0: the features, or two arrays of them, see `join_features`.
            hand_on: return a network that is one operation as it is: `Mlp` runs it
                together with the layers behind or beside it.

        Raises:
            ValueError: if the features are not [B, k], the rank is less than 1, or the
                implementation is unknown.
        """
        check_choice("implementation", self.implementation, ("xla", None))
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"rank={self.rank} of a CrossNet must be at least 1.")
        parts: tuple[Array, ...] = x0 if isinstance(x0, tuple) else (x0,)
        if any(x.ndim != 2 for x in parts):
            shapes = ", ".join(str(x.shape) for x in parts)
            raise ValueError(f"a CrossNet takes [B, k], not {shapes}: reshape it.")
        if not all(x.shape[1] for x in parts):  # a kernel takes no empty part
            parts = (_joined(x0),)
        m, k = parts[0].shape[0], sum(x.shape[1] for x in parts)
        if len(parts) > 1:  # as `join_features` pads them
            k = padded(k)
        if self.fused:
            plans = self._plans(m, k)
            if self._is_one_operation(plans):
                crossed = self._as_one_operation(parts, plans)
                if hand_on:
                    return crossed
                return cross.cross_network(crossed).astype(parts[0].dtype)
        x = x0 = _joined(x0)
        for i in range(self.num_layers):
            hidden = x
            for name, features, use_bias in self._products(i, x0.shape[1]):
                hidden = self._dense(Dense, name, features, use_bias)(hidden)
            x = x0 * hidden + x
        return x

    def _products(self, layer: int, k: int) -> list[tuple[str, int, bool]]:
        """Returns names of a layer's sites, their features, and if they have a bias."""
        wide = (f"u_{layer}", k, self.use_bias)
        return [wide] if self.rank is None else [(f"v_{layer}", self.rank, False), wide]

    def _plans(self, m: int, k: int) -> tuple[tuple[KernelPlan, ...], ...]:
        def plan(name: str, sizes: tuple[int, int]) -> KernelPlan:
            path = "/".join((*self.path, name))
            spec = SiteSpec(m, *sizes)
            return current().plan(path, spec, self.recipe, "xla")

        widths = (k, k) if self.rank is None else (k, self.rank, k)
        return tuple(
            tuple(
                plan(name, sizes)
                for (name, _, _), sizes in zip(
                    self._products(i, k), itertools.pairwise(widths), strict=True
                )
            )
            for i in range(self.num_layers)
        )

    def _is_one_operation(self, plans) -> bool:
        if self.implementation == "xla" or current().observer is not None or not plans:
            return False
        return plans[0][0].choice.is_fp8 and cross.why_not(plans) is None

    def _as_one_operation(self, x0: tuple[Array, ...], plans) -> Crossed:
        layers, states = [], []
        for i, own in enumerate(plans):
            products = self._products(i, own[-1].spec.n)
            parts: list[Any] = [
                self._dense(DenseVariables, *product)(
                    plan,
                    # Tails alone read z, of the last product, and d, of the first.
                    fp8_results=("fwd",) * (product == products[-1])
                    + ("dlhs",) * (product == products[0]),
                )
                for product, plan in zip(products, own, strict=True)
            ]
            kernels = tuple(part.kernel for part in parts)
            layers.append(cross.CrossLayer(kernels, parts[-1].bias))
            states.append(tuple(part.state for part in parts))
        return Crossed(x0, tuple(layers), tuple(states), plans)

    def _dense[L: Dense](
        self, layer: type[L], name: str, features: int, use_bias: bool
    ) -> L:
        may_join = self.fused and self.implementation != "xla"
        return layer(
            features,
            recipe=self.recipe,
            crosses=may_join * (1 if self.rank is None else 2),
            use_bias=use_bias,
            kernel_init=self.kernel_init,
            name=name,
        )


def _joined(x0: Array | tuple[Array, Array]) -> Array:
    """Returns features as one array."""
    return join_features(*x0) if isinstance(x0, tuple) else x0
