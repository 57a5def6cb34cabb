"""What the numerical tests share: SQNR floors, operands, references, error bounds.

The references are numpy and ml_dtypes in float64, independent of the library.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

E4M3 = ml_dtypes.float8_e4m3fn
E5M2 = ml_dtypes.float8_e5m2

# "Is FP8 good enough?" Least SQNR in dB against the float32 original, 2 dB under what
# normal data give: casts 31.6 (E4M3) and 25.6 (E5M2).
FLOOR_DB = {"cast_e4m3": 29.5, "cast_e5m2": 23.5}


def drills(values):
    """Returns parameters of a test that are cases of a drill."""
    return [pytest.param(x, marks=pytest.mark.drill) for x in values]


def jitted(function, **options):
    """Returns the compiled function, which rounds wherever the program says so.

    XLA may otherwise drop a cast to bfloat16 or FP8 that is followed by one back.
    """
    exactly = {"xla_allow_excess_precision": False}
    return jax.jit(function, compiler_options=exactly, **options)


def normal(*shape, seed=0, dtype=jnp.float32):
    """Returns standard normal values."""
    # By numpy, for jax.random and jnp.asarray would compile once for every shape.
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jax.device_put(values.astype(dtype))


def uneven_rows(rows, cols, *, decades=6, seed=0):
    """Returns normal rows whose sizes fall from 1 to 10**-decades."""
    sizes = np.logspace(0, -decades, rows, dtype=np.float32)[:, None]
    return jax.device_put(np.asarray(normal(rows, cols, seed=seed)) * sizes)


def sum_error(terms, magnitude):
    """Returns how far a float32 sum of products can be off, whatever its order.

    Args:
        terms: the number of products.
        magnitude: the sum of their absolute values.
    """
    # Each product meets at most `terms` roundings, each of half an ulp.
    roundings = terms * 2.0**-24
    return roundings / (1 - roundings) * magnitude


def assert_is_product(out, lhs, rhs, rounding=0.0):
    """Asserts that `out` is `lhs @ rhs.T`, summed in float32 in any order.

    `rounding` is the relative error that casting the sum to `out`'s dtype may add.
    """
    out, lhs, rhs = (np.asarray(x, np.float64) for x in (out, lhs, rhs))
    exact, magnitude = lhs @ rhs.T, np.abs(lhs) @ np.abs(rhs).T
    bound = (1 + rounding) * sum_error(lhs.shape[1], magnitude)
    np.testing.assert_array_less(
        np.abs(out - exact), rounding * np.abs(exact) + bound + 1e-30
    )


def sqnr_db(ref, x, axis=None):
    """Returns the SQNR in dB, over all or of each slice along `axis`."""
    ref, x = np.asarray(ref, np.float64), np.asarray(x, np.float64)
    with np.errstate(divide="ignore"):
        noise = np.sum((ref - x) ** 2, axis=axis)
        return 10 * np.log10(np.sum(ref**2, axis=axis) / noise)


def cast_exactly(x, dtype, axes=None, margin=0):
    """Returns what `x` becomes in FP8 under a power-of-two scale, in float64.

    The scale is the largest power of two that keeps amax * 2**margin in range; slices
    along `axes` share one.
    """
    x = np.asarray(x, np.float64)
    amax = np.max(np.abs(x), axis=axes, keepdims=True, initial=0)
    return cast_with_amax(x, amax, dtype, margin)


def cast_with_amax(x, amax, dtype, margin=0):
    """Returns what `x` becomes in FP8 under the power-of-two scale of `amax`."""
    limit = float(ml_dtypes.finfo(dtype).max)
    amax = np.maximum(np.asarray(amax, np.float64), 1e-30)
    scale = 2.0 ** np.floor(np.log2(limit / amax) - margin)
    scaled = np.clip(np.asarray(x, np.float64) * scale, -limit, limit)
    return scaled.astype(np.float32).astype(dtype).astype(np.float64) / scale


def cast_tiles_exactly(x, dtype, tile):
    """Returns what `x` becomes in FP8 with one power-of-two scale for every tile."""
    x = np.asarray(x, np.float64)
    out = np.empty_like(x)
    for i in range(0, x.shape[0], tile[0]):
        for j in range(0, x.shape[1], tile[1]):
            part = slice(i, i + tile[0]), slice(j, j + tile[1])
            out[part] = cast_exactly(x[part], dtype)
    return out
