"""Operands that show the mistakes of kernels in `families`, made on the host.

Rows of very different size, one of them zeros and the last by far the largest, in sizes
that fill no tile. Values are NumPy's, as whoever asks may be tracing a program.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from loka_jax import fp8, xla
from loka_jax.measure.check_families import NOISE, Case
from loka_jax.tails import Outer, Scale, Scaled

BF16 = np.dtype(ml_dtypes.bfloat16)
EXACT = 0.0  # noise of whole numbers, and of what is copied or cast once
SUMS = 2.0**-16  # of float32 in another order
SHAPE = (199, 333)


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Any:
    """Returns normal draws."""
    draw = np.random.default_rng([seed, *shape])
    return draw.standard_normal(shape, np.float32).astype(dtype)


def uneven(*shape: int, seed: int = 0, dtype: Any = BF16) -> Any:
    """Returns rows of 2^-6 to 2^6; the fourth is zero, the last by far the largest."""
    draw = np.random.default_rng([seed, 1])
    sizes = np.exp2(draw.integers(-6, 7, shape[:1])).astype(np.float32)
    sizes[3], sizes[-1] = 0.0, 2.0**9
    rows = normal(*shape, seed=seed)
    return (rows * sizes.reshape(-1, *[1] * (rows.ndim - 1))).astype(dtype)


def scale_in_vector(value: float = 2.0**-4) -> Scale:
    """Returns a scale in a vector whose other entries would make numbers NaN."""
    return Scale(jnp.array([np.nan, value, np.nan], jnp.float32), 1)


def product(seed: int) -> Scaled:
    """Returns a product of which two scales were not applied."""
    return Scaled(
        jnp.asarray(uneven(*SHAPE, seed=seed)),
        (scale_in_vector(0.25), scale_in_vector(4.0)),
        unit=0.5,
    )


def in_fp8(seed: int) -> Scaled:
    """Returns a padded matrix in E4M3."""
    x = fp8.pad(jnp.asarray(normal(*SHAPE, seed=seed, dtype=BF16)))
    x = fp8.quantize(x)
    return Scaled(x.data, (Scale.of(x.scale_inv),))


def outer(seed: int) -> Outer:
    """Returns a product of two vectors that is never written."""
    vectors = (normal(size, seed=seed + i) for i, size in enumerate(SHAPE))
    return Outer(*map(jnp.asarray, vectors))


def vector(seed: int) -> Any:
    """Returns a value for each column."""
    return normal(SHAPE[1], seed=seed)


def by_both(
    name: str,
    draw: Callable[[], tuple],
    run: Callable[..., Any],
    kernels: Any,
    noise: float = NOISE,
) -> Case:
    """Returns a case of functions that the kernels' module and `xla` both have."""
    ours, theirs = (functools.partial(run, provider) for provider in (kernels, xla))
    return Case(name, draw, ours, theirs, noise)
