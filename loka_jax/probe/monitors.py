"""Monitors of divergence: what each observed step says of a site, in a few numbers.

    kurtosis     of the input's and the output gradient's rows, the mean and the largest

                     mean(x^4) / mean(x^2)^2

                 3 if a row is Gaussian, its width if one element is all of it. (FOG,
                 arXiv 2505.20524: it rises before FP8 training diverges.)
    zeros        share of their elements that are zero in E4M3 alone
    saturated    share of their elements beyond what their scale covers
    out_rms      root mean square of the product, or of what an attention returns
    largest_logit
                 of an attention: the largest |score|, or a bound of it by the norms of
                 queries and keys, which takes no pass over scores

They are of up to 1,024 rows of a batch, and of 256 of the product, others at each step.
Statistics that forget slowly do not tell a change, so these are kept step by step, the
newest `OBSERVATIONS`. The host reads them: `read`.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from loka_jax import fp8
from loka_jax.fp8 import E4M3
from loka_jax.probe.operands import Operands, blocks, products_of_parts, some
from loka_jax.recipe import OPERANDS

OBSERVATIONS = 200
_ROWS = 1024
_OF_OPERAND = "kurtosis", "worst_kurtosis", "zeros", "saturated"
_OBSERVED = "lhs", "g"  # the weight has no rows of examples
FIELDS = (
    "uses",  # of the site in the step: their sums, until they are merged
    *(f"{operand}_{name}" for operand in _OBSERVED for name in _OF_OPERAND),
    *("out_rms", "largest_logit"),
)
# A share may be zero, and a kurtosis is not where something was seen.
_WITNESS = {f"{x}_{name}": f"{x}_kurtosis" for x in _OBSERVED for name in _OF_OPERAND}

# The newest steps, the newest last; zeros before the first, and where nothing was seen.
type Monitors = Float[Array, "steps fields"]


def empty_monitors() -> Monitors:
    """Returns the monitors before the first step."""
    return jnp.zeros((OBSERVATIONS, len(FIELDS)), jnp.float32)


def merge(a: Monitors, b: Monitors) -> Monitors:
    """Returns the steps of `a` and the newest of `b`, if it has one that is finite.

    Of several uses of a site in that step it is the mean.
    """
    uses = b[-1, 0]
    after = jnp.concatenate([a[1:], b[-1:] / jnp.maximum(uses, 1.0)])
    return jnp.where((uses > 0) & jnp.all(jnp.isfinite(b[-1])), after, a)


def of_product(
    operands: Operands, shift: Float[Array, ""], axis_names: tuple[str, ...] = ()
) -> Monitors:
    """Returns the monitors of one step of a product.

    Args:
        shift: the share of the way to the next row at which the rows begin.
        axis_names: mesh axes over which rows are spread.
    """
    told: dict[str, Array] = {}
    if operands.lhs.size == 0 or operands.g.size == 0:
        return empty_monitors()
    for operand in _OBSERVED:
        x, place = getattr(operands, operand), OPERANDS.index(operand)
        x = jax.lax.optimization_barrier(some(x, _ROWS, shift, axis=0))
        amax, stored = operands.amaxes[place], operands.scales[place]
        current = fp8.compute_scale_inv(amax, E4M3)
        scale_inv = jnp.where(stored > 0, stored, current)
        values = *_kurtosis(x, axis_names), *_lost(x, scale_inv, axis_names)
        names = (f"{operand}_{name}" for name in _OF_OPERAND)
        told |= zip(names, values, strict=True)
    first, second = blocks(operands, "fwd", shift)
    out = products_of_parts(first, second, 1)[0]
    return _of_a_step(told | {"out_rms": _rms(out, axis_names)})


def of_attention(
    out: Float[Array, "..."],
    largest_logit: Float[Array, ""],
    axis_names: tuple[str, ...] = (),
) -> Monitors:
    """Returns the monitors of one step of an attention; rows are spread over axes."""
    largest = fp8.amax_over_devices(largest_logit, axis_names)
    return _of_a_step({"out_rms": _rms(out, axis_names), "largest_logit": largest})


def bound_of_logits(
    q: Float[Array, "Q h d"], k: Float[Array, "C h d"], scale: float
) -> Float[Array, ""]:
    """Returns a bound of all |scale q . k|: max |q| max |k| of the worst head."""

    def longest(x: Float[Array, "C h d"]) -> Float[Array, "h"]:
        squares = jnp.sum(jnp.square(x.astype(jnp.float32)), axis=2)
        return jnp.sqrt(jnp.max(squares, axis=0))

    return abs(scale) * jnp.max(longest(q) * longest(k))


def read(monitors: np.ndarray) -> dict[str, float]:
    """Returns what is known of the newest step by name, and `growth`.

    It is the slope of log `out_rms` over the steps: 0.01 is one percent a step.
    """
    sizes = monitors[:, FIELDS.index("out_rms")]
    return named(monitors[-1].tolist(), float(growth_of(sizes)))


def named(newest: Sequence[float], growth: float) -> dict[str, float]:
    """Returns what is known of a step by name, and the growth if it is known."""
    numbers = dict(zip(FIELDS, newest, strict=True))
    del numbers["uses"]
    told = {
        name: value
        for name, value in numbers.items()
        if numbers.get(_WITNESS.get(name, name)) != 0
    }
    return told if math.isnan(growth) else told | {"growth": growth}


def growth_of(sizes: np.ndarray) -> np.ndarray:
    """Returns the slopes of the logarithm of sizes, one a step, by least squares.

    The steps are the last axis. Sizes that are zero or not finite are left out; NaN if
    fewer than two remain.
    """
    is_size = (sizes > 0) & (sizes < np.inf)
    logs = np.log(np.where(is_size, sizes, 1.0), dtype=np.float64)
    count = np.sum(is_size, axis=-1, keepdims=True)
    places = np.arange(sizes.shape[-1]) * is_size
    mean = np.sum(places, axis=-1, keepdims=True) / np.maximum(count, 1)
    distances = np.where(is_size, places - mean, 0.0)
    squares = np.sum(distances**2, axis=-1)
    squares = np.where(squares > 0, squares, np.nan)
    return np.asarray(np.sum(distances * logs, axis=-1) / squares)


def _of_a_step(told: dict[str, Array]) -> Monitors:
    told = {"uses": jnp.ones(())} | told
    newest = [jnp.asarray(told.get(name, 0.0), jnp.float32) for name in FIELDS]
    return empty_monitors().at[-1].set(jnp.stack(newest))


def _kurtosis(
    x: Float[Array, "m k"], axis_names: tuple[str, ...]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the mean and the largest kurtosis of the rows that are not zero."""
    x = x.astype(jnp.float32)
    amax = jnp.max(jnp.abs(x), axis=1)
    is_seen = amax != 0  # NaN is
    unit = jnp.where(is_seen, amax, 1.0)  # so that fourth powers do not underflow
    squares = jnp.square(x / unit[:, None])
    second, fourth = jnp.mean(squares, axis=1), jnp.mean(squares**2, axis=1)
    rows = fourth / jnp.where(is_seen, second**2, 1.0)
    sums = jnp.stack([jnp.sum(rows), jnp.sum(is_seen, dtype=jnp.float32)])
    total, count = jax.lax.psum(sums, axis_names)
    mean = total / jnp.maximum(count, 1.0)
    # A maximum may lose a NaN, a sum does not.
    return mean, jax.lax.pmax(jnp.max(rows), axis_names) + 0.0 * mean


def _lost(
    x: Float[Array, "m k"], scale_inv: Float[Array, ""], axis_names: tuple[str, ...]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the shares of elements that E4M3 makes zero, and that it clips."""
    x, info = jnp.abs(x.astype(jnp.float32)), jnp.finfo(E4M3)
    # Half of the smallest number is rounded to zero, as the even one of its neighbours.
    smallest = 0.5 * float(info.smallest_subnormal) * scale_inv
    is_lost = (x > 0) & (x <= smallest), x > fp8.fp8_max(E4M3) * scale_inv
    shares = [jnp.mean(each, dtype=jnp.float32) for each in is_lost]
    zeros, saturated = jax.lax.pmean(jnp.stack(shares), axis_names)
    return zeros, saturated


def _rms(x: Float[Array, "..."], axis_names: tuple[str, ...]) -> Float[Array, ""]:
    """Returns the root mean square of all elements on all devices."""
    x = x.astype(jnp.float32)
    amax = fp8.amax_over_devices(fp8.amax(x), axis_names)
    unit = jnp.where(amax > 0, amax, 1.0)  # so that squares do not underflow
    return unit * jnp.sqrt(jax.lax.pmean(jnp.mean(jnp.square(x / unit)), axis_names))
