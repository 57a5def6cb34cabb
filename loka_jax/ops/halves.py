"""Products of a group of which one half gates the other, as two layers each.

    y = drop(activation(z_1) * z_2),  [z_1, z_2] = x [W_1, W_2] + [b_1, b_2]

Two products write what one would, and the tail reads both as they lie: as columns of
one matrix they would be copied first.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array

from loka_jax.group import Cross, Dense, Group
from loka_jax.normed import Epilogue
from loka_jax.ops.group_sites import LayerArrays
from loka_jax.ops.plan import KernelPlan, resolve


class Apart(NamedTuple):
    """A group whose layers have a product each.

    Attributes:
        group: the group.
        plans: of its members.
        layers: of each of its layers the number in the whole group, and the half.
        members: of each of its members the number in the whole group.
    """

    group: Group
    plans: tuple[KernelPlan, ...]
    layers: list[tuple[int, int | None]]
    members: list[int]

    def arrays(
        self, layers: Sequence[tuple[LayerArrays, ...]]
    ) -> tuple[tuple[LayerArrays, ...], ...]:
        """Returns the parameters of each layer."""
        return tuple(
            layers[i] if half is None else (_half_of(*layers[i], half=half),)
            for i, half in self.layers
        )

    def words(self, words: Array | None) -> Array | None:
        """Returns the random bits of each layer."""
        if words is None or len(words) == len(self.layers):
            return words
        return words[np.array([i for i, _ in self.layers])]


def apart(group: Group, plans: Sequence[KernelPlan]) -> Apart:
    """Returns a group with two layers for each product whose halves gate."""
    inputs = len(group.inputs)
    numbers, layers, found = [*range(inputs)], [], Apart(group, (), [], [])
    own_plans, first = [], 0
    for i, layer in enumerate(group.layers):
        own = range(first, first + sum(map(len, layer.members)))
        first = own.stop
        for half in _halves(layer):
            layers.append(_layer(layer, half, numbers, inputs + len(layers) - 1))
            found.layers.append((i, half))
            found.members.extend(own)
            own_plans += [_plan(plans[j], half is not None) for j in own]
        numbers.append(inputs + len(layers) - 1)
    outputs = tuple(numbers[value] for value in group.outputs)
    head = None if group.head is None else numbers[group.head]
    group = dataclasses.replace(group, layers=tuple(layers), outputs=outputs, head=head)
    return found._replace(group=group, plans=tuple(own_plans))


def _halves(layer: Dense | Cross) -> tuple[int | None, ...]:
    """Returns the halves of a layer's product, the factor first."""
    if isinstance(layer, Cross) or layer.half is None:
        return (None,)
    return 1 - layer.half, layer.half


def _layer(
    layer: Dense | Cross, half: int | None, numbers: list[int], before: int
) -> Dense | Cross:
    """Returns a layer, or half of one.

    Args:
        numbers: of values, by those in the whole group.
        before: the number of the value made last.
    """
    reads = numbers[layer.reads]
    if isinstance(layer, Cross):
        return dataclasses.replace(layer, reads=reads)
    if half is None:
        residual = None if layer.residual is None else numbers[layer.residual]
        return dataclasses.replace(layer, reads=reads, residual=residual)
    assert layer.member is not None
    spec = dataclasses.replace(layer.member.spec, n=layer.member.spec.n // 2)
    if half == layer.half:
        member = layer.member._replace(spec=spec)
        return dataclasses.replace(
            layer, reads=reads, member=member, residual=before, half=None
        )
    spec = dataclasses.replace(spec, activation="none")
    member = layer.member._replace(spec=spec)
    return Dense(reads=reads, member=member, norm=Epilogue("none"))


def _plan(plan: KernelPlan, is_halved: bool) -> KernelPlan:
    if not is_halved:
        return plan
    spec = dataclasses.replace(plan.spec, n=plan.spec.n // 2)
    return resolve(spec, plan.choice, plan.device)


def _half_of(arrays: LayerArrays, half: int) -> LayerArrays:
    (kernel,), n = arrays.kernels, arrays.kernels[0].shape[1] // 2
    own = slice(half * n, half * n + n)
    bias = None if arrays.bias is None else arrays.bias[own]
    return LayerArrays((kernel[:, own],), bias)
