"""A cross network and the wide layers that read it, as one operation.

    forward     x' = cross_network(x0)    y = wide_stack(x')
    backward    dx' from dy, dx0 from dx'

Between the two nothing is written but what products read: x' in FP8 in both layouts, as
the first layer's recipe asks for, and dx' as a product whose scales the cross network's
tail applies. By themselves one would write x' in bfloat16, and the other cast it: three
passes over the widest array of the model in place of one.
"""

import functools
from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from loka_jax import triton
from loka_jax.ops import cross, wide_stack
from loka_jax.ops.cross import Crossed
from loka_jax.ops.kernels import equally_varying
from loka_jax.ops.plan import KernelPlan
from loka_jax.ops.tailed_products import Tailed, read_states
from loka_jax.ops.wide_stack import WideLayer
from loka_jax.scaling import DelayedScaling


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
    refusal = cross.check(crossed)
    wide_stack.check(plans)
    provider = triton.chosen(implementation, refusal)
    static = _Static(
        Tailed(crossed.plans, axis_names, provider), Tailed(plans, axis_names, provider)
    )
    all_states = read_states((crossed.plans, plans), (crossed.states, states))
    operands = (crossed.x0, crossed.layers, layers)
    arrays, tree = jax.tree.flatten(operands)
    return _run(static, *jax.tree.unflatten(tree, equally_varying(*arrays)), all_states)


class _Static(NamedTuple):
    """The static arguments of the cross network and of the layers behind it."""

    network: Tailed
    stack: Tailed


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(static: _Static, x0, cross_layers, layers, states):
    return _forward(static, x0, cross_layers, layers, states, keep=False)[0]


def _forward(static: _Static, x0, cross_layers, layers, states, *, keep: bool = True):
    of_network, of_stack = states
    reader = static.stack.sites(of_stack)[0]
    x, crossed = cross.propagate(
        static.network, x0, cross_layers, of_network, reader=reader, keep=keep
    )
    y, kept = wide_stack.propagate(static.stack, x, layers, of_stack, keep=keep)
    vectors = cross.biases_of(cross_layers), wide_stack.vectors_of(layers)
    return y, (x0, vectors, states, crossed, kept)


def _backward(static: _Static, residuals, dy):
    x0, (biases, vectors), (of_network, of_stack), crossed, kept = residuals
    d, layers, next_of_stack = wide_stack.pull_back(
        static.stack, kept, vectors, of_stack, dy, to_fp8=True
    )
    dx0, cross_layers, next_of_network = cross.pull_back(
        static.network, crossed, biases, of_network, d
    )
    next_states = next_of_network, next_of_stack
    return cross.split(dx0, x0), cross_layers, layers, next_states


_run.defvjp(_forward, _backward)
