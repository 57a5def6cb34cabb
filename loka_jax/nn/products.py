"""The products of a program, what follows each, and which run together.

A product of data and a weight is a site. Its path is that of the variable, without
"kernel". Of others `left` says why they run as written.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

from loka_jax.fp8 import SIZE_MULTIPLE
from loka_jax.group import Dense, Group, Member
from loka_jax.nn.follow import Following, following
from loka_jax.nn.program import PRODUCTS, Program, Step, Value, flops, hidden_products
from loka_jax.normed import ActivationName, Epilogue
from loka_jax.site import SiteSpec
from loka_jax.xla import ACTIVATIONS

_RANKS = ("bias", "residual", "norm", "activation", "dropout")
# What follows a product, by its first step, and is no part of a site.
_READERS = {
    "dot_general": "another product",
    "reduce_sum": "a sum (a norm over other axes than the last, or one of its own)",
    "concatenate": "a concatenation",
    "mul": "a factor from data (a gate, a cross layer)",
    "split": "a split",
}


@dataclasses.dataclass(eq=False)
class Product:
    """A product of a program.

    Attributes:
        path: of the site; of others a name by their place.
        weight: the number of the operand that is a weight.
        stack: lengths of the scans that cut the weight into steps.
        left: why it runs as written; None for a site.
        spec: m, k and n, of each product of a batch.
        follows: what follows it alone, in the order of `group.Dense`.
        apart: why no more follows.
        inside: the step that hides the product in a program of its own.
    """

    step: Step
    path: tuple[str, ...]
    spec: SiteSpec
    batch: int = 1
    weight: int = 1
    stack: tuple[int, ...] = ()
    left: str | None = None
    follows: list[Following] = dataclasses.field(default_factory=list)
    apart: str | None = None
    inside: Step | None = None

    @property
    def place(self) -> Step:
        """The step of the program that runs it."""
        return self.inside or self.step

    @property
    def name(self) -> str:
        """The path as text."""
        return "/".join(self.path)

    @property
    def data(self) -> Value:
        """The operand that is no weight."""
        return self.step.inputs[1 - self.weight]

    @property
    def kernel(self) -> Value:
        """The weight as the program's variable, before casts."""
        return uncast(self.step.inputs[self.weight])

    @property
    def dims(self) -> Any:
        """The dimension numbers, those of the data first."""
        contracted, batch = self.step.params["dimension_numbers"]
        if self.weight == 1:
            return contracted, batch
        return contracted[::-1], batch[::-1]

    @property
    def is_stacked(self) -> bool:
        """True for layers that `vmap` stacked, which are sites each."""
        return "vmap(" in self.step.scope and len(self.dims[1][0]) == 1

    @property
    def fused(self) -> list[Following]:
        """What is part of the site where it runs by itself: a norm, an activation."""
        others = ("residual", "dropout")
        own = [*itertools.takewhile(lambda x: x.kind not in others, self.follows)]
        return own if any(x.kind != "bias" for x in own) else []


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
        """The value that is added, or None."""
        found = self.part("residual")
        return None if found is None else found.vectors[0]

    @property
    def dropout(self) -> float:
        """The share of its result that is dropped."""
        found = self.part("dropout")
        return 0.0 if found is None else found.rate

    @property
    def epilogue(self) -> Epilogue:
        """Its norm and activation."""
        norm, act = self.part("norm"), self.part("activation")
        norm_name: Any = "none" if norm is None else norm.name
        activation: Any = "none" if act is None else act.name
        epsilon = 1e-6 if norm is None else norm.epsilon
        return Epilogue(norm_name, activation, epsilon)

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


def uncast(value: Value) -> Value:
    """Returns a value before it was cast from one real dtype to another."""
    while value.maker is not None and value.maker.name == "convert_element_type":
        (before,) = value.maker.inputs
        if not jnp.issubdtype(before.aval.dtype, jnp.floating):
            break
        value = before
    return value


def products_of(
    program: Program, why_left: Callable[[str, str], str | None]
) -> list[Product]:
    """Returns the products of a program, but those of the programs in its steps.

    Args:
        why_left: why a site at a path, within modules, is left as it is, or None.
    """
    return [product for step in program.steps for product in _products(step, why_left)]


def _products(step: Step, why_left: Callable) -> Iterator[Product]:
    if step.name in PRODUCTS:
        yield _product(step, why_left)
    if step.name == "custom_vjp_call" and _is_ours(step):
        return
    for eqn, times in hidden_products(step):
        inner = Step(eqn, 0, [Value(v.aval) for v in eqn.invars], [])
        inner.outputs = [Value(v.aval) for v in eqn.outvars]
        left = f"in a {step.name} of the model, which is left as it is"
        product = _left(inner, f"{step.scope}/{step.name}", left)
        product.inside, product.batch = step, product.batch * times
        yield product


def _is_ours(step: Step) -> bool:
    """Returns True for an operation of this library, whose sites tell of themselves."""
    rule = step.params.get("bwd")
    function = getattr(rule, "f", rule)
    return "loka_jax" in (getattr(function, "__module__", "") or str(rule))


def _left(step: Step, name: str, left: str) -> Product:
    """Returns a product that is no site, its sizes such that its FLOPs are right."""
    total = flops(step) // 2
    if step.name == "dot_general":
        batch, m, k, n = _sizes(step)
    else:
        n = max(1, step.outputs[0].shape[-1])
        m = max(1, math.prod(step.outputs[0].shape) // n)
        batch, k = 1, max(1, total // (m * n))
    spec = SiteSpec(m=max(1, m), k=max(1, k), n=max(1, n))
    return Product(step, tuple(name.split("/")), spec, batch, left=left)


def _product(step: Step, why_left: Callable) -> Product:
    origins = [x.origin for x in step.inputs[:2]]
    is_weight = [x is not None and x.path is not None for x in origins]
    place = "/".join([*step.scope.split("/")[1:], step.name])
    if step.name != "dot_general":
        return _left(step, place, "a convolution")
    if sum(is_weight) != 1:
        which = "of parameters alone" if all(is_weight) else "of data and data"
        return _left(step, place, f"a product {which}")
    weight = is_weight.index(True)
    origin = origins[weight]
    assert origin is not None and origin.path is not None
    path = site_path(origin.path)
    batch, m, k, n = _sizes(step)
    m, n = (m, n) if weight else (n, m)
    left = why_left("/".join(path), step.scope)
    if any(x.aval.dtype.itemsize == 1 for x in step.inputs):
        left = left or "the model itself casts its operands to 8 bits"
    dtype = jnp.result_type(*(x.aval.dtype for x in step.inputs))
    if not jnp.issubdtype(dtype, jnp.floating):
        left = left or f"in {dtype}, which FP8 has no form of"
    product = Product(
        *(step, path, SiteSpec(m=m, k=k, n=n), batch, weight, origin.stack, left)
    )
    if left is None and batch == 1 and not step.params["dimension_numbers"][1][0]:
        _follow(product)
    return product


def site_path(path: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the path of the site whose weight is a variable of a collection."""
    inner = path[1:]
    return inner[:-1] if inner and inner[-1] == "kernel" else inner


def _sizes(step: Step) -> tuple[int, int, int, int]:
    lhs, rhs = (x.shape for x in step.inputs[:2])
    (of_lhs, of_rhs), (batch_lhs, batch_rhs) = step.params["dimension_numbers"]
    batch = math.prod(lhs[i] for i in batch_lhs)
    k = math.prod(lhs[i] for i in of_lhs)
    m, n = (
        math.prod(size for i, size in enumerate(shape) if i not in (*used, *batched))
        for shape, used, batched in ((lhs, of_lhs, batch_lhs), (rhs, of_rhs, batch_rhs))
    )
    return batch, m, k, n


def _follow(product: Product) -> None:
    """Finds what follows a product."""
    if product.weight != 1 or 0 in (product.spec.m, product.spec.k, product.spec.n):
        product.apart = "its weight comes first" if product.weight == 0 else None
        return
    dims = product.step.params["dimension_numbers"][0][0]
    rows = len(product.data.shape) - len(dims)
    value = product.step.outputs[0]
    product.follows, product.apart = follow(value, rows)


def follow(
    value: Value, rows: int, rank: int = 0
) -> tuple[list[Following], str | None]:
    """Returns what follows a value alone, in the order of `group.Dense`, and why not.

    Args:
        rows: the number of its leading dims.
        rank: of what may come first, a place in `_RANKS`.
    """
    found: list[Following] = []
    apart = None
    while True:
        each = [x for x in following(value, rows) if _RANKS.index(x.kind) >= rank]
        step = next((x for x in each if x.is_alone), None)
        if step is None:
            return found, apart or _why_apart(value, each, found)
        if step.kind == "activation" and step.name not in ACTIVATIONS:
            return found, f"{step.name} is none of {', '.join(ACTIVATIONS)[6:]}"
        found.append(step)
        value, rank = step.end, _RANKS.index(step.kind) + 1


def _why_apart(
    value: Value, each: list[Following], found: list[Following]
) -> str | None:
    if any(x.kind != "bias" for x in found):
        return None
    if each:
        readers = len(value.readers) + value.is_output
        return f"{readers} places in the code read what a {each[0].kind} follows"
    if value.is_output:
        return None
    names = sorted({step.name for step in value.readers})
    for name, text in _READERS.items():
        if name in names:
            return f"{text} follows, which no site carries"
    return f"{', '.join(names)} follows, which no site carries"


def groups_of(program: Program, products: list[Product]) -> list[Together]:
    """Returns the groups of these products, in their order."""
    layers = [
        Layer(uncast(x.data), x, x.follows) for x in products if _may_be_in_group(x)
    ]
    layers += _norms(program, layers)
    layers.sort(key=lambda x: max(step.number for step in x.steps))
    parts = _connected(program, layers)
    made = [_together(own) for own in parts]
    return [x for x in made if x is not None]


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
            after, _ = follow(norm.end, len(value.shape) - 1, _RANKS.index("norm") + 1)
            for own in ([norm, *after], [norm]):
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


_CASTS = ("convert_element_type",)


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
