"""Dense layers in a row, each with a norm, an activation and dropout."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, get_args

import jax.numpy as jnp
from flax import linen
from jaxtyping import Array, Float

from loka_jax import group as groups
from loka_jax.group import Group, Member
from loka_jax.nn.context import as_recipe, current
from loka_jax.nn.dense import Dense, DenseVariables, default_kernel_init
from loka_jax.nn.dropout import Dropout, dropout_words
from loka_jax.nn.group import WIDE, Part, Within, group_plans, without_fp8_dlhs
from loka_jax.nn.norm_dense import NormDense, NormParameters
from loka_jax.nn.norms import (
    ActivationName,
    NormName,
    activation,
    check_choice,
    normalize,
)
from loka_jax.normed import Epilogue, NormVectors
from loka_jax.ops.group import run_group
from loka_jax.ops.group_sites import LayerArrays
from loka_jax.ops.plan import KernelPlan
from loka_jax.ops.products import Activations
from loka_jax.recipe import Recipe
from loka_jax.site import PROVIDERS, Provider, SiteSpec
from loka_jax.xla.dense_norm import norm_activation

# Largest share of the work that is not worth the risk of FP8 below a head.
_SMALL_PART = 1 / 16


class Mlp(linen.Module):
    """A multi-layer perceptron; every layer is `dropout(act(norm(x W + b)))`.

    Layers are sites of one group. Those that run in it (see `nn.group.group_plans`),
    in a row, are one operation. Another is one site, `NormDense`, unless its norm is
    over the batch; where kernels serve it and the next, it hands its activations on in
    FP8.

    Attributes:
        features: widths of the layers.
        recipe: of all its sites. Wide layers without a norm end in bfloat16 if the last
            one has less than a sixteenth of the work.
        norm: norm of every layer; with one, the dense layers have no bias (a norm with
            a shift replaces it).
        activation: after every layer, the last included.
        use_bias: add biases: of dense layers, or of their norms.
        ends_linear: the last layer has neither norm nor activation.
        dropout_rate: share of activations set to zero in training.
        kernel_init: initializer of the kernels.
        implementation: the provider of all layers, see `NormDense`, or "group".
        input_norm: norm of what the first layer reads, with its parameters; None for
            none.
    """

    features: tuple[int, ...]
    recipe: str | Recipe = "fp8_tensorwise"
    norm: NormName = "none"
    activation: ActivationName = "relu"
    use_bias: bool = True
    ends_linear: bool = False
    dropout_rate: float = 0.0
    kernel_init: Callable = default_kernel_init
    implementation: Provider | None = None
    input_norm: NormParameters | None = None

    @linen.compact
    def __call__(
        self,
        x: Float[Array, "*rows k"] | None,
        *,
        train: bool = False,
        within: Within | None = None,
    ) -> Any:
        """Returns the last layer's activations. Training with dropout needs its rng.

        Args:
            x: rows; None where only the variables are asked for.
            train: drop activations, and normalize by the batch's statistics.
            within: the group that the layers are part of; if that runs as one
                operation, a `Part` is returned.

        Raises:
            ValueError: if there are no layers, or if norm, activation or implementation
                is unknown.
        """
        check_choice("norm", self.norm, get_args(NormName))
        check_choice("activation", self.activation, get_args(ActivationName))
        check_choice("implementation", self.implementation, (*PROVIDERS, None))
        if not self.features:
            raise ValueError(f"features={self.features} of an Mlp name no layer.")
        if within is not None and within.plans is not None:
            return self._variables(
                within.group, range(len(self.features)), within.plans
            )
        assert x is not None
        if self.norm == "batch":
            return self._by_batch_norm(x, train)
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        group = within.group if within else self.group_of(rows.shape)
        out = self._by_sites(rows, group, drops=train and self.dropout_rate > 0)
        return out.reshape(*x.shape[:-1], out.shape[-1])

    @linen.nowrap
    def group_of(self, shape: tuple[int, ...], run: range | None = None) -> Group:
        """Returns the group of all layers, or of some in a row, of rows of a shape."""
        specs, run = self.specs(*shape), run or range(len(self.features))
        m, k = shape[0], specs[run.start].k
        layers: tuple[groups.Dense, ...] = ()
        if run.start == 0 and self.input_norm is not None:
            norm = Epilogue(self.input_norm.norm)
            layers = (groups.Dense(reads=0, member=None, norm=norm),)
        layers += self.layers(specs, run, makes=1 + len(layers))
        return Group(rows=m, inputs=((k,),), layers=layers, outputs=(len(layers),))

    @linen.nowrap
    def layers(
        self,
        specs: Sequence[SiteSpec],
        run: range,
        *,
        makes: int,
        reads: int | None = None,
    ) -> tuple[groups.Dense, ...]:
        """Returns layers within a group.

        Args:
            specs: of all layers.
            run: which of them.
            makes: the number of the value that the first one makes.
            reads: of the value that it reads; the one before if None.
        """
        values = [
            makes - 1 if reads is None else reads,
            *range(makes, makes + len(run)),
        ]
        return tuple(
            groups.Dense(
                reads=value,
                member=Member("/".join((*self.path, f"dense_{i}")), specs[i]),
                norm=Epilogue(specs[i].norm, specs[i].activation),
                dropout=self.dropout_rate,
            )
            for i, value in zip(run, values, strict=False)
        )

    def _by_sites(self, x: Array, group: Group, *, drops: bool) -> Array:
        """Returns the last layer's activations.

        Args:
            group: of the sites, for those who list them.
            drops: drop activations.
        """
        in_group = self.plans(self.group_of(x.shape), x.shape)
        runs = {run[0]: run for run in _runs(in_group)}
        apart = [i for run in runs.values() for i in run]
        out: Array | Activations = x
        if 0 not in runs:
            out = self._normalized(x)
        plans = self._plans(*x.shape, chained=not drops, apart=apart)
        for i, plan in enumerate(plans):
            if i in runs:
                assert not isinstance(out, Activations)
                own = tuple(p for j in runs[i] if (p := in_group[j]) is not None)
                one = self.group_of(x.shape, runs[i])
                part = self._variables(group, runs[i], own)
                if self.input_norm is not None and not i:
                    norm = LayerArrays((), None, *self.input_norm(x.shape[1]))
                    part = part._replace(layers=((norm,), *part.layers))
                words = dropout_words(self, len(one.layers)) if drops else None
                (out,) = run_group(one, own, ((out,),), *part, words=words)
            elif i not in apart:
                out = self._site(i, plan, group)(out)
                if drops:
                    assert not isinstance(out, Activations)
                    out = Dropout(self.dropout_rate)(out)
        assert not isinstance(out, Activations)
        return out

    def _variables(self, group: Group, run: range, plans: Sequence[KernelPlan]) -> Part:
        """Returns parameters and states of layers that run in a group."""
        layers, states = [], []
        for i, plan in zip(run, plans, strict=True):
            spec = plan.spec
            part: Any = DenseVariables(
                spec.n,
                recipe=self.recipe,
                use_bias=spec.use_bias,
                kernel_init=self.kernel_init,
                group=group,
                name=f"dense_{i}",
            )(plan)
            vectors = part.bias, *self._norm_parameters(i, spec)(spec.n)
            layers.append((LayerArrays((part.kernel,), *vectors),))
            states.append(part.state)
        return Part(tuple(layers), tuple(states))

    def _site(self, i: int, plan: KernelPlan, group: Group) -> NormDense:
        spec = plan.spec
        return NormDense(
            spec.n,
            recipe=self.recipe,
            norm=spec.norm,
            activation=spec.activation,
            use_bias=spec.use_bias,
            out=spec.out,
            implementation=self.implementation,
            kernel_init=self.kernel_init,
            norm_parameters=self._norm_parameters(i, spec),
            plan=plan,
            group=group,
            name=f"dense_{i}",
        )

    def _norm_parameters(self, i: int, spec: SiteSpec) -> NormParameters:
        return NormParameters(spec.norm, self.use_bias, name=f"norm_{i}")

    def _by_batch_norm(self, x: Array, train: bool) -> Array:
        x = self._normalized(x)
        for i, features in enumerate(self.features):
            is_linear = self._is_linear(i)
            x = Dense(
                features,
                recipe=self.recipe,
                use_bias=self.use_bias and is_linear,
                kernel_init=self.kernel_init,
                name=f"dense_{i}",
            )(x)
            if not is_linear:
                x = normalize(
                    x, "batch", train=train, use_bias=self.use_bias, name=f"norm_{i}"
                )
                x = activation(self.activation)(x)
            if train and self.dropout_rate > 0:
                x = Dropout(self.dropout_rate)(x)
        return x

    def _normalized(self, x: Array) -> Array:
        """Returns the first layer's input, by XLA."""
        if self.input_norm is None:
            return x
        vectors = NormVectors(None, *self.input_norm(x.shape[-1]))
        epilogue = Epilogue(self.input_norm.norm)
        return norm_activation(x, vectors, epilogue=epilogue).astype(x.dtype)

    def _is_linear(self, i: int) -> bool:
        return self.ends_linear and i == len(self.features) - 1

    @linen.nowrap
    def specs(self, m: int, k: int) -> list[SiteSpec]:
        """Returns the sites of the layers, of m rows of k features."""
        shapes = itertools.pairwise((k, *self.features))
        return [self._spec(i, m, k, n) for i, (k, n) in enumerate(shapes)]

    def _spec(self, i: int, m: int, k: int, n: int) -> SiteSpec:
        assert self.norm != "batch"
        if self._is_linear(i):
            return SiteSpec(m=m, k=k, n=n, use_bias=self.use_bias)
        return SiteSpec(
            m=m,
            k=k,
            n=n,
            norm=self.norm,
            activation=self.activation,
            use_bias=self.use_bias and self.norm == "none",
        )

    @linen.nowrap
    def plans(self, group: Group, shape: tuple[int, ...]) -> list[KernelPlan | None]:
        """Returns the plans of the layers that run in a group, None of others.

        Without a norm dlhs of the last layer runs in high precision, whatever its share
        of the work: below a head g is one number of an example times the head's weights
        (docs/recipes.md, "The layer below a head").

        Args:
            group: all of it.
            shape: of the rows.
        """
        specs = self.specs(*shape)
        members = [
            x.member for x in self.layers(specs, range(len(specs)), makes=1) if x.member
        ]
        recipes = self._recipes(specs)
        *plans, last = group_plans(group, members, recipes, self.implementation)
        if last is not None and self.norm == "none":
            last = without_fp8_dlhs(last)
        return [*plans, last]

    def _plans(
        self, m: int, k: int, *, chained: bool, apart: Collection[int] = ()
    ) -> list[KernelPlan]:
        """Returns the plan of each layer by itself.

        Where kernels run a layer and the next, which reads FP8, it is handed on so,
        unless one of them runs in a group.
        """
        specs = self.specs(m, k)
        given = [specs[0].fp8_out, *(spec.fp8_out for spec in specs[:-1])]
        within = [
            dataclasses.replace(spec, fp8_in=fp8_in, out="fp8")
            for spec, fp8_in in zip(specs, given, strict=True)
        ]
        plans = self._resolve(within)
        reads = [
            plan.reads_fp8 and (plan.runs_kernels or self._is_linear(i))
            for i, plan in enumerate(plans)
        ]
        links = [
            chained and plan.runs_kernels and next_reads and not {i, i + 1} & set(apart)
            for i, (plan, next_reads) in enumerate(zip(plans, reads[1:], strict=False))
        ]
        linked = [
            dataclasses.replace(
                spec,
                fp8_in=fp8_in if before else None,
                out="fp8" if after else "compute",
            )
            for spec, fp8_in, before, after in zip(
                specs, given, [False, *links], [*links, False], strict=True
            )
        ]
        return self._resolve(linked)

    def _resolve(self, specs: Sequence[SiteSpec]) -> list[KernelPlan]:
        return [
            current().plan(
                "/".join((*self.path, f"dense_{i}")), spec, recipe, self._provider(i)
            )
            for i, (spec, recipe) in enumerate(
                zip(specs, self._recipes(specs), strict=True)
            )
        ]

    def _recipes(self, specs: Sequence[SiteSpec]) -> list[str | Recipe]:
        """Returns the recipes of the layers.

        Wide layers without a norm end in bfloat16 where the last one is a small part of
        the work. In FP8 that one cost most of the quality, and training diverged at
        times (docs/recipes.md, "The layer below a head").
        """
        recipes: list[str | Recipe] = [self.recipe] * len(specs)
        work = [spec.k * spec.n for spec in specs]
        is_wide = max(max(spec.k, spec.n) for spec in specs) >= WIDE
        is_small = work[-1] <= _SMALL_PART * sum(work)
        is_bf16 = as_recipe(self.recipe).compute_dtype == jnp.bfloat16
        if is_wide and self.norm == "none" and is_small and is_bf16:
            recipes[-1] = "bf16"
        return recipes

    def _provider(self, i: int) -> Provider | None:
        """Returns the provider of a layer; a kernel would only copy a linear end."""
        if self.implementation is None and self._is_linear(i):
            return "xla"
        return "xla" if self.implementation == "group" else self.implementation


def _runs(plans: Sequence[KernelPlan | None]) -> list[range]:
    """Returns the layers in a row that run in a group."""
    runs = []
    for is_apart, layers in itertools.groupby(
        range(len(plans)), lambda i: plans[i] is None
    ):
        first, *rest = layers
        if not is_apart:
            runs.append(range(first, first + 1 + len(rest)))
    return runs
