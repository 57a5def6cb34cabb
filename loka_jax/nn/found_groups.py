"""The groups that the products of a program belong to.

Layers are joined where one reads another or both read one value, of as many rows, if
nothing else in the program lies between them.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from loka_jax.fp8 import SIZE_MULTIPLE
from loka_jax.group import Dense, Group, Member
from loka_jax.nn.follow import Following, following
from loka_jax.nn.products import Product, follow, order_of, uncast
from loka_jax.nn.program import Program, Step, Value
from loka_jax.normed import ActivationName, Epilogue

_CASTS = ("convert_element_type",)


@dataclasses.dataclass(eq=False)
class Layer:
    """A layer of a group in a program: a product and what follows, or a norm alone."""

    reads: Value
    product: Product | None
    follows: list[Following]

    @property
    def result(self) -> Value:
        """The value that it makes."""
        if self.follows:
            return self.follows[-1].end
        assert self.product is not None
        return self.product.step.outputs[0]

    @property
    def steps(self) -> set[Step]:
        """The equations that it stands for."""
        own = set() if self.product is None else {self.product.step}
        return own.union(*(x.steps for x in self.follows))

    def part(self, kind: str) -> Following | None:
        """Returns what of a kind follows, or None."""
        return next((x for x in self.follows if x.kind == kind), None)

    @property
    def residual(self) -> Value | None:
        """The value that is added, or a factor; None without."""
        found = self.part("residual") or self.part("factor")
        return None if found is None else found.vectors[0]

    @property
    def dropout(self) -> float:
        """The share of its result that is dropped."""
        found = self.part("dropout")
        return 0.0 if found is None else found.rate

    @property
    def epilogue(self) -> Epilogue:
        """Its norm and activation, and their order."""
        norm, act = self.part("norm"), self.part("activation")
        norm_name: Any = "none" if norm is None else norm.name
        activation: Any = "none" if act is None else act.name
        epsilon = 1e-6 if norm is None else norm.epsilon
        order = order_of([x.kind for x in self.follows])
        assert order is not None
        return Epilogue(norm_name, activation, epsilon, order)

    @property
    def is_below_head(self) -> bool:
        """True if a product too narrow for FP8 reads the result, with no norm."""
        if self.part("norm") is not None:
            return False
        result = uncast(self.result)
        readers = [*result.readers]
        for step in result.readers:
            if step.name in _CASTS:
                readers += step.outputs[0].readers
        return any(
            step.name == "dot_general" and step.outputs[0].shape[-1:] < (SIZE_MULTIPLE,)
            for step in readers
        )

    @property
    def rows(self) -> int:
        """The rows of its result."""
        if self.product is not None:
            return self.product.spec.m
        return math.prod(self.reads.shape[:-1])


@dataclasses.dataclass(eq=False)
class Together:
    """Layers that run as one group.

    Attributes:
        inputs: the values that they read and do not make.
        outputs: those that others read, with their numbers in the group.
        steps: the equations that the group stands for.
    """

    group: Group
    layers: list[Layer]
    inputs: list[Value]
    outputs: list[tuple[Value, int]]
    steps: set[Step]


def groups_of(program: Program, products: list[Product]) -> list[Together]:
    """Returns the groups of these products, in their order."""
    layers = [*_layers(products)]
    layers += _norms(program, layers)
    layers.sort(key=lambda x: max(step.number for step in x.steps))
    parts = _connected(program, layers)
    made = [_together(own) for own in parts]
    return [x for x in made if x is not None]


def _layers(products: list[Product]) -> Iterator[Layer]:
    """Yields the layers of products, each step in one of them.

    Of products that are added or multiplied with each other one takes the others: one
    with an activation, so that those need no pass of their own, else the last.
    """
    taken: set[Step] = set()
    own = [x for x in reversed(products) if _may_be_in_group(x)]
    own.sort(key=lambda x: not any(y.kind == "activation" for y in x.follows))
    for product in own:
        follows = [*itertools.takewhile(lambda x: not x.steps & taken, product.follows)]
        taken.update(*(x.steps for x in follows))
        yield Layer(uncast(product.data), product, follows)


def _may_be_in_group(product: Product) -> bool:
    if product.left is not None or product.batch != 1 or product.weight != 1:
        return False
    if product.spec.n < SIZE_MULTIPLE:  # a head
        return False
    (lhs, _), (batched, _) = product.step.params["dimension_numbers"]
    ndim = len(product.data.shape)
    is_last = tuple(lhs) == tuple(range(ndim - len(lhs), ndim))
    return is_last and not batched and min(product.spec.m, product.spec.n) > 0


def _norms(program: Program, layers: list[Layer]) -> Iterator[Layer]:
    """Yields norms alone whose result a product of a group reads."""
    taken = set().union(*(x.steps for x in layers)) if layers else set()
    read = {x.reads for x in layers}
    seen: set[Value] = set()
    for step in program.steps:
        if step.name not in ("reduce_sum", "square", "integer_pow", "jit"):
            continue
        for value in {step.inputs[0], uncast(step.inputs[0])} - seen:
            seen.add(value)
            if len(value.shape) < 2 or value.origin is not None or step in taken:
                continue
            each = following(value, len(value.shape) - 1)
            norm = next((x for x in each if x.kind == "norm"), None)
            if norm is None or norm.steps & taken:
                continue
            after, _ = follow(norm.end, len(value.shape) - 1, [norm])
            for own in (after, [norm]):
                if uncast(own[-1].end) in read:
                    yield Layer(uncast(value), None, own)
                    break


def _connected(program: Program, layers: list[Layer]) -> list[list[Layer]]:
    """Returns layers joined where one reads another, or both the same value."""
    parts: list[list[Layer]] = []
    of_value: dict[Value, list[Layer]] = {}
    part_of: dict[Layer, list[Layer]] = {}
    for layer in layers:
        parts.append([layer])
        part_of[layer] = parts[-1]
        touched = [layer.reads, layer.residual]
        for value in filter(None, map(_uncast_or_none, touched)):
            for other in of_value.get(value, []):
                a, b = part_of[other], part_of[layer]
                if a is not b and _may_join(program, a, b):
                    a += b
                    parts.remove(b)
                    part_of |= dict.fromkeys(b, a)
            of_value.setdefault(value, []).append(layer)
        of_value.setdefault(uncast(layer.result), []).append(layer)
    return [sorted(own, key=layers.index) for own in parts]


def _uncast_or_none(value: Value | None) -> Value | None:
    return None if value is None else uncast(value)


def _may_join(program: Program, a: list[Layer], b: list[Layer]) -> bool:
    both = [*a, *b]
    paths = [x.product.path for x in both if x.product is not None]
    if len({x.rows for x in both}) > 1 or len(set(paths)) < len(paths):
        return False
    steps = set().union(*(x.steps for x in both))
    return _is_convex(program, steps)


def _is_convex(program: Program, steps: set[Step]) -> bool:
    """Returns True if nothing outside lies between steps of a group."""
    mask = sum(1 << step.number for step in steps)
    before = 0
    for step in steps:
        before |= step.before
    before &= ~mask
    return not any(
        before >> step.number & 1 and step.before & mask and step.name not in _CASTS
        for step in program.steps
    )


def _together(layers: list[Layer]) -> Together | None:
    """Returns layers as a group, or None if it is no more than a product."""
    members = [x.product for x in layers if x.product is not None]
    is_alone = len(layers) == 1 and not any(x.kind != "bias" for x in layers[0].follows)
    if not members or is_alone:
        return None
    steps = set().union(*(x.steps for x in layers))
    numbers: dict[Value, int] = {}
    made = {uncast(x.result) for x in layers}
    inputs: list[Value] = []
    for layer in layers:
        for value in filter(None, map(_uncast_or_none, (layer.reads, layer.residual))):
            if value not in made and value not in numbers:
                numbers[value] = len(inputs)
                inputs.append(value)
    dense = []
    for i, layer in enumerate(layers):
        residual = _uncast_or_none(layer.residual)
        dense.append(
            Dense(
                reads=numbers[uncast(layer.reads)],
                member=_member(layer),
                norm=layer.epilogue,
                residual=None if residual is None else numbers[residual],
                dropout=layer.dropout,
            )
        )
        numbers[uncast(layer.result)] = len(inputs) + i
    results = [uncast(x.result) for x in layers]
    casts = {s for v in results for s in _casts_within(v, steps)}
    steps |= casts
    outputs = [
        (out, numbers[v])
        for v in dict.fromkeys(results)
        for out in [v, *_casts_of(v, steps)]
        if out.is_output or set(out.readers) - steps
    ]
    group = Group(
        rows=layers[0].rows,
        inputs=tuple((_columns(v, layers),) for v in inputs),
        layers=tuple(dense),
        outputs=tuple(dict.fromkeys(number for _, number in outputs)),
    )
    return Together(group, layers, inputs, outputs, steps)


def _columns(value: Value, layers: list[Layer]) -> int:
    """Returns the columns of an input, whose last dims some products contract."""
    rows = layers[0].rows
    return math.prod(value.shape) // rows


def _casts_within(value: Value, steps: set[Step]) -> Iterator[Step]:
    """Yields casts of a value that only steps of the group read."""
    for step in value.readers:
        if step.name in _CASTS and step not in steps:
            (out,) = step.outputs
            if not out.is_output and set(out.readers) <= steps:
                yield step


def _casts_of(value: Value, steps: set[Step]) -> list[Value]:
    casts = [x for x in value.readers if x.name in _CASTS and x in steps]
    return [out for step in casts for out in step.outputs]


def _member(layer: Layer) -> Member | None:
    product = layer.product
    if product is None:
        return None
    epilogue = layer.epilogue
    activation: ActivationName = epilogue.activation
    spec = dataclasses.replace(
        product.spec,
        norm=epilogue.norm,
        activation=activation,
        use_bias=layer.part("bias") is not None,
    )
    return Member(product.name, spec)
