"""Softmax attention, found in a program.

    P = softmax(c q k^T)    out = P v    of each head,  q [T, D], k [S, D], v [S, D]

A mask may lie between the scores and the softmax. Both are known by what they compute
on a few rows, see `rowwise`. Dims of size 1 may lie anywhere and move, as in JAX's own
attention, whose heads are in groups: dims are numbered without them.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from loka_jax.nn.follow import is_closed, region_after, vector_of
from loka_jax.nn.places import NotRead, reader
from loka_jax.nn.program import Step, Value
from loka_jax.nn.rowwise import NotRowwise, evaluate, probe, scalar, without_ones

_FEWEST = -1e4  # what a mask leaves of a score is below this
_TOLERANCE = 1e-4
_ROWS_READ = 32  # of a mask


class Operand(NamedTuple):
    """A value and its dims: of examples and heads, then of rows, then of columns."""

    value: Value
    dims: tuple[int, ...]


class Mask(NamedTuple):
    """A value that is not 0 where a query sees a key, or a bias that is 0 there.

    Attributes:
        shape: that it is broadcast to, of examples, heads, queries and keys.
    """

    value: Value
    shape: tuple[int, ...]
    is_bias: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class FoundAttention:
    """Attention of all heads of all examples.

    Attributes:
        scale: the factor of q k^T.
        steps: the equations from q, k and v to the result.
        result: with its dims.
    """

    q: Operand
    k: Operand
    v: Operand
    scale: float
    mask: Mask | None
    steps: frozenset[Step]
    result: Operand

    @property
    def name(self) -> str:
        """What its first product is."""
        return "the scores of softmax attention"

    @property
    def end(self) -> Value:
        """The result."""
        return self.result.value

    @functools.cached_property
    def is_causal(self) -> bool:
        """True if each query sees the keys up to its own, whatever the data are.

        Some rows of the mask are read, of the first, the last and the middle one of
        examples and of heads.
        """
        if self.mask is None:
            return False
        value = self.mask.value
        *leading, queries, keys = value.shape
        if queries != keys:
            return False
        some = [np.unique([0, n // 2, n - 1]) for n in leading]
        rows = np.unique(np.linspace(0, queries - 1, _ROWS_READ).astype(int))
        places = np.meshgrid(*some, rows, np.arange(keys), indexing="ij")
        try:
            seen = reader(value, {})(places) != 0
        except (NotRead, ValueError, IndexError):
            return False
        return np.array_equal(seen != self.mask.is_bias, places[-1] <= places[-2])


class _Scores(NamedTuple):
    """Scores after a factor and a mask."""

    value: Value
    scale: float = 1.0
    mask: Mask | None = None


class _Dims(NamedTuple):
    """The dims of a product's operand, each numbered without those of size 1."""

    batch: list[int]
    used: list[int]
    free: list[int]


def found_attention(product: Step) -> FoundAttention | None:
    """Returns the attention whose scores a product makes, or None."""
    scores = product.outputs[0]
    if not all(isinstance(n, int) and n for n in scores.shape) or scores.shape[-1] == 1:
        return None
    of_q, of_k = (_dims(product, i) for i in range(2))
    if {len(x) for x in (of_q.used, of_q.free, of_k.used, of_k.free)} != {1}:
        return None
    masked = _masked(_Scores(scores))
    softmax = None if masked.value.stays else _softmax(masked.value)
    if softmax is None:
        return None
    shares, factor = softmax
    last = shares.readers[0] if len(shares.readers) == 1 else None
    values = None if last is None else _values(last, shares)
    if last is None or values is None:
        return None
    v, result = values
    steps = frozenset([product, last, *_between(product, last)])
    inputs = (v.value, masked.mask and masked.mask.value)
    makers = (x.maker for x in inputs if x is not None)
    is_before = any(x and x.before >> product.number & 1 for x in makers)
    if is_before or not is_closed(steps, result.value):
        return None
    q, k = (
        Operand(x, (*own.batch, *own.free, *own.used))
        for x, own in zip(product.inputs, (of_q, of_k), strict=True)
    )
    scale = masked.scale * factor
    return FoundAttention(q, k, v, scale, masked.mask, steps, result)


def _dims(product: Step, i: int) -> _Dims:
    """Returns the dims of an operand of a product, batch dims in its order."""
    contracted, batch = (x[i] for x in product.params["dimension_numbers"])
    shape = product.inputs[i].shape
    free = [d for d in range(len(shape)) if d not in (*contracted, *batch)]
    return _Dims(*(_numbers(x, shape) for x in (batch, contracted, free)))


def _numbers(dims: Iterable[int], shape: Sequence[int]) -> list[int]:
    """Returns dims as numbered without those of size 1."""
    return [len(without_ones(shape[:d])) for d in dims if shape[d] != 1]


def _between(product: Step, last: Step) -> list[Step]:
    """Returns the steps by which one product reads another's result."""
    steps: dict[Step, None] = {}
    queue = [*product.outputs[0].readers]
    while queue:
        step = queue.pop()
        if step is last or step in steps or not last.before >> step.number & 1:
            continue
        steps[step] = None
        queue += [x for y in step.outputs for x in y.readers]
    return [*steps]


def _masked(scores: _Scores) -> _Scores:
    """Returns scores after the factor and the mask that alone read them."""
    value, scale, _ = scores
    if len(value.readers) != 1 or value.stays:
        return scores
    step = value.readers[0]
    if len(step.outputs) != 1 or not _is_alike(step.outputs[0], value):
        return scores
    x = probe(value.shape[-1])
    others = [y for y in step.inputs if y is not value]
    data = [y for y in others if np.size(y.constant) > 1 or y.constant is None]
    try:
        # A mask is read as 0 or not: one that scales what it adds is none.
        one, half, zero, low = (
            _evaluated(step, {value: x} | dict.fromkeys(data, np.full(x.shape, given)))
            for given in (1.0, 0.5, 0.0, 1e3 * _FEWEST)
        )
    except (NotRowwise, ValueError, IndexError):
        return scores
    if not data:
        factor = float(one[0, 0] / x[0, 0])
        if not factor or not np.allclose(one, factor * x, rtol=_TOLERANCE):
            return scores
        return _masked(_Scores(step.outputs[0], scale * factor))
    mask = _mask(data, [value, step.outputs[0]])
    if mask is None:
        return scores
    is_mask = np.all(zero < _FEWEST) and np.all([one == x, half == x])
    is_bias = np.all(low < _FEWEST) and np.all(zero == x) and _is_switch(mask.value)
    if not is_mask and not is_bias:
        return scores
    return _Scores(step.outputs[0], scale, mask._replace(is_bias=not is_mask))


def _is_switch(bias: Value) -> bool:
    """Returns True for a value that is 0 or far below, as a predicate says."""
    steps: list[Step] = []
    value = bias
    while value.aval.dtype != bool:
        maker = value.maker
        data = [x for x in maker.inputs if _constant(x) is None] if maker else []
        if maker is None or len(data) != 1:
            return False
        steps.append(maker)
        (value,) = data
    results = []
    for result in (np.asarray(True), np.asarray(False)):
        for step in reversed(steps):
            constants = map(_constant, step.inputs)
            values = [result if c is None else scalar(c) for c in constants]
            try:
                result = evaluate(step.eqn, values)
            except (NotRowwise, ValueError, IndexError):
                return False
        results.append(float(result))
    return max(results) == 0 and min(results) < _FEWEST


def _constant(value: Value) -> Any:
    """Returns the number that a value repeats, None if there is none."""
    constant = vector_of(value, 0).constant
    return constant if np.size(constant) == 1 else None


def _is_alike(x: Value, y: Value) -> bool:
    """Returns True if two values differ in dims of size 1 alone."""
    return x.shape[-1] == y.shape[-1] and without_ones(x.shape) == without_ones(y.shape)


def _mask(data: Sequence[Value], scores: Sequence[Value]) -> Mask | None:
    """Returns a single value as a mask, if it has the dims of one of the scores."""
    if len(data) != 1:
        return None
    own = data[0].shape
    shapes = [x.shape for x in scores] + [tuple(without_ones(scores[0].shape))]
    for shape in (x for x in shapes if len(x) == len(own)):
        if all(m in (1, n) for m, n in zip(own, shape, strict=True)):
            return Mask(data[0], shape)
    return None


def _evaluated(step: Step, known: dict[Value, ndarray]) -> ndarray:
    values = []
    for x in step.inputs:
        if x in known:
            values.append(known[x])
        elif x.constant is not None:
            values.append(scalar(x.constant))
        else:
            raise NotRowwise
    first, *_ = known.values()
    return np.broadcast_to(evaluate(step.eqn, values), first.shape)


def _softmax(scores: Value) -> tuple[Value, float] | None:
    """Returns the softmax of scores over their last dim, and a factor before it."""
    region = region_after(scores, len(scores.shape) - 1)
    x = region.results[scores]
    for end in reversed([*region.results]):
        y = region.results[end]
        is_candidate = end is not scores and _is_alike(end, scores)
        if not is_candidate or y.shape != x.shape or not np.all(y > 0):
            continue
        first, last = np.argmax(x[0]), np.argmin(x[0])
        factor = math.log(y[0, first] / y[0, last]) / (x[0, first] - x[0, last])
        z = np.exp(factor * (x - np.max(x, axis=-1, keepdims=True)))
        z = z / np.sum(z, axis=-1, keepdims=True)
        if np.allclose(y, z, rtol=_TOLERANCE) and is_closed(region.before[end], end):
            return end, factor
    return None


def _values(last: Step, shares: Value) -> tuple[Operand, Operand] | None:
    """Returns v and the result, if a product multiplies the shares by values."""
    if last.name != "dot_general" or last.inputs[0] is last.inputs[1]:
        return None
    own = last.inputs.index(shares)
    v, of_shares, of_v = last.inputs[1 - own], _dims(last, own), _dims(last, 1 - own)
    rows = len(without_ones(shares.shape)) - 2
    is_over_keys = of_shares.used == [rows + 1] and of_shares.free == [rows]
    if not is_over_keys or v.origin is not None or len(of_v.free) != 1:
        return None
    places = [of_shares.batch.index(i) for i in range(rows)]
    of_result = (rows, rows + 1) if own == 0 else (rows + 1, rows)
    result = Operand(last.outputs[0], (*places, *of_result))
    batch = [of_v.batch[i] for i in places]
    return Operand(v, (*batch, *of_v.used, *of_v.free)), result
