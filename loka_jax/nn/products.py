"""The products of a program, what follows each, and which run together.

A product of data and a weight is a site. Its path is that of the variable, without
"kernel". Of others `left` says why they run as written.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from loka_jax.nn.follow import Following, Kind, following
from loka_jax.nn.found_attention import FoundAttention, found_attention
from loka_jax.nn.found_pairs import FoundPairs, found_pairs
from loka_jax.nn.program import PRODUCTS, Program, Step, Value, flops, hidden_products
from loka_jax.normed import Order
from loka_jax.site import SiteSpec

# What follows a bias, of which any may be absent.
_ORDERS: tuple[tuple[Order, tuple[Kind, ...]], ...] = (
    ("sum_norm_act", ("residual", "norm", "activation", "dropout")),
    ("norm_act_sum", ("norm", "activation", "dropout", "residual")),
    ("act_norm", ("activation", "dropout", "norm")),
    ("act_sum_norm", ("activation", "dropout", "residual", "norm")),
    ("norm_act_mul", ("norm", "activation", "dropout", "factor")),
    ("norm_act_mul", ("norm", "activation", "factor", "dropout")),  # the same
    ("norm_act_mul", ("gate", "dropout")),
)
_IN_SITES: tuple[Kind, ...] = ("bias", "norm", "activation")
# What follows a product, by its first step, and is no part of a site.
_READERS = {
    "dot_general": "another product",
    "reduce_sum": "a sum (a norm over other axes than the last, or one of its own)",
    "concatenate": "a concatenation",
    "mul": "a factor from data (a gate, a cross layer)",
    "split": "a split (no gate of its halves)",
}


@dataclasses.dataclass(eq=False)
class Product:
    """A product of a program.

    Attributes:
        path: of the site; of others a name by their place.
        stack: lengths of the scans that cut the weight into steps.
        left: why it runs as written; None for a site.
        spec: m, k and n, of each product of a batch.
        follows: what follows it alone, in an order of `group.Dense`.
        whole: the operation that it begins: products in pairs, or attention.
        apart: why no more follows.
        inside: the step that hides the product in a program of its own.
    """

    step: Step
    path: tuple[str, ...]
    spec: SiteSpec
    batch: int = 1
    stack: tuple[int, ...] = ()
    left: str | None = None
    follows: list[Following] = dataclasses.field(default_factory=list)
    whole: FoundPairs | FoundAttention | None = None
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
        return self.step.inputs[0]

    @property
    def kernel(self) -> Value:
        """The weight as the program's variable, before casts."""
        return uncast(self.step.inputs[1])

    @property
    def dims(self) -> Any:
        """The dimension numbers, contracted dims in the order of the data's."""
        contracted, batch = self.step.params["dimension_numbers"]
        pairs = sorted(zip(*contracted, strict=True))
        return tuple(zip(*pairs, strict=True)) if pairs else ((), ()), batch

    @property
    def is_stacked(self) -> bool:
        """True for layers that `vmap` stacked, which are sites each."""
        return "vmap(" in self.step.scope and len(self.dims[1][0]) == 1

    @property
    def fused(self) -> list[Following]:
        """What is part of the site where it runs by itself: a norm, an activation."""
        own: list[Following] = []
        for x in self.follows:
            if not _is_within([y.kind for y in (*own, x)], _IN_SITES):
                break
            own.append(x)
        return own if any(x.kind != "bias" for x in own) else []


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
    if is_weight != [False, True]:
        which = "of parameters alone" if all(is_weight) else "of data and data"
        product = _left(step, place, f"a product {which}")
        if not any(is_weight) and why_left(place, step.scope) is None:
            product.whole = found_pairs(step) or found_attention(step)
        if product.whole is not None:
            product.left = product.whole.name
        return product
    origin = origins[1]
    assert origin is not None and origin.path is not None
    path = site_path(origin.path)
    batch, m, k, n = _sizes(step)
    left = why_left("/".join(path), step.scope)
    if any(x.aval.dtype.itemsize == 1 for x in step.inputs):
        left = left or "the model itself casts its operands to 8 bits"
    dtype = jnp.result_type(*(x.aval.dtype for x in step.inputs))
    if not jnp.issubdtype(dtype, jnp.floating):
        left = left or f"in {dtype}, which FP8 has no form of"
    product = Product(*(step, path, SiteSpec(m=m, k=k, n=n), batch, origin.stack, left))
    if left is None and batch == 1 and not step.params["dimension_numbers"][1][0]:
        _follow(product)
    elif product.is_stacked:
        product.apart = "one of layers that vmap stacked, which run by themselves"
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
    if 0 in (product.spec.m, product.spec.k, product.spec.n):
        return
    dims = product.step.params["dimension_numbers"][0][0]
    rows = len(product.data.shape) - len(dims)
    value = product.step.outputs[0]
    product.follows, product.apart = follow(value, rows)


def order_of(kinds: Sequence[Kind]) -> Order | None:
    """Returns an order in which a layer may compute these, or None if there is none."""
    for order, own in _ORDERS:
        if _is_within(kinds, ("bias", *own)):
            return order
    return None


def _is_within(kinds: Sequence[Kind], whole: Sequence[Kind]) -> bool:
    """Returns True if these are some of the whole, in its order."""
    rest = iter(whole)
    return all(kind in rest for kind in kinds)


def follow(
    value: Value, rows: int, first: Sequence[Following] = ()
) -> tuple[list[Following], str | None]:
    """Returns what follows a value alone, in an order of a layer, and why not more.

    Args:
        rows: the number of its leading dims.
        first: what is found already, which ends in this value.
    """
    found = [*first]
    while True:
        kinds: list[Kind] = [x.kind for x in found]
        each = [x for x in following(value, rows) if order_of([*kinds, x.kind])]
        step = next((x for x in each if x.is_alone), None)
        if step is None:
            return found, _why_apart(value, each, found)
        found.append(step)
        value = step.end


def _why_apart(
    value: Value, each: list[Following], found: list[Following]
) -> str | None:
    if any(x.kind != "bias" for x in found):
        return None
    if each:
        readers = len(value.readers) + value.stays
        return f"{readers} places in the code read what a {each[0].kind} follows"
    if not value.readers:
        return None
    names = sorted({step.name for step in value.readers})
    for name, text in _READERS.items():
        if name in names:
            return f"{text} follows, which no site carries"
    return f"{', '.join(names)} follows, which no site carries"
