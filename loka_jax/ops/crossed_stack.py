"""A cross network and the layers behind or beside it, as one operation.

    behind      x' = cross_network(x0)    y = wide_stack(x')
    beside      x' = cross_network(x0)    y = wide_stack(x0)     dots = x' w

Between the two nothing is written but what products read: x' in FP8 in both layouts, as
the first layer's recipe asks for, and dx' as a product whose scales the cross network's
tail applies. By themselves one would write x' in bfloat16, and the other cast it: three
passes over the widest array of the model in place of one.

Beside one another both read x0 as one pass has written it, under the scale of the cross
network's first layer, and the gradient of x0 from the layers is a summand of the pass
that makes dx0. A head w reads x' then: its last tail takes the dots and does not write
x', and nothing writes dx' = e w^T, of which e is the gradient of the dots.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from loka_jax import triton
from loka_jax.ops import cross, wide_stack
from loka_jax.ops.cross import Crossed
from loka_jax.ops.kernels import equally_varying
from loka_jax.ops.plan import KernelPlan
from loka_jax.ops.tailed_products import Tailed, read_states
from loka_jax.ops.wide_stack import WideLayer
from loka_jax.recipe import Recipe
from loka_jax.scaling import DelayedScaling
from loka_jax.tails import Outer


def crossed_stack(
    crossed: Crossed,
    layers: tuple[WideLayer, ...],
    states: tuple[DelayedScaling | None, ...],
    *,
    plans: tuple[KernelPlan, ...],
    axis_names: tuple[str, ...] = (),
    implementation: triton.Implementation | None = None,
) -> Float[Array, "m n"]:
    """Returns the activations of the last layer, in bfloat16.

    Differentiable as `cross.cross_network` and `wide_stack.wide_stack` are.

    Args:
        crossed: the cross network.
        layers, states, plans: of the layers that read its features.
        axis_names: mesh axes over which rows are spread, under `shard_map`.
        implementation: of the tails, as in `cross_network`.

    Raises:
        ValueError: if a part is not served (see `why_not` of each), if Triton is
            required and cannot run, or if a state is missing.
    """
    static, *operands = _operands(
        *(crossed, layers, states, plans, axis_names, implementation), head=None
    )
    (y,) = tuple(_run(static, *operands))
    return y


class CrossedBeside(NamedTuple):
    """A cross network and layers that read its x0, for an operation that runs them.

    Attributes:
        crossed: the cross network.
        layers, states, plans: of the layers, as of `crossed_stack`.
    """

    crossed: Crossed
    layers: tuple[WideLayer, ...]
    states: tuple[DelayedScaling | None, ...]
    plans: tuple[KernelPlan, ...]


def crossed_beside(
    beside: CrossedBeside,
    head: Float[Array, "k"],
    *,
    axis_names: tuple[str, ...] = (),
    implementation: triton.Implementation | None = None,
) -> tuple[Float[Array, "m"], Float[Array, "m n"]]:
    """Returns the cross network's features times a head, and the last activations.

    The first result is float32, of features that were not rounded; the activations are
    bfloat16.

    Args:
        beside: both networks.
        head: float32 weights.
        axis_names, implementation: as of `crossed_stack`.

    Raises:
        ValueError: as `crossed_stack`, or if the networks differ in their recipes (see
            `why_not_beside`).
    """
    reason = why_not_beside(beside.crossed.plans[0][0], beside.plans)
    if reason is not None:
        raise ValueError(f"crossed_beside: {reason}.")
    static, *operands = _operands(*beside, axis_names, implementation, head=head)
    return _run(static, *operands)


def why_not_beside(first: KernelPlan, plans: tuple[KernelPlan, ...]) -> str | None:
    """Returns why layers do not read x0 as the cross network does, or None if they do.

    Args:
        first: the plan of the network's first product.
        plans: of the layers.
    """
    refusals = (wide_stack.why_not(plan) for plan in plans)
    if reason := next(filter(None, refusals), None):
        return reason
    if _reading(plans[0]) != _reading(first):
        return "the first layer of each network has another choice"
    return None


def _reading(plan: KernelPlan) -> Recipe:
    """Returns what decides the forms of x0: all of a recipe but dlhs."""
    return dataclasses.replace(plan.choice.recipe, name="", dlhs=None)


class _Static(NamedTuple):
    """The static arguments of the cross network and of the layers.

    Attributes:
        network, stack: of each.
    """

    network: Tailed
    stack: Tailed


def _operands(
    crossed: Crossed, layers, states, plans, axis_names, implementation, *, head
) -> tuple[Any, ...]:
    """Returns the static arguments, and the operands."""
    refusal = cross.check(crossed)
    wide_stack.check(plans)
    provider = triton.chosen(implementation, refusal, *cross.FAMILIES)
    static = _Static(
        Tailed(crossed.plans, axis_names, provider),
        Tailed(plans, axis_names, provider),
    )
    all_states = read_states((crossed.plans, plans), (crossed.states, states))
    operands = (crossed.x0, crossed.layers, layers, head)
    arrays, tree = jax.tree.flatten(operands)
    return static, *jax.tree.unflatten(tree, equally_varying(*arrays)), all_states


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(static: _Static, x0, cross_layers, layers, head, states):
    """Returns the dots of a head of layers beside the network, and activations."""
    return _forward(static, x0, cross_layers, layers, head, states, keep=False)[0]


def _forward(
    static: _Static, x0, cross_layers, layers, head, states, *, keep: bool = True
):
    of_network, of_stack = states
    reader = static.stack.sites(of_stack)[0] if head is None else head
    out, crossed = cross.propagate(
        static.network, x0, cross_layers, of_network, reader=reader, keep=keep
    )
    read = out.y
    if head is not None:
        # Behind a barrier, without which XLA merges the weight gradients of both
        # readers, and concatenates the gradients that they read.
        read = jax.lax.optimization_barrier(crossed.lhs[0][0])
    y, kept = wide_stack.propagate(static.stack, read, layers, of_stack, keep=keep)
    vectors = cross.biases_of(cross_layers), wide_stack.vectors_of(layers)
    results = (y,) if head is None else (out.dots, y)
    return results, (x0, vectors, head, states, crossed, kept)


def _backward(static: _Static, residuals, gradients):
    x0, (biases, vectors), head, (of_network, of_stack), crossed, kept = residuals
    of_stack_in, layers, next_of_stack = wide_stack.pull_back(
        static.stack, kept, vectors, of_stack, gradients[-1], to_fp8=True
    )
    d, other = of_stack_in, None
    if head is not None:
        d, other = Outer(gradients[0], head), of_stack_in
    d, cross_layers, next_of_network = cross.pull_back(
        static.network, x0, crossed, biases, of_network, d, other
    )
    return d.x0, cross_layers, layers, d.head, (next_of_network, next_of_stack)


_run.defvjp(_forward, _backward)
