"""The tail of a cross layer by Triton, in one pass, the same one either way.

    forward   y = x0 * (z_1 + ... + z_p + bias)
    backward  u = x0 * (d_1 + ... + d_p)    dbias = sum over rows of u
    head      dots = y w                    d_1 = e w^T

The summands are products whose scales the kernel applies. The result is also written in
FP8, as it is and transposed, so that the products that follow read it without a cast or
a transposition. Products and x0 may be bfloat16 or FP8: a pass is limited by memory
bandwidth alone, and takes as long as its bytes. So y is not written where a head alone
reads it, nor the gradient that it gets from the head.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax.tails import CrossTail, Forms, Outer, Scale, Scaled
from loka_jax.triton import tail
from loka_jax.triton.tail import Arguments, TuningConfig

MAX_SUMMANDS = 3
# From large to small tiles.
CONFIGS = (
    TuningConfig(128, 128, 16),
    TuningConfig(128, 128, 8),
    TuningConfig(64, 128, 8),
    TuningConfig(64, 128, 4),
    TuningConfig(128, 64, 8),
    TuningConfig(64, 64, 4),
    TuningConfig(64, 256, 8),
)
DEFAULT = TuningConfig(64, 128, 4)
# With a sum over rows, or where the other's last tiles would not be full.
NARROW_DEFAULT = TuningConfig(64, 64, 4)

why_not = tail.why_not


def cross_tail(
    summands: Sequence[Scaled | Outer],
    x0: Scaled,
    bias: Float[Array, "n"] | None = None,
    head: Float[Array, "n"] | None = None,
    *,
    want: Forms,
    y_scale_inv: Scale | None = None,
    keep_s: bool = False,
    has_row_sum: bool = False,
    config: TuningConfig | None = None,
) -> CrossTail:
    """Returns `y = x0 * s`, s the sum of the summands and the bias, in float32.

    Deterministic.

    Args:
        summands: products, `MAX_SUMMANDS` at most, after an outer product or none.
        x0: features of the first layer.
        bias: float32; None if absent.
        head: float32 weights of which to return the dots, too; None if absent.
        want: the forms of y; none of them is allowed.
        y_scale_inv: scale of the FP8 form.
        keep_s: return s, too.
        has_row_sum: return the sum of y over its rows, too.
        config: the tuning config; None for the default.

    Raises:
        ValueError: if these operands are not served (see `why_not`), or too many.
        ImportError: if jax-triton is not installed.
    """
    products = [z for z in summands if isinstance(z, Scaled)]
    if not summands or len(products) > MAX_SUMMANDS:
        raise ValueError(f"cross_tail: {len(products)} summands of {MAX_SUMMANDS}.")
    first = summands[0] if isinstance(summands[0], Outer) else None
    m, n = want.shape_of(x0.data)
    is_narrow = has_row_sum or n % DEFAULT.block_n
    config = config or (NARROW_DEFAULT if is_narrow else DEFAULT)
    tail.check("cross_tail", m, n, *products, x0)
    operands = Arguments.of((m, n), want)
    operands.add_outer("outer", first)
    operands.add_summands("z", products, MAX_SUMMANDS)
    operands.add_scaled("x0", x0)
    operands.add("bias", bias)
    operands.add("head", head)
    operands.add_forms(want, y_scale_inv)
    operands.constants.update(has_s=keep_s, has_row_sum=has_row_sum)
    from loka_jax.triton import cross_tail_kernel  # not above: it imports Triton

    out_shape = operands.out_shape
    types = [
        *tail.result_types(out_shape, want, config),
        tail.optional_type(keep_s, out_shape, jnp.bfloat16),
        tail.optional_type(has_row_sum, (config.tiles_m(m), n), jnp.float32),
        tail.optional_type(head is not None, (config.tiles_n(n), m), jnp.float32),
    ]
    kernel = cross_tail_kernel.cross_tail_kernel
    *y, s, sums, dots = tail.run(kernel, operands, types, config)
    return CrossTail(
        y=tail.written(y, want, y_scale_inv),
        s=s if keep_s else None,
        row_sum=jnp.sum(sums, axis=0) if has_row_sum else None,
        dots=None if head is None else jnp.sum(dots, axis=0),
    )
