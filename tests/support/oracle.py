"""An independent account of what the products of each recipe should be.

Written in numpy and float64 from the recipes' descriptions, not from the library's
code: every operand comes contracting its last dim, is rounded as the recipe says, and
the product is exact.
"""

import ml_dtypes
import numpy as np

from tests.support import E4M3, cast_exactly, cast_tiles_exactly


def _rounded(dtype):
    return lambda x: x.astype(dtype).astype(np.float64)


def _whole(dtype):
    return lambda x: cast_exactly(x, dtype)


def _rows(x):
    return cast_exactly(x, E4M3, axes=1)


def _tiles(rows):
    return lambda x: cast_tiles_exactly(x, E4M3, (rows, 128))


_F32 = (_rounded(np.float32), _rounded(np.float32))
_BF16 = (_rounded(ml_dtypes.bfloat16), _rounded(ml_dtypes.bfloat16))
_TENSORWISE = {
    "fwd": (_whole(E4M3), _whole(E4M3)),
    "dlhs": (_whole(E4M3), _whole(E4M3)),
    "drhs": (_whole(E4M3), _whole(E4M3)),
}
# The roundings of the two operands of fwd (lhs, rhs), dlhs (g, rhs), drhs (lhs, g).
ROUNDINGS = {
    "f32": {"fwd": _F32, "dlhs": _F32, "drhs": _F32},
    "bf16": {"fwd": _BF16, "dlhs": _BF16, "drhs": _BF16},
    "fp8_tensorwise": _TENSORWISE,
    # Like the current scales in a first step, which is what the oracle describes.
    "fp8_tensorwise_delayed": _TENSORWISE,
    "fp8_tensorwise_delayed_bf16_drhs": _TENSORWISE | {"drhs": _BF16},
    "fp8_rowwise": {role: (_rows, _rows) for role in ("fwd", "dlhs", "drhs")},
    "fp8_rowwise_bf16_drhs": {
        "fwd": (_rows, _rows),
        "dlhs": (_rows, _whole(E4M3)),
        "drhs": _BF16,
    },
    # 1 x 128 for activations and gradients, 128 x 128 for the weight.
    "fp8_blockwise": {
        "fwd": (_tiles(1), _tiles(128)),
        "dlhs": (_tiles(1), _tiles(128)),
        "drhs": (_tiles(1), _tiles(1)),
    },
}


def products(name, lhs, rhs, g):
    """Returns out, dlhs and drhs in float64 for lhs (M, K), rhs (K, N), g (M, N)."""
    return tuple(a @ b.T for a, b in _rounded_operands(name, lhs, rhs, g))


def magnitudes(name, lhs, rhs, g):
    """Returns the products of the magnitudes, which bound errors of summation."""
    return tuple(
        np.abs(a) @ np.abs(b).T for a, b in _rounded_operands(name, lhs, rhs, g)
    )


def _rounded_operands(name, lhs, rhs, g):
    lhs, rhs, g = (np.asarray(x).astype(np.float64) for x in (lhs, rhs, g))
    operands = {"fwd": (lhs, rhs.T), "dlhs": (g, rhs), "drhs": (lhs.T, g.T)}
    for role, (first, second) in ROUNDINGS[name].items():
        yield first(operands[role][0]), second(operands[role][1])
