"""Dot products of all pairs of an example's vectors, found in a program.

    G = z z^T of each example,  z [B, n, D];    out[b] = G[b, i, j] for some pairs i, j

Which pairs a program takes is known by what it computes: elements of its result are
followed to their places in G, of the first, the last, and a few other examples.
"""

import dataclasses
from typing import get_args

import jax.numpy as jnp
import numpy as np
from numpy import ndarray

from loka_jax.nn.follow import is_closed
from loka_jax.nn.places import NotRead, Places, Reader, reader
from loka_jax.nn.program import Step, Value
from loka_jax.ops.interaction import indices
from loka_jax.triton.dot_features import Pairs, count


@dataclasses.dataclass(frozen=True, eq=False)
class FoundPairs:
    """The products of pairs of vectors.

    Attributes:
        z: the vectors.
        pairs: which there are.
        steps: the equations from z to the products.
        end: the products [B, p].
    """

    z: Value
    pairs: Pairs
    steps: frozenset[Step]
    end: Value

    @property
    def name(self) -> str:
        """What its product is."""
        return f"a product of vectors in pairs, {self.pairs}"


def found_pairs(product: Step) -> FoundPairs | None:
    """Returns the products of pairs that a product is the first step of, or None."""
    z = _vectors(product)
    if z is None:
        return None
    steps, whole = {product}, product.outputs[0]
    batch, n, _ = whole.shape
    sizes = {(batch, count(n, pairs)) for pairs in get_args(Pairs)}
    following = {*whole.readers}
    while following and len(steps) <= 4 * n:
        step = min(following, key=lambda x: x.number)
        following.remove(step)
        steps.add(step)
        for end in step.outputs:
            own = frozenset(x for x in steps if step.before >> x.number & 1)
            if end.shape in sizes and is_closed(own, end):
                if pairs := _pairs_of(end, whole):
                    return FoundPairs(z, pairs, own, end)
            following.update(end.readers)
    return None


def _vectors(product: Step) -> Value | None:
    """Returns z if a product is z z^T of each example."""
    dims = zip(*product.params["dimension_numbers"], strict=True)
    sizes = product.outputs[0].shape
    if len(sizes) != 3 or 0 in sizes or not all(isinstance(x, int) for x in sizes):
        return None  # of symbolic sizes, too
    (z, *own), (other, *others) = (
        _source(x, (*batch, *contracted))
        for x, (contracted, batch) in zip(product.inputs, dims, strict=True)
    )
    return z if z is other and own == others == [(0, 2)] and _is_real(z) else None


def _source(x: Value, dims: tuple[int, ...]) -> tuple[Value, tuple[int, ...]]:
    """Returns what was transposed or cast to real values, and dims as they were."""
    while x.maker is not None and x.maker.name in ("transpose", "convert_element_type"):
        if not _is_real(x):
            break
        if x.maker.name == "transpose":
            dims = tuple(x.maker.params["permutation"][i] for i in dims)
        (x,) = x.maker.inputs
    return x, dims


def _is_real(x: Value) -> bool:
    return jnp.issubdtype(x.aval.dtype, jnp.floating)


def _pairs_of(end: Value, whole: Value) -> Pairs | None:
    """Returns which pairs of G a value [B, p] holds, row by row; None for others."""
    (batch, columns), n = end.shape, whole.shape[1]
    examples = np.unique([0, min(1, batch - 1), batch // 3, batch // 2, batch - 1])
    places = np.meshgrid(examples, np.arange(columns), indexing="ij")
    try:
        found = reader(end, {whole: _numbered(n)})(places)
    except (NotRead, ValueError, IndexError):
        return None
    for pairs in get_args(Pairs):
        rows, others = indices(n, pairs)
        expected = _numbered(n)([examples[:, None], rows[None], others[None]])
        if np.array_equal(found, expected):
            return pairs
    return None


def _numbered(n: int) -> Reader:
    """Returns a reader of G that numbers its products, G_ij and G_ji alike.

    Numbers are large, below and above zero: a function of them, such as relu, changes
    some.
    """

    def read(at: Places) -> ndarray:
        example, i, j = at
        number = (example * n + np.maximum(i, j)) * n + np.minimum(i, j) + 1
        return np.where(number % 2, number, -number) << 20

    return read
