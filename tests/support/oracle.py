"""An independent account of what products, norms and activations should be.

Written in numpy and float64 from the recipes' descriptions, not from the library's
code: every operand comes contracting its last dim, is rounded as the recipe says, and
the product is exact.
"""

import math

import jax
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


def _mx(x):
    """Returns what the MX specification (OCP, v1.0, 6.3) makes of an operand."""
    blocks = np.pad(x, ((0, 0), (0, -x.shape[1] % 32))).reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    scale = 2.0 ** (np.floor(np.log2(largest)) - 8)
    elements = np.clip(blocks / scale, -448, 448).astype(np.float32).astype(E4M3)
    return (elements.astype(np.float64) * scale).reshape(len(x), -1)[:, : x.shape[1]]


_BF16 = (_rounded(ml_dtypes.bfloat16),) * 2
_TENSORWISE = dict.fromkeys(("fwd", "dlhs", "drhs"), (_whole(E4M3),) * 2)
# The roundings of the two operands of fwd (lhs, rhs), dlhs (g, rhs), drhs (lhs, g).
ROUNDINGS = {
    "f32": dict.fromkeys(_TENSORWISE, (_rounded(np.float32),) * 2),
    "bf16": dict.fromkeys(_TENSORWISE, _BF16),
    "fp8_tensorwise": _TENSORWISE,
    # Like the current scales in a first step, which is what the oracle describes.
    "fp8_tensorwise_delayed": _TENSORWISE,
    "fp8_tensorwise_delayed_bf16_drhs": _TENSORWISE | {"drhs": _BF16},
    "fp8_rowwise": dict.fromkeys(_TENSORWISE, (_rows, _rows)),
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
    "mxfp8": dict.fromkeys(_TENSORWISE, (_mx, _mx)),
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


def in_float64(tree):
    """Returns arrays in float64."""
    return jax.tree.map(lambda x: np.asarray(x).astype(np.float64), tree)


def fp8(x, scale):
    """Returns values in E4M3 under a scale, saturated."""
    x = np.clip(np.asarray(x, np.float64) / scale, -448, 448).astype(np.float32)
    return x.astype(E4M3).astype(np.float64) * scale


def bf16(x, scale=1.0):
    """Returns multiples of a scale that are in bfloat16."""
    x = np.asarray(x, np.float64) / scale
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64) * scale


def activate(name, u):
    """Returns the activations of float64 values, and their slopes."""
    match name:
        case "none":
            return u, np.ones_like(u)
        case "relu":
            return np.maximum(u, 0), np.where(u > 0, 1.0, 0.0)
        case "swish":
            s = (1 + np.tanh(u / 2)) / 2
            return u * s, s + u * s * (1 - s)
        case "hard_swish":
            gate, inside = np.clip(u / 6 + 0.5, 0, 1), np.abs(u) < 3
            return u * gate, gate + u / 6 * inside
        case "gelu":
            c = math.sqrt(2 / math.pi)
            t = np.tanh(c * (u + 0.044715 * u**3))
            dt = (1 - t**2) * c * (1 + 3 * 0.044715 * u**2)
            return u * (1 + t) / 2, (1 + t) / 2 + u * dt / 2
        case "exact_gelu":
            share = (1 + np.vectorize(math.erf)(u / math.sqrt(2))) / 2
            return u * share, share + u * np.exp(-(u**2) / 2) / math.sqrt(2 * math.pi)
        case "tanh":
            return np.tanh(u), 1 - np.tanh(u) ** 2
        case "sigmoid":
            s = (1 + np.tanh(u / 2)) / 2
            return s, s * (1 - s)


def _mean(x, norm, block=256):
    """Returns the mean that belongs to every element."""
    size = block if norm == "block" else x.shape[-1]
    parts = np.split(x, range(size, x.shape[-1], size), axis=-1)
    means = [np.broadcast_to(p.mean(-1, keepdims=True), p.shape) for p in parts]
    return np.concatenate(means, axis=-1)


def normalized(z, norm, *, epsilon=1e-6, block=256):
    """Returns the normalized rows, and rstd for every element."""
    if norm == "none":
        return z, np.ones_like(z)
    z = z - _mean(z, norm) if norm == "layer" else z
    rate = 1 / np.sqrt(_mean(z**2, norm, block) + epsilon)
    return z * rate, rate


def norm_gradient(g, xhat, rate, norm):
    """Returns the gradient of a norm's argument."""
    if norm == "none":
        return g
    centred = g - _mean(g, norm) if norm == "layer" else g
    return rate * (centred - xhat * _mean(g * xhat, norm))


def affine(xhat, layer):
    """Returns `gamma xhat + beta`."""
    u = xhat if layer.gamma is None else xhat * layer.gamma
    return u if layer.beta is None else u + layer.beta


def product_gradient(dy, xhat, rate, vectors, norm, activation):
    """Returns the gradient of a product, and the terms of those of gamma and beta."""
    du = dy * activate(activation, affine(xhat, vectors))[1]
    dz = du if vectors.gamma is None else du * vectors.gamma
    return norm_gradient(dz, xhat, rate, norm), du * xhat, du


def fm_lcb(x, weight, k):
    """Returns FM and LCB, `X (X^T Y)` and `W_L^T X`."""
    return x @ (x.swapaxes(1, 2) @ weight[:, :k]), weight[:, k:].T @ x


def fm_lcb_gradients(x, weight, dfm, dlcb):
    """Returns the gradients of X by FM and LCB, and of the weight's two parts."""
    k = dfm.shape[2]
    s = dfm @ weight[:, :k].T
    s = s + s.swapaxes(1, 2)
    dweight = x @ x.swapaxes(1, 2) @ dfm, x @ dlcb.swapaxes(1, 2)
    return s @ x, weight[:, k:] @ dlcb, *(part.sum(0) for part in dweight)
