"""The gradient of a cross network's features by Triton, in one pass.

    dx0 = d_0 + sum over l of d_l * s_l    s_l = 1 + z_1 + bias_1 + ... + z_l + bias_l
    dw  = sum over rows of e * x0 * s_L    where a head w gives d_L = e w^T

It reads the products of both passes as they left cuBLASLt, adds the gradient of another
reader of x0, and writes each part of x0 its own gradient: nothing is split afterwards.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax.tails import CrossGradients, Forms, Outer, Scaled
from loka_jax.triton import tail
from loka_jax.triton.tail import Arguments, TuningConfig

MAX_LAYERS = 3
CONFIGS = (
    TuningConfig(64, 128, 8),
    TuningConfig(64, 128, 4),
    TuningConfig(32, 128, 4),
    TuningConfig(64, 64, 8),
    TuningConfig(64, 64, 4),
    TuningConfig(32, 64, 4),
    TuningConfig(32, 64, 2),
)
DEFAULT = TuningConfig(32, 128, 4)
NARROW_DEFAULT = TuningConfig(32, 64, 2)  # where the other's last tiles are not full


def cross_gradient(
    gradients: Sequence[Scaled | Outer],
    products: Sequence[Scaled],
    biases: Sequence[Float[Array, "n"] | None],
    other: Scaled | None = None,
    x0: Scaled | None = None,
    *,
    parts: Sequence[jax.ShapeDtypeStruct],
    shape: tuple[int, int],
    config: TuningConfig | None = None,
) -> CrossGradients:
    """Returns the gradient of each part of x0, and of a head, summed in float32.

    Deterministic.

    Args:
        gradients: d_0 and so on, of the features before each layer and after the last;
            the last one is an outer product if a head alone reads the features.
        products: z_1 and so on, of each layer, `MAX_LAYERS` at most.
        biases: float32, of each layer; None if absent.
        other: another summand, or None.
        x0: the features; None without a head.
        parts: the types of the arrays into which columns are split, one or two; columns
            past them are not written.
        shape: rows and columns of the features.
        config: the tuning config; None for the default.

    Raises:
        ValueError: if these operands are not served (see `tail.why_not`), or too many.
        ImportError: if jax-triton is not installed.
    """
    if not 1 <= len(products) <= MAX_LAYERS:
        raise ValueError(f"cross_gradient: {len(products)} layers of {MAX_LAYERS}.")
    given = [d for d in gradients if isinstance(d, Scaled)]
    outer = gradients[-1] if isinstance(gradients[-1], Outer) else None
    assert (outer is None) == (x0 is None)
    tail.check("cross_gradient", *shape, *given, *products, other, x0)
    operands = Arguments.of(shape, Forms(shape=shape))
    operands.add_summands("d", given, MAX_LAYERS + 1)
    operands.add_summands("z", products, MAX_LAYERS)
    operands.add_summand("r", other)
    operands.add_outer("outer", outer)
    operands.add_summand("x0", x0)
    zeros = jnp.zeros(shape[1:], jnp.float32)
    operands.arrays.append(jnp.stack([zeros if b is None else b for b in biases]))
    *before, last = (part.shape[1] for part in parts)
    start = sum(before)
    operands.constants.update(start=start, end=start + last)
    from loka_jax.triton import cross_gradient_kernel  # not above: it imports Triton

    m, n = shape
    config = config or (NARROW_DEFAULT if n % DEFAULT.block_n else DEFAULT)
    of_head = (config.tiles_m(m), n)
    types = [
        tail.optional_type(outer is not None, of_head, jnp.float32),
        *[tail.optional_type(False, (1,), jnp.float32)] * (2 - len(parts)),
        *parts,
    ]
    kernel = cross_gradient_kernel.cross_gradient_kernel
    sums, *dx0 = tail.run(kernel, operands, types, config)
    head = None if outer is None else jnp.sum(sums, axis=0)
    return CrossGradients(tuple(dx0[-len(parts) :]), head)
