"""What follows a value in a program: a bias, a residual, a norm, an activation.

A norm or activation is a region of equations with one end. It is known by what it
computes on a few rows, see `rowwise`.
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator, Set
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from numpy import ndarray

from loka_jax.nn.program import CONSTANT, Step, Value
from loka_jax.nn.rowwise import (
    NotRowwise,
    activation,
    evaluate,
    normalized,
    probe,
    scalar,
    without_ones,
)
from loka_jax.normed import NORM_BLOCK, ActivationName, NormName

_MOST_STEPS = 40  # of a region: a LayerNorm by hand has 20
_ACTIVATIONS = [x for x in get_args(ActivationName) if x != "none"]
_VIEWS = ("broadcast_in_dim", "reshape", "squeeze", "convert_element_type", "copy")


def _is_close(x: ndarray, y: ndarray, tolerance: float = 1e-5) -> bool:
    return np.allclose(x, y, rtol=tolerance, atol=tolerance / 10)


Kind = Literal["bias", "residual", "factor", "norm", "activation", "dropout", "gate"]


_JOINS: dict[str, Kind] = {"add": "residual", "add_any": "residual", "mul": "factor"}


@dataclasses.dataclass(frozen=True, eq=False)
class Following:
    """What follows a value.

    Attributes:
        kind: what it is.
        steps: its equations.
        end: the value that it makes.
        name: of a norm or activation, that of a gate, too.
        epsilon: of a norm.
        rate: of dropout.
        vectors: the bias; gamma and beta of a norm, None where absent; the residual or
            factor; the key of dropout.
        half: of a gate: of the value's columns, those that are activated; the other
            half is the factor.
        is_alone: nothing else reads the value that it follows.
    """

    kind: Kind
    steps: frozenset[Step]
    end: Value
    name: str = "none"
    epsilon: float = 1e-6
    rate: float = 0.0
    vectors: tuple[Value | None, ...] = ()
    half: int | None = None
    is_alone: bool = True


@dataclasses.dataclass(eq=False)
class Region:
    """The steps after a value that treat each row alike.

    Attributes:
        start: the value.
        results: what they make of a few rows.
        before: the steps that each result depends on.
    """

    start: Value
    rows: int
    results: dict[Value, ndarray]
    before: dict[Value, frozenset[Step]]
    vectors: dict[Value, ndarray]
    literals: set[float]


def following(value: Value, rows: int) -> list[Following]:
    """Returns what may follow a value, the longest first.

    Args:
        rows: the number of its leading dims.
    """
    # Products, norms and groups ask for the same values again.
    if rows not in value.following:
        value.following[rows] = [*_following(value, rows)]
    return value.following[rows]


def _following(value: Value, rows: int) -> Iterator[Following]:
    region = region_after(value, rows)
    for end in reversed([*region.results]):
        if end is value or end.shape != value.shape:
            continue
        steps = region.before[end]
        if not is_closed(steps, end):
            continue
        is_alone = not value.stays and set(value.readers) <= steps
        if found := _known(region, end):
            yield dataclasses.replace(found, is_alone=is_alone)
    yield from _residuals(value)
    yield from _dropouts(value)
    yield from _gates(value, rows)


def is_closed(steps: Set[Step], end: Value) -> bool:
    """Returns True if nothing else reads a result of the steps but the last."""
    inner = (y for step in steps for y in step.outputs if y is not end)
    return all(not y.stays and set(y.readers) <= steps for y in inner)


def _residuals(value: Value) -> Iterator[Following]:
    """Yields data of the same shape that is added, or a factor."""
    for step in value.readers:
        kind = _JOINS.get(step.name)
        if kind is None:
            continue
        others = [x for x in step.inputs if x is not value]
        if len(others) != 1 or others[0].shape != value.shape:
            continue
        if others[0].origin is None:
            is_alone = not value.stays and value.readers == [step]
            yield Following(
                *(kind, frozenset([step]), step.outputs[0]),
                vectors=(others[0],),
                is_alone=is_alone,
            )


def _dropouts(value: Value) -> Iterator[Following]:
    """Yields the dropout of Flax: `where(bernoulli(key, keep), value / keep, 0)`."""
    for scale in value.readers:
        if scale.name != "div" or scale.inputs[0] is not value:
            continue
        keep = scale.inputs[1].constant
        for choose in scale.outputs[0].readers:
            if choose.name != "select_n" or choose.inputs[2] is not scale.outputs[0]:
                continue
            mask, other, _ = choose.inputs
            drawn = mask.maker
            is_zero = _is_zero(vector_of(other, 0))
            if not is_zero or drawn is None or drawn.params.get("name") != "_bernoulli":
                continue
            key, share = drawn.inputs
            steps = frozenset([scale, choose])
            is_same = _is_rounded(share.constant, keep)
            if not is_same or not is_closed(steps, choose.outputs[0]):
                continue
            yield Following(
                *("dropout", steps, choose.outputs[0]),
                rate=round(1 - float(share.constant), 6),
                vectors=(key,),
                is_alone=not value.stays and value.readers == [scale],
            )


def _is_rounded(share: Any, keep: Any) -> bool:
    """Returns True if `keep` is the constant `share` in its own dtype."""
    if share is None or keep is None:
        return False
    return bool(np.asarray(share).astype(np.asarray(keep).dtype) == keep)


def _gates(value: Value, rows: int) -> Iterator[Following]:
    """Yields the product of one half of the columns and a function of the other."""
    cut, halves = _halves(value)
    for half, own in enumerate(halves):
        other = halves[1 - half]
        plain = Following("activation", frozenset(), own)
        each = [x for x in following(own, rows) if x.kind == "activation"]
        for act in (*each, plain):
            for step in act.end.readers:
                (end,) = step.outputs[:1]
                steps = cut | act.steps | {step}
                is_product = step.name == "mul" and {*step.inputs} == {act.end, other}
                if is_product and is_closed(steps, end):
                    alone = not value.stays and {*value.readers} <= cut
                    yield Following(
                        *("gate", steps, end, act.name), half=half, is_alone=alone
                    )
                    return


def _halves(value: Value) -> tuple[frozenset[Step], list[Value]]:
    """Returns the two halves of a value's columns, and the steps that cut them."""
    cut = [x for x in value.readers if x.name in ("split", "slice")]
    halves = [y for step in cut for y in step.outputs]
    *rest, n = value.shape
    is_half = [y.shape == (*rest, n // 2) for y in halves]
    if n % 2 or is_half != [True, True]:
        return frozenset(), []
    if cut[0].name == "slice":
        starts = {x.params["start_indices"][-1]: x.outputs[0] for x in cut}
        if {*starts} != {0, n // 2} or any(x.params["strides"] for x in cut):
            return frozenset(), []
        halves = [starts[0], starts[n // 2]]
    return frozenset(cut), halves


def _is_zero(value: Value) -> bool:
    return np.size(value.constant) == 1 and bool(np.all(value.constant == 0))


def region_after(value: Value, rows: int) -> Region:
    """Returns the steps after a value that treat its rows alike.

    Args:
        rows: the number of its leading dims.
    """
    n = math.prod(value.shape[rows:])
    x = probe(n).reshape(-1, *value.shape[rows:])
    region = Region(value, rows, {value: x}, {value: frozenset()}, {}, set())
    queue = [(step.number, step) for step in value.readers]
    heapq.heapify(queue)
    seen: set[int] = set()
    while queue and len(region.results) < _MOST_STEPS:
        number, step = heapq.heappop(queue)
        if number in seen or len(step.outputs) != 1:
            continue
        seen.add(number)
        with np.errstate(all="ignore"):
            try:
                result = _evaluated(region, step)
            except (NotRowwise, ValueError):
                continue
        (end,) = step.outputs
        steps = [region.before[x] for x in step.inputs if x in region.before]
        region.before[end] = frozenset([step]).union(*steps)
        region.results[end] = result
        for reader in end.readers:
            heapq.heappush(queue, (reader.number, reader))
    return region


def _evaluated(region: Region, step: Step) -> ndarray:
    values = [
        region.results[x] if x in region.results else _side(region, x)
        for x in step.inputs
    ]
    result = evaluate(step.eqn, values)
    shape = step.outputs[0].shape
    rows = len(shape) - result.ndim + 1
    if without_ones(shape[:rows]) != without_ones(region.start.shape[: region.rows]):
        raise NotRowwise
    # Literals of calls, such as an epsilon in a norm under jit.
    for eqn_input in _literals(step.eqn):
        region.literals.add(eqn_input)
    return np.broadcast_to(result, (len(result), *shape[rows:]))


def _literals(eqn: Any) -> Iterator[float]:
    for x in eqn.invars:
        if hasattr(x, "val") and np.size(x.val) == 1:
            yield float(np.asarray(x.val).reshape(()).astype(np.float64))
    for name in ("jaxpr", "call_jaxpr"):
        inner = eqn.params.get(name)
        for one in getattr(getattr(inner, "jaxpr", inner), "eqns", ()):
            yield from _literals(one)


def _side(region: Region, value: Value) -> ndarray:
    """Returns a probe of a parameter that is the same for all rows, or a scalar."""
    if value.origin is None:
        raise NotRowwise
    trailing = value.shape[region.rows :]
    source = vector_of(value, math.prod(region.start.shape[region.rows :]))
    if source.constant is not None:
        return scalar(source.constant)
    if source.origin is None or source.origin.path is None:
        raise NotRowwise
    n = math.prod(region.start.shape[region.rows :])
    if math.prod(source.shape) != n or math.prod(trailing) != n:
        raise NotRowwise
    if source not in region.vectors:
        region.vectors[source] = probe(n, 1 + len(region.vectors))[:1]
    return region.vectors[source].reshape(1, *trailing)


def vector_of(value: Value, n: int) -> Value:
    """Returns the value of n elements, or one, that a value repeats for all rows."""
    while value.constant is None and value.maker is not None:
        maker = value.maker
        if maker.name not in _VIEWS:
            break
        (before,) = maker.inputs[:1]
        if before.origin == CONSTANT:
            value = before
            continue
        if math.prod(before.shape) != n:
            break
        if maker.name == "broadcast_in_dim":
            ends = maker.params["broadcast_dimensions"]
            last = len(value.shape) - 1
            if before.shape and (not ends or ends[-1] != last):
                break
        value = before
    return value


def _known(region: Region, end: Value) -> Following | None:
    x, y = region.results[region.start], region.results[end]
    x, y = x.reshape(len(x), -1), np.asarray(y, np.float64).reshape(len(y), -1)
    steps = region.before[end]
    dtype = region.start.aval.dtype
    if not np.all(np.isfinite(y)) or not jnp.issubdtype(dtype, jnp.floating):
        return None
    small = np.s_[:, :16]
    dtypes = dict.fromkeys((np.dtype(np.float32), dtype))
    for name, constants in itertools.product(_ACTIVATIONS, dtypes):
        z = activation(name, x.shape[1], constants)
        if _is_close(z[small], y[small]) and _is_close(z, y):
            return Following("activation", steps, end, name)
    used = [v for v in region.vectors if _reads(steps, v, region)]
    if len(steps) <= 2 and len(used) == 1:
        if _is_close(x + region.vectors[used[0]], y):
            return Following("bias", steps, end, vectors=(used[0],))
    return _known_norm(region, end, x, y, used)


def _reads(steps: frozenset[Step], vector: Value, region: Region) -> bool:
    n = math.prod(region.start.shape[region.rows :])
    return any(
        vector_of(x, n) is vector
        for step in steps
        for x in step.inputs
        if x.origin is not None
    )


def _known_norm(
    region: Region, end: Value, x: ndarray, y: ndarray, used: list[Value]
) -> Following | None:
    steps = region.before[end]
    has_root = any(s.name in ("rsqrt", "sqrt", "pow", "jit", "pjit") for s in steps)
    if not has_root or len(used) > 2:
        return None
    epsilons = sorted(e for e in region.literals if e > 0)
    names: list[NormName] = ["layer", "rms"]
    is_blocks = x.shape[1] % NORM_BLOCK == 0 or x.shape[1] < NORM_BLOCK
    if is_blocks and not used:
        names.append("block")
    pairs = [(None, None)]
    if used:
        pairs = [*itertools.permutations([*used, None], 2)]
        pairs = [pair for pair in pairs if set(used) <= set(pair)]
    for name, epsilon in itertools.product(names, [*epsilons, 0.0]):
        unit = normalized(name, x, epsilon, NORM_BLOCK)
        for gamma, beta in pairs:
            z = unit if gamma is None else unit * region.vectors[gamma]
            z = z if beta is None else z + region.vectors[beta]
            # The probes are large and small, as a variance in one pass cancels.
            if _is_close(z, y, 1e-4):
                vectors = gamma, beta
                return Following("norm", steps, end, name, epsilon, vectors=vectors)
    return None
