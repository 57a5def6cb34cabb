"""Operands that show a kernel's mistakes, for `measure.checking`.

Each set is aimed at some kinds of mistakes:

ordinary   normal draws: what is missing, repeated, moved, scaled or stale. Delayed
           scales leave headroom, so that a scale that is dropped, squared or taken from
           this step's amax shows
uneven     rows from 2^-8 to 2^8 with constant, one-hot and zero rows among them, gamma
           far from 1 and beta from 0: scales of the wrong row, errors that large rows
           would hide, statistics over the wrong columns. Delayed scales are too small
           by 2 to 4, so that values must saturate
small      rows whose squares are about epsilon: a wrong or misplaced epsilon, a scale
           that is applied after it, values that flush to zero

Signs of gamma are mixed, no two rows or columns are alike, and no value is so near a
corner of the activation that rounding decides its slope (`settled` drops the gradient
there): what is right differs from the reference by rounding alone.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax import fp8
from loka_jax.fp8 import E4M3, Fp8Array
from loka_jax.normed import NormVectors
from loka_jax.site import SiteSpec


class Aim(NamedTuple):
    """What sets of operands differ in; numbers, so that one program draws them all.

    Attributes:
        low, high: base-2 logarithms of the least and largest size of a row.
        patterned: 1.0 for constant, one-hot and zero rows among the others, else 0.0.
        gamma: standard deviation of the logarithm of |gamma|.
        beta, bias: their standard deviations.
        headroom: delayed scales of lhs, rhs and the gradient of the product, over those
            that their amaxes give; powers of two.
    """

    low: float
    high: float
    patterned: float
    gamma: float
    beta: float
    bias: float
    headroom: tuple[float, float, float]


AIMS: dict[str, Aim] = {
    "ordinary": Aim(0, 0, 0, 0.5, 1.0, 0.5, (2.0, 4.0, 2.0)),
    "uneven": Aim(-8, 8, 1, 1.0, 3.0, 0.05, (0.25, 0.5, 0.25)),
    "small": Aim(-14, -8, 0, 0.5, 1.0, 2.0**-10, (8.0, 1.0, 2.0)),
}
_PATTERNS = 16  # of so many rows one is constant, one one-hot, one zero


class Trial(NamedTuple):
    """The operands and parameters of one run of a site.

    Attributes:
        lhs, g: rows and the gradient of the activations, in the compute dtype.
        lhs_fp8: lhs in FP8, if another site hands it on; else None.
        rhs: the weight, in float32.
        headroom: of delayed scales, as in `Aim`.
    """

    lhs: Float[Array, "m k"]
    lhs_fp8: Fp8Array | None
    rhs: Float[Array, "k n"]
    g: Float[Array, "m n"]
    vectors: NormVectors
    headroom: Float[Array, "3"]


def draw(spec: SiteSpec, dtype: DTypeLike, aim: Aim, seed) -> Trial:
    """Returns the operands of a site."""
    m, k, n = spec.m, spec.k, spec.n
    key_sizes, key_values = jax.random.split(jax.random.key(seed))
    exponents = jax.random.uniform(key_sizes, (m, 1), minval=aim.low, maxval=aim.high)
    sizes = jnp.exp2(exponents)
    shapes = [(m, k), (k, n), (m, n), (n,), (n,), (n,)]
    rows, rhs, g, bias, gamma, beta = _normal(key_values, shapes)
    rows = jnp.where(aim.patterned > 0, _with_patterns(rows), rows)
    lhs = (rows * sizes).astype(dtype)
    if spec.norm != "none":  # whose backward pass divides by the size
        is_zero = jnp.all(lhs == 0, axis=1, keepdims=True)
        g = g * jnp.where(is_zero, 2.0**-8, sizes)
    # Any sign, and a size apart from it.
    gamma = jnp.where(bias > 0, 1.0, -1.0) * jnp.exp(aim.gamma * gamma)
    return Trial(
        lhs=lhs,
        lhs_fp8=None if spec.fp8_in is None else _handed(lhs, spec),
        rhs=rhs / k**0.5,
        g=g.astype(dtype),
        vectors=NormVectors(
            aim.bias * bias if spec.use_bias else None,
            gamma if spec.has_affine else None,
            aim.beta * beta if spec.norm == "layer" else None,
        ),
        headroom=jnp.stack([jnp.float32(x) for x in aim.headroom]),
    )


def _normal(key, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Returns arrays of normal draws, which one call makes: it compiles for long."""
    sizes = [math.prod(shape) for shape in shapes]
    values = jax.random.normal(key, (sum(sizes),))
    parts = jnp.split(values, list(itertools.accumulate(sizes[:-1])))
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _with_patterns(rows: Float[Array, "m k"]) -> Float[Array, "m k"]:
    """Returns the rows with some constant, one-hot or zero."""
    m, k = rows.shape
    index = jnp.arange(m)[:, None]
    one_hot = jnp.where(jnp.arange(k)[None, :] == index % k, k**0.5, 0.0)
    place = index % _PATTERNS
    rows = jnp.where(place == 3, 1.0, rows)
    rows = jnp.where(place == 7, one_hot, rows)
    return jnp.where(place == 11, 0.0, rows)


def _handed(lhs: Float[Array, "m k"], spec: SiteSpec) -> Fp8Array:
    """Returns rows as another site hands them on, under scales twice the least."""
    axes = (1,) if spec.fp8_in == "rowwise" else None
    return fp8.cast(lhs, 2 * fp8.compute_scale_inv(fp8.amax(lhs, axes), E4M3), E4M3)
