"""A chain of sites: dense, norm, activation, dropout."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, get_args

import jax.numpy as jnp
from flax import linen
from jaxtyping import Array, Float

from loka_jax.nn.context import as_recipe, current
from loka_jax.nn.dense import Dense, DenseVariables, default_kernel_init
from loka_jax.nn.norm_dense import NormDense, NormParameters
from loka_jax.nn.norms import (
    ActivationName,
    NormName,
    activation,
    check_choice,
    normalize,
)
from loka_jax.ops import cross, crossed_stack, wide_stack
from loka_jax.ops.cross import Crossed
from loka_jax.ops.interaction import join_features
from loka_jax.ops.plan import KernelPlan, resolve
from loka_jax.ops.products import Activations
from loka_jax.recipe import Recipe, Role
from loka_jax.site import PROVIDERS, Choice, Provider, SiteSpec

# Largest share of the work that is not worth the risk of FP8 below a head.
_SMALL_PART = 1 / 16


class Mlp(linen.Module):
    """A multi-layer perceptron; every layer is `dropout(act(norm(x W + b)))`.

    A layer is one site, `NormDense`, unless its norm is over the batch. Where kernels
    serve a layer and the next, the first hands its activations on in FP8. Wide layers
    in a row run as one operation if `fused`.

    Attributes:
        features: widths of the layers.
        recipe: of all its sites.
        norm: norm of every layer; with one, the dense layers have no bias (a norm with
            a shift replaces it).
        activation: after every layer, the last included.
        use_bias: add biases: of dense layers, or of their norms.
        ends_linear: the last layer has neither norm nor activation.
        dropout_rate: share of activations set to zero in training.
        kernel_init: initializer of the kernels.
        implementation: the provider of all layers, see `NormDense`.
        input_norm: norm of what the first layer reads: "none", or "rms", which has no
            learned scale here.
        fused: run layers in a row, one of them wide, as one operation
            (`ops.wide_stack`) where that serves their plans; not if the implementation
            is given, or with dropout in training. Without a norm a last layer with less
            than a sixteenth of the work is in bfloat16 then, on every device.
        beside: it reads what a cross network reads; both run as one operation where
            that serves them.
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
    input_norm: Literal["none", "rms"] = "none"
    fused: bool = False
    beside: bool = False

    @linen.compact
    def __call__(
        self, x: Float[Array, "*rows k"] | Crossed, *, train: bool = False
    ) -> Any:
        """Returns the last layer's activations. Training with dropout needs its rng.

        Args:
            x: rows, or a cross network that makes them (see `CrossNet`): it runs
                together with the first wide layers where they are one operation. Beside
                a network the result is both, for `CrossedHead` to run, or the
                network's features and the activations.
            train: drop activations, and normalize by the batch's statistics.

        Raises:
            ValueError: if there are no layers, or if norm, activation, implementation
                or input_norm is unknown.
        """
        check_choice("norm", self.norm, get_args(NormName))
        check_choice("activation", self.activation, get_args(ActivationName))
        check_choice("implementation", self.implementation, (*PROVIDERS, None))
        check_choice("input_norm", self.input_norm, ("none", "rms"))
        if not self.features:
            raise ValueError(f"features={self.features} of an Mlp name no layer.")
        drops = train and self.dropout_rate > 0
        if not self.beside or not isinstance(x, Crossed):
            return self._layers(x, train, drops)
        plans = () if drops else self._beside(x)
        if not plans:
            x0 = x.x0[0] if len(x.x0) == 1 else join_features(x.x0[0], x.x0[1])
            return _features(x), self._layers(x0, train, drops)
        parameters, states = self._wide_variables(plans, range(len(plans)), x)
        return crossed_stack.CrossedBeside(x, parameters, states, plans)

    def _layers(self, x: Array | Crossed, train: bool, drops: bool) -> Array:
        """Returns the last layer's activations; `drops` with dropout."""
        if self.norm != "batch" and not drops:
            return self._by_sites(x)
        x = _features(x)
        m, k = math.prod(x.shape[:-1]), x.shape[-1]
        x = normalize(x, self.input_norm, train=train, use_scale=False)
        plans = None if self.norm == "batch" else self._plans(m, k, chained=False)
        for i in range(len(self.features)):
            if plans is None:
                x = self._batch_norm_layer(i, x, train)
            else:
                out = self._site(i, plans[i])(x)
                assert not isinstance(out, Activations)
                x = out
            if drops:
                x = linen.Dropout(self.dropout_rate, deterministic=False)(x)
        return x

    def _by_sites(self, x: Array | Crossed) -> Array:
        """Returns the last layer's activations, of sites with nothing between them."""
        m, k = math.prod(x.shape[:-1]), x.shape[-1]
        wide, runs = self._wide(m, k)
        if 0 not in runs or self.input_norm != "none":
            x = _features(x)
        plans = self._plans(m, k, chained=True, apart=wide)
        out: Array | Activations | Crossed = x
        if 0 not in wide:
            x = _features(x)
            out = normalize(x, self.input_norm, train=False, use_scale=False)
        for i, plan in enumerate(plans):
            if i not in wide:
                assert not isinstance(out, Crossed)
                out = self._site(i, plan)(out)
            elif i in runs:
                assert not isinstance(out, Activations)
                out = self._by_one_operation(out, wide, runs[i])
        assert not isinstance(out, Activations | Crossed)
        return out

    def _wide(self, m: int, k: int) -> tuple[dict[int, KernelPlan], dict[int, range]]:
        """Returns plans of the layers of wide stacks, and the stacks by first layer."""
        if not self._may_join or current().observer is not None:
            return {}, {}
        plans = self._fused_plans(m, k)
        runs = wide_stack.wide_runs(plans)
        return {i: plans[i] for run in runs for i in run}, {run[0]: run for run in runs}

    def _beside(self, x: Crossed) -> tuple[KernelPlan, ...]:
        """Returns plans of all layers as one operation with a network, () if not."""
        may_join = self._may_join and current().observer is None
        if not may_join or self.norm == "batch" or self.input_norm != "none":
            return ()
        plans = tuple(self._fused_plans(*x.shape))
        return () if crossed_stack.why_not_beside(x.plans[0][0], plans) else plans

    def _by_one_operation(self, x: Array | Crossed, wide, layers: range) -> Array:
        plans = tuple(wide[i] for i in layers)
        parameters, states = self._wide_variables(plans, layers, x)
        if isinstance(x, Crossed):
            return crossed_stack.crossed_stack(x, parameters, states, plans=plans)
        input_norm = self.input_norm if 0 in layers else "none"
        rows = x.reshape(plans[0].spec.m, x.shape[-1])
        y = wide_stack.wide_stack(
            rows, parameters, states, plans=plans, input_norm=input_norm
        )
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def _wide_variables(
        self, plans: tuple[KernelPlan, ...], layers: range, x: Array | Crossed
    ) -> tuple[tuple[wide_stack.WideLayer, ...], tuple[Any, ...]]:
        """Returns parameters and states of layers that are one operation."""
        to_fp8: tuple[Role, ...] = ("dlhs",) if isinstance(x, Crossed) else ()
        parameters, states = [], []
        for i, plan in zip(layers, plans, strict=True):
            spec = plan.spec
            part: Any = DenseVariables(
                spec.n,
                recipe=self.recipe,
                use_bias=spec.use_bias,
                kernel_init=self.kernel_init,
                name=f"dense_{i}",
            )(plan, follows=i > 0, fp8_results=to_fp8 if i == 0 else ())
            vectors = part.bias, *self._norm_parameters(i, spec)(spec.n)
            parameters.append(wide_stack.WideLayer(part.kernel, *vectors))
            states.append(part.state)
        return tuple(parameters), tuple(states)

    def _site(self, i: int, plan: KernelPlan) -> NormDense:
        spec = plan.spec
        joins = self._may_join and self.dropout_rate == 0
        return NormDense(
            spec.n,
            recipe=self.recipe,
            norm=spec.norm,
            activation=spec.activation,
            use_bias=spec.use_bias,
            out=spec.out,
            follows=i > 0 and self.dropout_rate == 0,
            joins=joins,
            beside=joins and self.beside and i == 0,
            implementation=self.implementation,
            kernel_init=self.kernel_init,
            norm_parameters=self._norm_parameters(i, spec),
            plan=plan,
            name=f"dense_{i}",
        )

    def _norm_parameters(self, i: int, spec: SiteSpec) -> NormParameters:
        return NormParameters(spec.norm, self.use_bias, name=f"norm_{i}")

    def _batch_norm_layer(self, i: int, x: Array, train: bool) -> Array:
        is_linear = self._is_linear(i)
        x = Dense(
            self.features[i],
            recipe=self.recipe,
            use_bias=self.use_bias and is_linear,
            kernel_init=self.kernel_init,
            name=f"dense_{i}",
        )(x)
        if is_linear:
            return x
        x = normalize(x, "batch", train=train, use_bias=self.use_bias, name=f"norm_{i}")
        return activation(self.activation)(x)

    @property
    def _may_join(self) -> bool:
        """True if layers in a row may run as one operation where nothing drops."""
        return self.fused and self.implementation is None

    def _is_linear(self, i: int) -> bool:
        return self.ends_linear and i == len(self.features) - 1

    def _specs(self, m: int, k: int) -> list[SiteSpec]:
        shapes = itertools.pairwise((k, *self.features))
        return [self._spec(i, m, k, n) for i, (k, n) in enumerate(shapes)]

    def _plans(
        self, m: int, k: int, *, chained: bool, apart: Collection[int] = ()
    ) -> list[KernelPlan]:
        """Returns the plan of each layer.

        Where kernels run a layer and the next, which reads FP8, it is handed on so,
        unless one of them is to be run apart.
        """
        specs = self._specs(m, k)
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

    def _resolve(
        self, specs: Sequence[SiteSpec], provider: Provider | None = None
    ) -> list[KernelPlan]:
        return [
            current().plan(
                "/".join((*self.path, f"dense_{i}")),
                spec,
                recipe,
                provider or self._provider(i),
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
        is_small = work[-1] <= _SMALL_PART * sum(work)
        is_bf16 = as_recipe(self.recipe).compute_dtype == jnp.bfloat16
        if self.fused and self.norm == "none" and is_small and is_bf16:
            recipes[-1] = "bf16"
        return recipes

    def _fused_plans(self, m: int, k: int) -> list[KernelPlan]:
        """Returns the plans of the layers as parts of one operation.

        Without a norm dlhs of the last layer runs in high precision, whatever its share
        of the work: below a head g is one number of an example times the head's weights
        (docs/recipes.md, "The layer below a head").
        """
        *plans, last = self._resolve(self._specs(m, k), "xla")
        return [*plans, _without_fp8_dlhs(last) if self.norm == "none" else last]

    def _provider(self, i: int) -> Provider | None:
        """Returns the provider of a layer; a kernel would only copy a linear end."""
        if self.implementation is None and self._is_linear(i):
            return "xla"
        return self.implementation


def _without_fp8_dlhs(plan: KernelPlan) -> KernelPlan:
    recipe = plan.choice.recipe
    if plan.choice.provider != "xla" or recipe.dlhs is None:
        return plan
    parts = recipe.name.split("/")  # one name, or those of fwd, dlhs and drhs
    name = f"{parts[0]}/bf16/{parts[-1]}"
    choice = Choice("xla", dataclasses.replace(recipe, name=name, dlhs=None))
    return resolve(plan.spec, choice, plan.device)


def _features(x: Array | Crossed) -> Array:
    return cross.cross_network(x) if isinstance(x, Crossed) else x
