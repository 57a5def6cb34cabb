"""The groups that the products of a program belong to.

Layers are joined where one reads another or both read one value, of as many rows, if
nothing else in the program lies between them.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from loka_jax.fp8 import SIZE_MULTIPLE
from loka_jax.group import Cross, Dense, Group, Member
from loka_jax.nn.follow import Following, following
from loka_jax.nn.found_layers import CASTS, Layer, Network
from loka_jax.nn.products import Product, follow, products_of, uncast
from loka_jax.nn.program import Program, Step, Value


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


class Found(NamedTuple):
    """What was found in a program: its products, and the groups of its sites."""

    products: list[Product]
    groups: list[Together]


def find(program: Program, why_left: Callable[[str, str], str | None]) -> None:
    """Finds products and groups in a program and in those of its steps.

    Args:
        why_left: as of `products_of`.
    """
    products = products_of(program, why_left)
    sites = [x for x in products if x.left is None]
    program.found = Found(products, groups_of(program, sites))
    for inner in (x for step in program.steps for x in step.inner):
        find(inner, why_left)


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
    own = [x for x in products if _may_be_in_group(x)]
    networks = _networks(own)
    yield from networks
    taken: set[Step] = set().union(*(x.steps for x in networks))
    own = [x for x in reversed(own) if x.step not in taken]
    own.sort(key=lambda x: not any(y.kind == "activation" for y in x.follows))
    for product in own:
        follows = [*itertools.takewhile(lambda x: not x.steps & taken, product.follows)]
        taken.update(*(x.steps for x in follows))
        yield Layer(uncast(product.data), product, follows)


def _networks(products: list[Product]) -> list[Network]:
    """Returns the cross networks of products that are written out."""
    plain = {x.step.outputs[0]: x for x in products if not x.follows}
    ending: dict[Value, Network] = {}
    for product in products:
        if [x.kind for x in product.follows] not in (["factor"], ["bias", "factor"]):
            continue
        last = product.follows[-1]
        first = plain.get(uncast(product.data))
        for own in ([first, product], [product]):
            layers = [Layer(uncast(x.data), x, x.follows) for x in own if x is not None]
            x, x0 = layers[0].reads, _uncast_or_none(last.vectors[0])
            added = _residual_of(last.end, x)
            if added is None or x0 is None:
                continue
            network = Network(x0, None, []) if x is x0 else ending.get(x)
            inner = [layer.result for layer in layers[:-1]]
            inner += [] if x is x0 else [x]
            steps = added.steps.union(*(layer.steps for layer in layers))
            is_inner = all(_is_read_within(value, steps) for value in inner)
            if network is None or network.reads is not x0 or not is_inner:
                continue
            ending.pop(x, None)
            network.parts.append(layers)
            network.sums.append(added)
            ending[uncast(added.end)] = network
            break
    return [*ending.values()]


def _residual_of(value: Value, x: Value) -> Following | None:
    """Returns the sum of a value and x, if nothing else reads the value."""
    each = following(value, len(value.shape) - 1)
    sums = (y for y in each if y.kind == "residual" and y.is_alone)
    return next((y for y in sums if _uncast_or_none(y.vectors[0]) is x), None)


def _is_read_within(value: Value, steps: Collection[Step]) -> bool:
    """Returns True if nothing else reads a value, nor a cast of it."""
    casts = [x for x in value.readers if x.name in CASTS and x not in steps]
    values = [value, *(out for step in casts for out in step.outputs)]
    return all(
        not v.stays and all(x in steps or x in casts for x in v.readers) for v in values
    )


def _may_be_in_group(product: Product) -> bool:
    return product.left is None and _why_in_none(product) is None


def why_in_no_group(product: Product) -> str:
    """Returns why a site is in no group."""
    none = "no other product reads its result or its input, as far as groups reach"
    return _why_in_none(product) or none


def _why_in_none(product: Product) -> str | None:
    m, _, n = sizes = product.spec.m, product.spec.k, product.spec.n
    (lhs, _), (batched, _) = product.dims
    ndim = len(product.data.shape)
    if batched or product.batch != 1:
        return f"it is {product.batch} products at once"
    if not m or not n:
        return f"a size of {sizes} is 0"
    if n < SIZE_MULTIPLE:
        return f"n={n} is smaller than {SIZE_MULTIPLE}"
    if tuple(lhs) != tuple(range(ndim - len(lhs), ndim)):
        return "what it reads is not contracted over its last axis"
    return None


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
    paths = [y.product and y.product.path for x in both for y in x.sites]
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
        before >> step.number & 1 and step.before & mask and step.name not in CASTS
        for step in program.steps
    )


def _together(layers: list[Layer]) -> Together | None:
    """Returns layers as a group, or None if it is no more than a product."""
    members = [y for x in layers for y in x.sites]
    is_alone = len(members) == len(layers) == 1
    is_alone = is_alone and not any(x.kind != "bias" for x in layers[0].follows)
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
    dense: list[Dense | Cross] = []
    for i, layer in enumerate(layers):
        dense.append(_layer(layer, numbers))
        numbers[uncast(layer.result)] = len(inputs) + i
    results = [uncast(x.result) for x in layers]
    inner = [v for x in layers for v in x.inner]
    casts = {s for v in (*results, *inner) for s in _casts_within(v, steps)}
    steps |= casts
    outputs = []
    for result in dict.fromkeys(results):
        forms = [result, *_casts_of(result, steps)]
        if any(x.is_output or set(x.readers) - steps for x in forms):
            outputs += [(x, numbers[result]) for x in forms]
    group = Group(
        rows=layers[0].rows,
        inputs=tuple((_columns(v, layers),) for v in inputs),
        layers=tuple(dense),
        outputs=tuple(dict.fromkeys(number for _, number in outputs)),
    )
    return Together(group, layers, inputs, outputs, steps)


def _layer(layer: Layer, numbers: dict[Value, int]) -> Dense | Cross:
    """Returns a layer as data, the values that it reads by their numbers."""
    reads = numbers[uncast(layer.reads)]
    if isinstance(layer, Network):
        members = tuple(tuple(map(_member, own)) for own in layer.parts)
        return Cross(reads=reads, members=members)
    residual = _uncast_or_none(layer.residual)
    return Dense(
        reads=reads,
        member=None if layer.product is None else _member(layer),
        norm=layer.epilogue,
        residual=None if residual is None else numbers[residual],
        dropout=layer.dropout,
        half=layer.half,
    )


def _columns(value: Value, layers: list[Layer]) -> int:
    """Returns the columns of an input, whose last dims some products contract."""
    rows = layers[0].rows
    return math.prod(value.shape) // rows


def _casts_within(value: Value, steps: set[Step]) -> Iterator[Step]:
    """Yields casts of a value that only steps of the group read."""
    for step in value.readers:
        if step.name in CASTS and step not in steps:
            (out,) = step.outputs
            if not out.is_output and set(out.readers) <= steps:
                yield step


def _casts_of(value: Value, steps: set[Step]) -> Iterator[Value]:
    """Yields casts of a value within the group, and casts of these."""
    for step in value.readers:
        if step.name in CASTS and step in steps:
            (out,) = step.outputs
            yield out
            yield from _casts_of(out, steps)


def _member(layer: Layer) -> Member:
    product = layer.product
    assert product is not None
    dtype = product.step.inputs[1].aval.dtype.name
    gradient = "bfloat16" if dtype == "bfloat16" else "float32"
    return Member(product.name, layer.spec, gradient)
