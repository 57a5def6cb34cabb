"""Softmax attention, found in a program.

    P = softmax(c q k^T)    out = P v    of each head,  q [T, D], k [S, D], v [S, D]

A mask may lie between the scores and the softmax. Both are known by what they compute
on a few rows, see `rowwise`.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from loka_jax.nn.follow import is_closed, region_after
from loka_jax.nn.program import Step, Value
from loka_jax.nn.rowwise import NotRowwise, evaluate, probe, scalar

_FEWEST = -1e4  # what a mask leaves of a score is below this
_TOLERANCE = 1e-4


class Operand(NamedTuple):
    """A value and its dims: of examples and heads, then of rows, then of columns."""

    value: Value
    dims: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class FoundAttention:
    """Attention of all heads of all examples.

    Attributes:
        scale: the factor of q k^T.
        mask: not 0 where a query sees a key; its dims are those of the scores.
        steps: the equations from q, k and v to the result.
        result: with its dims.
    """

    q: Operand
    k: Operand
    v: Operand
    scale: float
    mask: Value | None
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


class _Scores(NamedTuple):
    """Scores after a factor and a mask."""

    value: Value
    scale: float = 1.0
    mask: Value | None = None


def found_attention(product: Step) -> FoundAttention | None:
    """Returns the attention whose scores a product makes, or None."""
    scores = product.outputs[0]
    (of_q, of_k), (batch_q, batch_k) = product.params["dimension_numbers"]
    is_plain = len(of_q) == 1 and len(scores.shape) == len(batch_q) + 2
    if not is_plain or not all(isinstance(n, int) and n for n in scores.shape):
        return None
    masked = _masked(_Scores(scores), len(batch_q) + 1)
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
    inputs = (v.value, masked.mask)
    is_before = any(
        x and x.maker and x.maker.before >> product.number & 1 for x in inputs
    )
    if is_before or not is_closed(steps, result.value):
        return None
    q, k = (
        Operand(x, (*batch, _free(x, batch, used), *used))
        for x, batch, used in zip(
            product.inputs, (batch_q, batch_k), (of_q, of_k), strict=True
        )
    )
    scale = masked.scale * factor
    return FoundAttention(q, k, v, scale, masked.mask, steps, result)


def _free(x: Value, batch, used) -> int:
    """Returns the dim of an operand that its product neither sums nor repeats."""
    return next(i for i in range(len(x.shape)) if i not in (*batch, *used))


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


def _masked(scores: _Scores, rows: int) -> _Scores:
    """Returns scores after the factor and the mask that alone read them.

    Args:
        rows: the number of their leading dims.
    """
    value, scale, mask = scores
    if len(value.readers) != 1 or value.stays or mask is not None:
        return scores
    step = value.readers[0]
    if len(step.outputs) != 1 or step.outputs[0].shape != value.shape:
        return scores
    x = probe(value.shape[-1])
    others = [y for y in step.inputs if y is not value]
    data = [y for y in others if np.size(y.constant) > 1 or y.constant is None]
    try:
        seen, unseen = (
            _evaluated(
                step, rows, {value: x} | dict.fromkeys(data, np.full(x.shape, on))
            )
            for on in (True, False)
        )
    except (NotRowwise, ValueError, IndexError):
        return scores
    if not data:
        factor = float(seen[0, 0] / x[0, 0])
        if not factor or not np.allclose(seen, factor * x, rtol=_TOLERANCE):
            return scores
        return _masked(_Scores(step.outputs[0], scale * factor), rows)
    is_mask = len(data) == 1 and len(data[0].shape) == len(value.shape)
    if not is_mask or np.any(unseen > _FEWEST) or not np.array_equal(seen, x):
        return scores
    return _Scores(step.outputs[0], scale, data[0])


def _evaluated(step: Step, rows: int, known: dict[Value, ndarray]) -> ndarray:
    values = []
    for x in step.inputs:
        if x in known:
            values.append(known[x])
        elif x.constant is not None:
            values.append(scalar(x.constant))
        else:
            raise NotRowwise
    return np.broadcast_to(
        evaluate(step.eqn, values, rows), next(iter(known.values())).shape
    )


def _softmax(scores: Value) -> tuple[Value, float] | None:
    """Returns the softmax of scores over their last dim, and a factor before it."""
    region = region_after(scores, len(scores.shape) - 1)
    x = region.results[scores]
    for end in reversed([*region.results]):
        y = region.results[end]
        if end is scores or end.shape != scores.shape or not np.all(y > 0):
            continue
        first, last = np.argmax(x[0]), np.argmin(x[0])
        if first == last:
            return None
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
    v = last.inputs[1 - own]
    contracted, batch = last.params["dimension_numbers"]
    rows = len(shares.shape) - 2
    is_over_keys = tuple(contracted[own]) == (rows + 1,)
    if not is_over_keys or sorted(batch[own]) != [*range(rows)]:
        return None
    if v.origin is not None or len(v.shape) != rows + 2:
        return None
    places = [[*batch[own]].index(i) for i in range(rows)]
    of_v = [batch[1 - own][i] for i in places]
    columns = _free(v, of_v, contracted[1 - own])
    of_result = (rows, rows + 1) if own == 0 else (rows + 1, rows)
    result = Operand(last.outputs[0], (*places, *of_result))
    return Operand(v, (*of_v, *contracted[1 - own], columns)), result
