"""Cross layers, and a network beside or behind them.

B is the batch, k the number of features. `ops.interaction` has pairwise dot products.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal

import jax
from flax import linen
from jaxtyping import Array, Float

from loka_jax.group import Cross, Group, Member
from loka_jax.nn.context import current
from loka_jax.nn.dense import (
    Dense,
    DenseVariables,
    default_kernel_init,
    dense_parameters,
    planned,
    run_planned,
)
from loka_jax.nn.dropout import dropout_words
from loka_jax.nn.group import Part, Within, group_plans, joined
from loka_jax.nn.mlp import Mlp
from loka_jax.nn.norms import check_choice
from loka_jax.nn.sites import announce
from loka_jax.ops.group import run_group
from loka_jax.ops.group_sites import LayerArrays
from loka_jax.ops.interaction import join_features, padded
from loka_jax.ops.plan import KernelPlan
from loka_jax.ops.run_site import SiteArrays
from loka_jax.recipe import Recipe
from loka_jax.site import SiteSpec

# Features [B, k], or two arrays of them, see `join_features`.
type Features = Array | tuple[Array, Array]


class CrossNet(linen.Module):
    """Cross layers on the flat feature vector: `x_{l+1} = x_0 * (W_l x_l + b_l) + x_l`.

    All layers are sites of one group, and one operation where all of them run in it
    (see `nn.group.group_plans`).

    Attributes:
        num_layers: number of cross layers; layer l adds interactions of order l + 1.
        use_bias: add `b_l`.
        rank: `W_l = U_l V_l` of that rank (equation 2); full if None.
        implementation: "xla" runs the layers one by one, "group" as one operation.

    References:
        DCN V2, arXiv 2008.13535, equations 1 and 2.
    """

    num_layers: int
    rank: int | None = None
    use_bias: bool = True
    recipe: str | Recipe = "fp8_tensorwise"
    implementation: Literal["xla", "group"] | None = None
    kernel_init: Callable = default_kernel_init

    @linen.compact
    def __call__(self, x0: Features | None, *, within: Within | None = None) -> Any:
        """Returns the features after the last cross layer.

        Args:
            x0: the features; None where only the variables are asked for.
            within: as of `Mlp`.

        Raises:
            ValueError: if the features are not [B, k], the rank is less than 1, or the
                implementation is unknown.
        """
        check_choice("implementation", self.implementation, ("xla", "group", None))
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"rank={self.rank} of a CrossNet must be at least 1.")
        if within is not None and within.plans is not None:
            return self._variables(within.group, within.plans)
        assert x0 is not None
        parts = features_of(x0)
        own = self.group_of(parts)
        group = within.group if within else own
        plans = joined(own, self.plans(parts, own)) if self.num_layers else None
        if plans is None:
            return self._layer_by_layer(x0, group)
        (out,) = run_group(own, plans, (parts,), *self._variables(group, plans))
        return out.astype(parts[0].dtype)

    @linen.nowrap
    def group_of(self, parts: tuple[Array, ...]) -> Group:
        """Returns the group of all layers on these features."""
        m, widths = parts[0].shape[0], tuple(x.shape[1] for x in parts)
        k = padded(sum(widths)) if len(parts) > 1 else widths[0]
        sizes = [(k, k)] if self.rank is None else [(k, self.rank), (self.rank, k)]
        members = tuple(
            tuple(
                Member("/".join((*self.path, name)), SiteSpec(m, *size))
                for (name, _, _), size in zip(self._products(i, k), sizes, strict=True)
            )
            for i in range(self.num_layers)
        )
        layers = (Cross(reads=0, members=members),)
        return Group(rows=m, inputs=(widths,), layers=layers, outputs=(1,))

    @linen.nowrap
    def plans(self, parts: tuple[Array, ...], group: Group) -> list[KernelPlan | None]:
        """Returns the plans of the sites that run in a group, None of others."""
        members = [*self.group_of(parts).members]
        recipes = [self.recipe for _ in members]
        return group_plans(group, members, recipes, self.implementation)

    def _layer_by_layer(self, x0: Features, group: Group) -> Array:
        x = x0 = join_features(*x0) if isinstance(x0, tuple) else x0
        for i in range(self.num_layers):
            hidden = x
            for product in self._products(i, x0.shape[1]):
                hidden = self._dense(Dense, group, *product)(hidden)
            x = x0 * hidden + x
        return x

    def _products(self, layer: int, k: int) -> list[tuple[str, int, bool]]:
        """Returns names of a layer's sites, their features, and if they have a bias."""
        wide = (f"u_{layer}", k, self.use_bias)
        return [wide] if self.rank is None else [(f"v_{layer}", self.rank, False), wide]

    def _variables(self, group: Group, plans: tuple[KernelPlan, ...]) -> Part:
        """Returns parameters and states of all layers."""
        layers, states = [], []
        per_layer = len(plans) // self.num_layers
        for i, own in enumerate(itertools.batched(plans, per_layer)):
            products = self._products(i, own[-1].spec.n)
            parts: list[Any] = [
                self._dense(DenseVariables, group, *product)(plan)
                for product, plan in zip(products, own, strict=True)
            ]
            kernels = tuple(part.kernel for part in parts)
            layers.append(LayerArrays(kernels, parts[-1].bias))
            states += [part.state for part in parts]
        return Part((tuple(layers),), tuple(states))

    def _dense[L: Dense](
        self, layer: type[L], group: Group, name: str, features: int, use_bias: bool
    ) -> L:
        return layer(
            features,
            recipe=self.recipe,
            group=group,
            use_bias=use_bias,
            kernel_init=self.kernel_init,
            name=name,
        )


def features_of(x0: Features) -> tuple[Array, ...]:
    """Returns the parts of features that have any; kernels take no empty part."""
    parts: tuple[Array, ...] = x0 if isinstance(x0, tuple) else (x0,)
    if any(x.ndim != 2 for x in parts):
        shapes = ", ".join(str(x.shape) for x in parts)
        raise ValueError(f"a CrossNet takes [B, k], not {shapes}: reshape it.")
    if not all(x.shape[1] for x in parts):
        parts = (join_features(*parts) if len(parts) > 1 else parts[0],)
    return parts


class Head(Dense):
    """A `Dense` of one feature on joined parts, of which a group may have the first."""

    features: int = 1

    @linen.compact
    def __call__(
        self, inputs: tuple[Array, ...] | Group, run: Callable | None = None
    ) -> Float[Array, "B 1"]:
        """Returns `inputs @ kernel + bias` of joined parts.

        Args:
            inputs: the parts, or the group that makes both of them.
            run: of a group: returns the dots of its first part and the weights that it
                is given, and its second part.
        """
        if run is None:
            assert not isinstance(inputs, Group)
            return super().__call__(inputs)
        assert isinstance(inputs, Group) and inputs.head is not None
        m, k, n = inputs.rows, *map(inputs.columns, (inputs.head, *inputs.outputs))
        plan = planned(self, SiteSpec(m=m, k=k + n, n=1))
        announce(self, plan)
        kernel, bias = dense_parameters(self, k + n)
        dots, y = run(kernel[:k, 0])
        of_second = dataclasses.replace(plan, spec=SiteSpec(m=m, k=n, n=1))
        product = run_planned(self, of_second, SiteArrays(y, kernel[k:]))
        assert isinstance(product, Array)
        out = dots[:, None] + product
        return out if bias is None else out + bias[None, :]


class CrossDeep(linen.Module):
    """A cross and a deep network, and a head; both networks are one group.

        parallel    head([x_L; deep(x_0)])        stacked    head(deep(x_L))

    As one operation nothing is written between the networks but what products read, and
    the head of the parallel structure multiplies x_L where it is made.

    Attributes:
        cross, deep, head: their modules.
    """

    cross: CrossNet
    deep: Mlp
    head: Head
    structure: Literal["parallel", "stacked"] = "parallel"

    @linen.compact
    def __call__(self, x0: Features, *, train: bool = False) -> Float[Array, "B 1"]:
        """Returns the head's result on the features [B, k]."""
        parts = features_of(x0)
        group = self._group(parts)
        plans = None
        if group is not None:
            shape = group.rows, self.cross.group_of(parts).columns(0)
            of_cross = self.cross.plans(parts, group)
            plans = joined(group, [*of_cross, *self.deep.plans(group, shape)])
        if group is None or plans is None or current().sees_blocks:
            return self._apart(x0, group, train)
        count = len(plans) - len(self.deep.features)
        first = self.cross(None, within=Within(group, plans[:count]))
        second = self.deep(None, within=Within(group, plans[count:]))
        part = Part((*first.layers, *second.layers), (*first.states, *second.states))
        drops = train and self.deep.dropout_rate > 0
        words = dropout_words(self, len(group.layers)) if drops else None
        run = functools.partial(run_group, group, plans, (parts,), *part, words=words)
        if group.head is None:
            return self.head(run())
        return self.head(group, run)

    def _apart(self, x0: Features, group: Group | None, train: bool) -> Array:
        within = None if group is None else Within(group)
        crossed = self.cross(x0, within=within)
        if self.structure == "stacked":
            return self.head((self.deep(crossed, train=train, within=within),))
        joined = join_features(*x0) if isinstance(x0, tuple) else x0
        # Merged with the cross network's products, the deep network's would cost two
        # passes over large arrays: XLA concatenates the gradients of both first.
        joined = jax.lax.optimization_barrier(joined)
        deep = self.deep(joined, train=train, within=within)
        return self.head((crossed, deep))

    @linen.nowrap
    def _group(self, parts: tuple[Array, ...]) -> Group | None:
        """Returns the group of both networks; None if there is none."""
        deep = self.deep
        if deep.norm == "batch" or deep.input_norm is not None or not deep.features:
            return None
        cross = self.cross.group_of(parts)
        if not self.cross.num_layers:
            return None
        specs = deep.specs(cross.rows, cross.columns(0))
        is_stacked = self.structure == "stacked"
        run, reads = range(len(specs)), int(is_stacked)
        layers = *cross.layers, *deep.layers(specs, run, makes=2, reads=reads)
        head = None if is_stacked else 1
        return dataclasses.replace(
            cross, layers=layers, outputs=(len(layers),), head=head
        )
