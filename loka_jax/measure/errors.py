"""The errors of a product against its reference, over many draws of the operands.

A single draw says little, since `mere` is a heavy-tailed mean. `intervals.interval`
returns the mean over draws with its interval.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from loka_jax import quality

PAIRS = 64  # draws; the paper takes 50 to 100
_MEDIAN_ELEMENTS = 1 << 15


class Errors(NamedTuple):
    """The errors of a product, of one draw or as arrays over draws.

    Attributes:
        mere: mean element-wise relative error, as the paper defines it.
        relative_l2: `||x - ref|| / ||ref||`.
        median: of the element-wise relative errors; of very many, an even sample.
        worst_row: the largest relative L2 of a row that is not all zero.
    """

    mere: Any
    relative_l2: Any
    median: Any
    worst_row: Any


def errors(ref: Float[Array, "m n"], x: Float[Array, "m n"]) -> Errors:
    """Returns the errors of a product."""
    ref, x = ref.astype(jnp.float32), x.astype(jnp.float32)
    counted = ref != 0
    relative = jnp.abs(x - ref) / jnp.where(counted, jnp.abs(ref), 1.0)
    worst_db = quality.worst_slice_sqnr(ref, x)
    return Errors(
        mere=quality.mere(ref, x),
        relative_l2=quality.relative_l2(ref, x),
        median=jnp.nanmedian(_sampled(jnp.where(counted, relative, jnp.nan))),
        worst_row=10 ** (-worst_db / 20),
    )


def _sampled(x: Float[Array, "m n"]) -> Float[Array, "e"]:
    # Sorting all elements would take longer than everything else. Steps without a
    # divisor in common with the columns sample all of them.
    step = max(1, x.size // _MEDIAN_ELEMENTS)
    while math.gcd(step, x.shape[1]) > 1:
        step += 1
    return x.ravel()[::step]


def measure(
    score: Callable[..., Any], draw: Callable[[Any], tuple], seeds: Iterable[Any]
) -> Any:
    """Returns the scores of all draws: the same tree, its leaves arrays over draws.

    Args:
        score: from operands to a tree of scalars, such as the `Errors` of a kernel.
        draw: returns operands from a seed.
        seeds: of the draws, usually keys.
    """
    draws = jax.device_get([score(*draw(seed)) for seed in seeds])
    return jax.tree.map(lambda *values: np.stack(values), *draws)
