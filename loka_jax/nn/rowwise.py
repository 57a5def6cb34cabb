"""Equations that treat each row of a matrix alike, evaluated by numpy on a few rows.

So a norm or an activation is known by what it computes, whether it was called by name
or written out. Arrays are float64 of shape (probes, *trailing): the leading dims of a
value, those of rows, are one here. Rows may be reshaped and transposed if that moves
dims of size 1 alone.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from numpy import ndarray

from loka_jax import xla
from loka_jax.normed import ActivationName

# Importing SciPy for these would take longer than all that follows.
_erf, _erfc = (np.vectorize(f, otypes=[float]) for f in (math.erf, math.erfc))
_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")
ELEMENTWISE: dict[str, Callable[..., ndarray]] = {
    "abs": np.abs,
    "add": np.add,
    "add_any": np.add,
    "and": np.logical_and,
    "copy": np.asarray,
    "div": np.divide,
    "eq": np.equal,
    "erf": _erf,
    "erfc": _erfc,
    "exp": np.exp,
    "expm1": np.expm1,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "log": np.log,
    "log1p": np.log1p,
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.logical_not,
    "or": np.logical_or,
    "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sign": np.sign,
    "sqrt": np.sqrt,
    "square": np.square,
    "stop_gradient": np.asarray,
    "sub": np.subtract,
    "tanh": np.tanh,
}


class NotRowwise(Exception):
    """An equation mixes rows, or is none of those known here."""


def evaluate(eqn: Any, values: Sequence[ndarray]) -> ndarray:
    """Returns the result of an equation.

    Args:
        values: of its operands; of shape () for scalars.

    Raises:
        NotRowwise: if rows are mixed, or the equation is not known here.
    """
    name, params = eqn.primitive.name, eqn.params
    if len(eqn.outvars) != 1:
        raise NotRowwise
    if len({x.ndim for x in values if x.ndim}) > 1 and name not in _CALLS:
        raise NotRowwise  # a dim of rows lies where another is
    if name in ELEMENTWISE:
        return ELEMENTWISE[name](*values)
    out = eqn.outvars[0].aval
    match name:
        case "convert_element_type":
            if np.issubdtype(out.dtype, np.bool_):
                return values[0] != 0
            if not jnp.issubdtype(out.dtype, np.floating):
                raise NotRowwise
            return np.asarray(values[0], np.float64)
        case "reduce_precision":
            return values[0]
        case "integer_pow":
            return values[0] ** params["y"]
        case "select_n" if len(values) == 3:
            return np.where(values[0], values[2], values[1])
        case "clamp":
            return np.clip(values[1], values[0], values[2])
        case "reduce_sum" | "reduce_max" | "reduce_min":
            axes = _trailing([*map(int, params["axes"])], _leading(eqn, values[0]))
            reduce = {"m": np.max, "s": np.sum, "i": np.min}
            key = {"reduce_sum": "s", "reduce_max": "m", "reduce_min": "i"}[name]
            return reduce[key](values[0], axis=tuple(axes))
        case "broadcast_in_dim":
            return _broadcast(eqn, values[0])
        case "reshape" | "squeeze" | "expand_dims":
            return _reshape(eqn, values[0])
        case "transpose":
            return _transpose(eqn, values[0])
        case _ if name in _CALLS:
            return _call(eqn, values)
    raise NotRowwise


def _trailing(axes: Sequence[int], rows: int) -> list[int]:
    """Returns axes of the arrays here; none may be one of rows."""
    if any(axis < rows for axis in axes):
        raise NotRowwise
    return [1 + axis - rows for axis in axes]


def _leading(eqn: Any, x: ndarray) -> int:
    """Returns the number of leading dims of an equation's first operand."""
    return len(eqn.invars[0].aval.shape) - x.ndim + 1


def without_ones(shape: Sequence[int]) -> list[int]:
    """Returns a shape without its dims of size 1."""
    return [size for size in shape if size != 1]


def _broadcast(eqn: Any, x: ndarray) -> ndarray:
    if x.ndim == 0:
        return x
    after = eqn.outvars[0].aval.shape
    dims, lead = [*map(int, eqn.params["broadcast_dimensions"])], _leading(eqn, x)
    rows = dims[lead] if lead < len(dims) else max(dims, default=-1) + 1
    own = [1] * (len(after) - rows)
    for at, size in zip(_trailing(dims[lead:], rows), x.shape[1:], strict=True):
        own[at - 1] = size
    y = x.reshape(x.shape[0], *own)
    return np.broadcast_to(y, (x.shape[0], *after[rows:]))


def _reshape(eqn: Any, x: ndarray) -> ndarray:
    if x.ndim == 0:
        return x
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    first = without_ones(before[: _leading(eqn, x)])
    for rows in range(len(after) + 1):
        if without_ones(after[:rows]) == first:
            return x.reshape(x.shape[0], *after[rows:])
    raise NotRowwise


def _transpose(eqn: Any, x: ndarray) -> ndarray:
    shape, lead = eqn.invars[0].aval.shape, _leading(eqn, x)
    order = [int(i) for i in eqn.params["permutation"] if i >= lead or shape[i] != 1]
    if order != sorted(order):
        raise NotRowwise
    return x


def _call(eqn: Any, values: Sequence[ndarray]) -> ndarray:
    inner = [*jex.jaxprs_in_params(eqn.params)]
    if not inner:
        raise NotRowwise
    closed = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
    consts = getattr(closed, "consts", ())
    jaxpr = inner[0]
    if consts or len(jaxpr.invars) != len(values):
        raise NotRowwise
    return _run(jaxpr, values)


def _run(jaxpr: jex.Jaxpr, values: Sequence[ndarray]) -> ndarray:
    """Returns the first result of a program."""
    env = dict(zip(jaxpr.invars, values, strict=True))

    def read(atom: Any) -> ndarray:
        return scalar(atom.val) if isinstance(atom, jex.Literal) else env[atom]

    for step in jaxpr.eqns:
        result = evaluate(step, [read(atom) for atom in step.invars])
        env[step.outvars[0]] = result
    return read(jaxpr.outvars[0])


def scalar(value: Any) -> ndarray:
    """Returns a constant of one element.

    Raises:
        NotRowwise: if it has more.
    """
    if np.size(value) != 1:
        raise NotRowwise
    return np.asarray(value).reshape(()).astype(np.float64)


@functools.cache
def probe(n: int, seed: int = 0) -> ndarray:
    """Returns rows of n numbers, the last so small that it shows an epsilon."""
    drawn = np.random.default_rng(seed).standard_normal((3, n))
    return drawn * np.array([2.0, 2.0, 1e-3])[:, None] + [[0.3], [0.0], [0.0]]


@functools.cache
def activation(name: ActivationName, n: int, dtype: np.dtype) -> ndarray:
    """Returns what an activation makes of the probe of n numbers.

    Args:
        dtype: to which its constants are rounded, as in a program of that dtype.
    """
    return _run(_of_activation(name, dtype), [probe(n)])


@functools.cache
def _of_activation(name: ActivationName, dtype: np.dtype) -> jex.Jaxpr:
    x = jax.ShapeDtypeStruct((), dtype)
    return jax.make_jaxpr(xla.ACTIVATIONS[name])(x).jaxpr


def normalized(norm: str, x: ndarray, epsilon: float, block: int) -> ndarray:
    """Returns rows after a "layer", "rms" or "block" norm without its parameters."""
    if norm == "block":
        whole = x.reshape(x.shape[0], -1, min(block, x.shape[1]))
        scale = np.sqrt(np.mean(whole**2, axis=-1, keepdims=True) + epsilon)
        return (whole / scale).reshape(x.shape)
    if norm == "layer":
        x = x - np.mean(x, axis=-1, keepdims=True)
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon)
