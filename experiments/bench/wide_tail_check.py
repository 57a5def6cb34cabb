"""Compares results of tails with XLA's, both of programs that ran before.

XLA for GPUs drops a cast to FP8 that the same program casts back: results are compared
as arrays that left their program. Float32 operations in another order flip roundings:
a result may differ by one step of its format.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loka_jax.tails import Written

_FLOAT32_ERROR = 1e-4  # of the root mean square
# The quantization error of a format is 0.21 of its epsilon, in the L2 norm.
_SHARE_OF_EPSILON = 0.15
_LEAST_L2 = 2.0**-8


class _Error(NamedTuple):
    """How far a result is from the expected one.

    Attributes:
        worst: the largest difference, in steps of the format.
        l2: the relative error in the L2 norm; NaN if any element is.
        limit: of the latter.
    """

    worst: Any
    l2: Any
    limit: Any


def difference(outputs: Any, expected: Any) -> str:
    """Returns which results differ by how much; empty if none.

    Args:
        outputs: results of a tail.
        expected: XLA's.
    """
    errors = _errors(_comparable(outputs), _comparable(expected))
    leaves = jax.tree_util.tree_leaves_with_path(
        jax.device_get(errors), is_leaf=lambda x: isinstance(x, _Error)
    )
    return ", ".join(
        f"{jax.tree_util.keystr(path)} by {x.worst:.1f} steps, {x.l2:.1e} in L2"
        for path, x in leaves
        if not (x.worst <= 1 and x.l2 <= x.limit)
    )


@jax.jit
def _errors(outputs, expected):
    return jax.tree.map(_error, outputs, expected)


def _error(x, y) -> _Error:
    info = jnp.finfo(y.dtype)
    is_exact = y.dtype == jnp.float32
    step = 0.0 if is_exact else float(info.eps)
    least = 0.0 if is_exact else float(info.smallest_subnormal)
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    rms = jnp.sqrt(jnp.mean(y**2))
    error = jnp.abs(x - y)
    worst = jnp.max(error / (step * jnp.abs(y) + least + _FLOAT32_ERROR * rms + 1e-30))
    l2 = jnp.sqrt(jnp.mean(error**2)) / rms
    return _Error(worst, l2, jnp.asarray(_SHARE_OF_EPSILON * step + _LEAST_L2))


def _comparable(outputs: Any) -> Any:
    """Returns the results with one amax in place of those of parts."""

    def whole(x):
        if not isinstance(x, Written) or x.amaxes is None:
            return x
        return x._replace(amaxes=jnp.max(x.amaxes))

    return jax.tree.map(whole, outputs, is_leaf=lambda x: isinstance(x, Written))
