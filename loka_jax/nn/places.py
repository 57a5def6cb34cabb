"""Where the elements of a program's values come from, evaluated by numpy.

A reader of a value takes places, an array of integers for each dim, and returns the
elements there. Values that only move elements read those of their operands; so a few
elements of a large value cost no more than a few. Small arrays of indices, on which all
elements may depend, are computed at once.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np
from numpy import ndarray

from loka_jax.nn.program import Value
from loka_jax.nn.rowwise import ELEMENTWISE

type Places = Sequence[ndarray]
type Reader = Callable[[Places], ndarray]

_SMALL = 2**14  # elements of indices
_MOST_STEPS = 60  # one after the other


class NotRead(Exception):
    """A step is none of those known here."""


def reader(value: Value, known: Mapping[Value, Reader]) -> Reader:
    """Returns a reader of a value, by those of others.

    Raises:
        NotRead: here or when it reads, if the value depends on what is not known.
    """
    found = dict(known)

    def of(value: Value, depth: int) -> Reader:
        if value not in found:
            found[value] = made(value, depth)
        return found[value]

    def made(value: Value, depth: int) -> Reader:
        maker = value.maker
        if maker is None:
            return _whole(value.constant)
        if depth > _MOST_STEPS:
            raise NotRead
        operands = [of(x, depth + 1) for x in maker.inputs]
        return _of_equation(maker.eqn, operands, maker.outputs.index(value))

    return of(value, 0)


def _whole(x: Any) -> Reader:
    if x is None:
        raise NotRead
    array = np.asarray(x)
    array = array.astype(np.int64) if array.dtype.kind in "iu" else array
    return lambda at: array[tuple(at)]


def _of_equation(eqn: Any, operands: Sequence[Reader], number: int) -> Reader:
    """Returns a reader of a result of an equation."""
    inner = [*jex.jaxprs_in_params(eqn.params)]
    if inner and eqn.primitive.name != "scatter-add":
        return _of_call(inner[0], operands, number)
    out = eqn.outvars[number].aval
    shape = tuple(out.shape)
    read = functools.partial(_read, eqn, operands, number)
    if math.prod(shape) > _SMALL or np.issubdtype(out.dtype, np.inexact):
        return read
    whole = functools.cache(lambda: np.broadcast_to(read(_all(shape)), shape))
    return lambda at: whole()[tuple(at)]


def _of_call(jaxpr: jex.Jaxpr, operands: Sequence[Reader], number: int) -> Reader:
    if jaxpr.constvars or len(jaxpr.invars) != len(operands):
        raise NotRead
    env = dict(zip(jaxpr.invars, operands, strict=True))

    def of(atom: Any) -> Reader:
        return _whole(atom.val) if isinstance(atom, jex.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        inputs = [of(x) for x in eqn.invars]
        env |= {v: _of_equation(eqn, inputs, i) for i, v in enumerate(eqn.outvars)}
    return of(jaxpr.outvars[number])


def _all(shape: Sequence[int]) -> Places:
    """Returns all places of an array, as arrays of its shape."""
    return [*np.indices(shape)]


def _read(eqn: Any, operands: Sequence[Reader], number: int, at: Places) -> ndarray:
    """Returns elements of a result of an equation."""
    name, params = eqn.primitive.name, eqn.params
    shapes = [x.aval.shape for x in eqn.invars]
    match name:
        case "iota":
            return at[params["dimension"]]
        case "broadcast_in_dim":
            dims = params["broadcast_dimensions"]
            sizes = zip(dims, shapes[0], strict=True)
            return operands[0]([at[i] if size > 1 else 0 * at[i] for i, size in sizes])
        case "reshape" | "squeeze" | "expand_dims":
            flat = np.ravel_multi_index([*at], eqn.outvars[0].aval.shape) if at else 0
            return operands[0](np.unravel_index(flat, shapes[0]) if shapes[0] else ())
        case "transpose":
            order = params["permutation"]
            return operands[0]([at[order.index(i)] for i in range(len(order))])
        case "slice":
            steps = params["strides"] or [1] * len(at)
            moved = zip(params["start_indices"], at, steps, strict=True)
            return operands[0]([start + i * step for start, i, step in moved])
        case "tile":
            return operands[0]([i % n for i, n in zip(at, shapes[0], strict=True)])
        case "unstack":
            axis = params["axis"]
            return operands[0]([*at[:axis], number + 0 * at[0], *at[axis:]])
        case "concatenate":
            return _joined(operands, [x[params["dimension"]] for x in shapes], eqn, at)
        case "gather":
            return operands[0](_gathered(eqn, operands[1], shapes, at))
        case "cumsum" if math.prod(shapes[0]) <= _SMALL and not params["reverse"]:
            sums = np.cumsum(operands[0](_all(shapes[0])), params["axis"])
            return sums[tuple(at)]
        case "scatter-add" if len(shapes[0]) == 1 and shapes[1] == (*shapes[2], 1):
            x, indices, updates = (
                np.array(np.broadcast_to(read(_all(shape)), shape))
                for read, shape in zip(operands, shapes, strict=True)
            )
            is_inside = (indices[..., 0] >= 0) & (indices[..., 0] < len(x))
            np.add.at(x, indices[is_inside, 0], updates[is_inside])
            return x[tuple(at)]
    # Operands of an elementwise equation may have dims of size 1, or none.
    values = [
        read([i if size > 1 else 0 * i for i, size in zip(at, shape, strict=False)])
        for read, shape in zip(operands, shapes, strict=True)
    ]
    return _elementwise(eqn, values)


def _elementwise(eqn: Any, values: list[ndarray]) -> ndarray:
    name, dtype = eqn.primitive.name, eqn.outvars[0].aval.dtype
    match name:
        case "select_n":
            return np.choose(values[0], values[1:])
        case "clamp":
            return np.clip(values[1], values[0], values[2])
        case "rem":
            return np.fmod(*values)
        case "div" if np.issubdtype(dtype, np.integer):
            return np.trunc(np.divide(*values)).astype(np.int64)
        case "convert_element_type" if np.issubdtype(dtype, np.bool_):
            return values[0] != 0
        case "convert_element_type":
            is_cut = np.issubdtype(dtype, np.integer)
            return values[0].astype(np.int64) if is_cut else values[0]
        case _ if name in ELEMENTWISE:
            return np.asarray(ELEMENTWISE[name](*values))
    raise NotRead


def _joined(
    operands: Sequence[Reader], sizes: Sequence[int], eqn: Any, at: Places
) -> ndarray:
    """Returns elements of a concatenation."""
    axis = eqn.params["dimension"]
    out, start = np.zeros(at[axis].shape, np.int64), 0
    for read, size in zip(operands, sizes, strict=True):
        is_own = (at[axis] >= start) & (at[axis] < start + size)
        own = [i[is_own] for i in at]
        own[axis] = own[axis] - start
        out[is_own] = read(own)
        start += size
    return out


def _gathered(eqn: Any, indices: Reader, shapes: Sequence, at: Places) -> Places:
    """Returns where a gather finds elements of its operand.

    Raises:
        NotRead: if it finds some outside.
    """
    dims = eqn.params["dimension_numbers"]
    batch = [x for i, x in enumerate(at) if i not in dims.offset_dims]
    places = [0 * at[0] for _ in shapes[0]]
    removed = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
    kept = [i for i in range(len(shapes[0])) if i not in removed]
    for i, out in zip(kept, dims.offset_dims, strict=True):
        places[i] = places[i] + at[out]
    for i, out in zip(
        dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True
    ):
        places[i] = places[i] + batch[out]
    for number, i in enumerate(dims.start_index_map):
        places[i] = places[i] + indices([*batch, number + 0 * at[0]])
    for place, size in zip(places, shapes[0], strict=True):
        if np.any((place < 0) | (place >= size)):
            raise NotRead
    return places
