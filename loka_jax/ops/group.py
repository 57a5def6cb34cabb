"""A group of sites as one operation: products, and a tail in one pass between them.

Layers are those of `group_dense` and `group_cross`.

Thousands of features wide, a layer gets the full speed of FP8 only if what lies between
two products takes one pass. The tail applies the scales of the product before it, and
writes what is read next in the forms that the recipes ask for: in FP8, as it is and
transposed for dW, under a scale that is known beforehand (from earlier steps, or the
bound of a norm), or in bfloat16. In bfloat16 the same passes run without FP8.

A value that several products read is written once, under the scale of the first one;
its gradient is the sum of theirs, which the tail before it takes. The weights are cast
once a step, in both layouts and in one pass. Sizes that are no multiples of 16 are
padded with zeros by the passes that cast: no norm or gradient sees them.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from loka_jax import triton
from loka_jax.fp8 import E4M3
from loka_jax.group import Cross, Group
from loka_jax.mapped import equally_varying
from loka_jax.ops import group_cross
from loka_jax.ops.group_dense import DenseStep, Read
from loka_jax.ops.group_sites import (
    GroupSite,
    LayerArrays,
    cast,
    next_states,
    sites_of,
    tails_of,
)
from loka_jax.ops.halves import apart
from loka_jax.ops.plan import KernelPlan
from loka_jax.recipe import Recipe
from loka_jax.scaling import DelayedScaling
from loka_jax.tails import Dropout, Forms, Outer, Scaled, Tails, Written
from loka_jax.triton import tails
from loka_jax.xla.matmul import cut
from loka_jax.xla.tails import columns_of, decode, in_bf16


def why_not(group: Group, plans: Sequence[KernelPlan]) -> str | None:
    """Returns why a group does not run as one operation, or None if it does.

    Args:
        plans: of its members, in their order.
    """
    group, plans, _, _ = apart(group, plans)
    of_path = {x.path: plan for x, plan in zip(group.members, plans, strict=True)}
    if reason := next(filter(None, map(_why_not_in_group, plans)), None):
        return reason
    for layer in group.layers:
        if isinstance(layer, Cross):
            own = {of_path[x.path].choice for each in layer.members for x in each}
            if reason := _why_not_crossed(own):
                return reason
    for value in group.values:
        if len({_reading(of_path[x.path]) for x in group.readers(value)}) > 1:
            return "sites that read the same rows differ in their choices"
    return None


def _why_not_in_group(plan: KernelPlan) -> str | None:
    provider = plan.choice.provider
    return plan.why_not if provider == "group" else f"provider {provider!r}"


def _why_not_crossed(choices: set[Any]) -> str | None:
    if len(choices) > 1:
        return f"the sites of a cross network have {len(choices)} different choices"
    (choice,) = choices
    recipe = choice.recipe
    if choice.is_fp8 and (recipe.fwd is None or recipe.dlhs is None):
        return f"recipe {recipe.name!r} has no FP8 in fwd or dlhs"
    if any(jnp.dtype(x.dtype) != jnp.dtype(E4M3) for x in recipe.casts("lhs")):
        return f"recipe {recipe.name!r} reads features in less than E4M3"
    return None


def _reading(plan: KernelPlan) -> Recipe:
    """Returns what decides the forms of lhs: all of a recipe but dlhs."""
    return dataclasses.replace(plan.choice.recipe, name="", dlhs=None)


def families(group: Group) -> tuple[str, ...]:
    """Returns the families of kernels that run the tails of a group."""
    has_cross = any(isinstance(layer, Cross) for layer in group.layers)
    is_joined = any(len(parts) > 1 for parts in group.inputs)
    others = ("cross_tail",) * has_cross, ("joined_cast",) * is_joined
    return ("norm_tail", *itertools.chain(*others))


def run_group(
    group: Group,
    plans: Sequence[KernelPlan],
    inputs: tuple[tuple[Float[Array, "m _"], ...], ...],
    layers: tuple[tuple[LayerArrays, ...], ...],
    states: Sequence[DelayedScaling | None],
    head: Float[Array, "n"] | None = None,
    words: UInt32[Array, "l 2"] | None = None,
    *,
    implementation: triton.Implementation | None = None,
) -> tuple[Float[Array, "..."], ...]:
    """Returns the outputs in bfloat16, before them the dots of a head if there is one.

    Differentiable in inputs, layers and head; gradients have their dtypes. The gradient
    with respect to `states` is their values for the next step, as in `matmul`.

    Args:
        group: what runs.
        plans: of its members, in their order: each product runs in FP8 or in bfloat16
            as its recipe says.
        inputs: the arrays whose columns, joined, are each input; cast to bfloat16.
        layers: the parameters of each layer: of a cross network one a cross layer.
        states: of the members, for recipes with delayed scaling, else None.
        head: float32 weights; the dots are float32, of values that were not rounded.
        words: random bits of each layer, to drop activations; None to drop none.
        implementation: of the tails: "triton" requires its kernels; "xla"; None is
            Triton if it is installed and the GPU is a Hopper, else XLA.

    Raises:
        ValueError: if the group is not served (see `why_not`), if Triton is required
            and cannot run, or if a state is missing.
    """
    if reason := why_not(group, plans):
        raise ValueError(f"run_group: {reason}.")
    whole = apart(group, plans)
    group, plans, layers = whole.group, whole.plans, whole.arrays(layers)
    states, words = [states[i] for i in whole.members], whole.words(words)
    shapes = sorted({group.shape(value) for value in group.values})
    refusals = itertools.starmap(tails.why_not, shapes)
    refusal = next(filter(None, refusals), None)
    provider = triton.chosen(implementation, refusal, *families(group))
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
    run = _Run(group, tuple(plans), provider, types)
    arrays, tree = jax.tree.flatten((inputs, layers, head))
    operands = jax.tree.unflatten(tree, equally_varying(*arrays))
    return _run(run, *operands, tuple(states), words)


class _Run(NamedTuple):
    """The static arguments.

    Attributes:
        inputs: the types of the parts of each input.
    """

    group: Group
    plans: tuple[KernelPlan, ...]
    implementation: triton.Implementation
    inputs: tuple[tuple[jax.ShapeDtypeStruct, ...], ...]

    @property
    def tails(self) -> Tails:
        """The provider's tails."""
        return tails_of(self.implementation)

    def sites(self, states) -> list[list[tuple[GroupSite, ...]]]:
        """Returns the sites of each layer, nested as its members."""
        sites = iter(sites_of(self.group, self.plans, states))
        return [
            [tuple(next(sites) for _ in own) for own in layer.members]
            for layer in self.group.layers
        ]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(run: _Run, inputs, layers, head, states, words):
    return _forward(run, inputs, layers, head, states, words, keep=False)[0]


def _forward(run: _Run, inputs, layers, head, states, words, *, keep: bool = True):
    group, sites = run.group, run.sites(states)
    reads = [_reads(group, sites, v, keep=keep) for v in group.values]
    values = [_enter(run, parts, reads[v].want) for v, parts in enumerate(inputs)]
    all_kept, dots, seen = [], None, set()
    for layer, own, arrays in zip(group.layers, sites, layers, strict=True):
        x, value = values[layer.reads], len(values)
        if layer.reads in seen:
            # Behind a barrier, without which XLA merges the weight gradients of both
            # readers, and concatenates the gradients that they read.
            x = jax.lax.optimization_barrier(x)
        seen.add(layer.reads)
        if isinstance(layer, Cross):
            out, kept = group_cross.propagate(
                *(run.tails, own, x, arrays),
                want=reads[value].want,
                head=head if group.head == value else None,
                keep=keep,
            )
            y, dots = out.y, out.dots
        else:
            residual = None if layer.residual is None else values[layer.residual]
            dropout = _dropout(group, value, words)
            step = DenseStep(run.tails, layer, own, group.shape(value), dropout)
            y, kept = step.forward(x, residual, arrays[0], reads[value], keep=keep)
        values.append(y)
        all_kept.append(kept)
    outputs = tuple(_output(values[v], reads[v].want) for v in group.outputs)
    results = outputs if group.head is None else (dots, *outputs)
    vectors = [[x._replace(kernels=()) for x in own] for own in layers]
    return results, (vectors, head, states, words, all_kept)


def _backward(run: _Run, residuals, results):
    layers, head, states, words, all_kept = residuals
    group, sites = run.group, run.sites(states)
    d: list[list[Scaled | Outer]] = [[] for _ in group.values]
    if group.head is not None:
        d[group.head].append(Outer(results[0], head))
    for value, dy in zip(reversed(group.outputs), reversed(results), strict=False):
        d[value].append(Scaled(dy))
    gradients, amaxes, dhead = [], [], None
    given: dict[int, tuple[Array, ...]] = {}
    each = zip(group.layers, sites, layers, all_kept, strict=True)
    for i, (layer, own, arrays, kept) in reversed([*enumerate(each)]):
        value = len(group.inputs) + i
        if isinstance(layer, Cross):
            parts = run.inputs[layer.reads]
            others, d[layer.reads] = d[layer.reads], []
            out = group_cross.pull_back(
                run.tails, own, kept, arrays, d[value], others, parts
            )
            given[layer.reads] = out.x0
            gradients.append(out.layers)
            amaxes = out.amaxes + amaxes
            dhead = out.head if out.head is not None else dhead
        else:
            dropout = _dropout(group, value, words)
            step = DenseStep(run.tails, layer, own, group.shape(value), dropout)
            to_fp8 = group.is_crossed(layer.reads)
            pulled = step.backward(d[value], kept, arrays[0], to_fp8=to_fp8)
            d[layer.reads].append(pulled.x)
            if layer.residual is not None:
                d[layer.residual] += pulled.residual
            gradients.append((pulled.layer,))
            amaxes = pulled.amaxes + amaxes
    dinputs = tuple(
        _leave(group, value, d[value], given.get(value), parts)
        for value, parts in enumerate(run.inputs)
    )
    after = next_states(run.plans, states, amaxes)
    return dinputs, tuple(reversed(gradients)), dhead, after, None


_run.defvjp(_forward, _backward)


def _dropout(group: Group, value: int, words: Array | None) -> Dropout | None:
    """Returns the dropout of the layer that makes a value; None without."""
    i = value - len(group.inputs)
    layer = group.layers[i]
    if words is None or isinstance(layer, Cross) or not layer.dropout:
        return None
    return Dropout(words[i], layer.dropout)


def _reads(group: Group, sites, value: int, *, keep: bool) -> Read:
    """Returns how a value is read."""
    reading: list[GroupSite] = [
        own[0][0]
        for layer, own in zip(group.layers, sites, strict=True)
        if layer.reads == value and own
    ]
    each = [site.forms("lhs", keep=keep) for site in reading]
    in_fp8 = next((form for form in each if form.fp8 is not None), Forms())
    want = Forms(
        bf16=group.is_returned(value) or any(form.bf16 for form in each),
        fp8=in_fp8.fp8,
        scale_inv=in_fp8.scale_inv,
        transposed=any(form.transposed for form in each),
        amax=any(form.amax for form in each),
        shape=group.shape(value),
        padded=bool(each),
    )
    return Read(want, reading[0] if reading else None)


def _enter(run: _Run, parts: tuple[Array, ...], want: Forms) -> Written:
    """Returns an input in the forms that are read."""
    first, *others = parts
    if others:
        return run.tails.joined_cast(first, *others, want=want)
    return cast(run.tails, Scaled(first.astype(jnp.bfloat16)), want)


def _output(y: Written, want: Forms) -> Array:
    assert y.bf16 is not None
    return cut(y.bf16, want.shape_of(y.bf16))


def _leave(
    group: Group,
    value: int,
    d: list[Scaled | Outer],
    given: tuple[Array, ...] | None,
    parts: tuple[jax.ShapeDtypeStruct, ...],
) -> tuple[Array, ...]:
    """Returns the gradient of each part of an input.

    Args:
        d: summands of the gradient of the whole.
        given: further summands, by part; None without.
        parts: the types of the parts.
    """
    if not d:
        assert given is not None
        return given
    cuts = [*columns_of(parts, _sum(d, group.shape(value)))]
    if given is not None:
        cuts = [x + y for x, y in zip(cuts, given, strict=True)]
    return tuple(x.astype(part.dtype) for x, part in zip(cuts, parts, strict=True))


def _sum(d: Sequence[Any], shape: tuple[int, int]) -> Array:
    """Returns a gradient of one or several summands."""
    if len(d) == 1:
        return cut(in_bf16(d[0]), shape)
    return cut(functools.reduce(jnp.add, map(decode, d)), shape)
