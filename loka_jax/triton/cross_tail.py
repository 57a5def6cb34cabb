"""The tail of a cross layer by Triton, in one pass each way.

    forward   y = x0 * (z + bias) + x
    backward  g = d + r    u = g * x0    dx0 += g * (z + bias)    dbias = sum_rows u

z and d are products whose scales the kernel applies. y and u are also written in FP8,
as they are and transposed, so that the products that follow read them without a cast or
a transposition. Products, x0 and z may be bfloat16 or FP8: a pass is limited by memory
bandwidth alone, and takes as long as its bytes.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax.tails import CrossGradients, Forms, Scaled, Written
from loka_jax.triton import tail
from loka_jax.triton.tail import Arguments, TuningConfig

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
# The fastest on an H200 at 65,536 x 3,456.
DEFAULT = TuningConfig(64, 128, 4)
BACKWARD_DEFAULT = TuningConfig(64, 64, 4)

why_not = tail.why_not


def cross_tail(
    z: Scaled,
    x0: Scaled,
    x: Float[Array, "m n"],
    bias: Float[Array, "n"] | None = None,
    *,
    want: Forms,
    y_scale_inv: Float[Array, ""] | None = None,
    config: TuningConfig = DEFAULT,
) -> Written:
    """Returns `x0 * (z + bias) + x`, computed in float32.

    Args:
        z: the product.
        x0: features of the first layer.
        x: bfloat16 features of this layer.
        bias: float32; None if absent.
        want: the forms of the result.
        y_scale_inv: scale of the FP8 form.
        config: the tuning config.

    Raises:
        ValueError: if these operands are not served (see `why_not`).
        ImportError: if jax-triton is not installed.
    """
    m, n = x.shape
    tail.check("cross_tail", m, n, z, x0, x)
    operands = Arguments([], dict(m=m, n=n))
    operands.add_scaled("z", z)
    operands.add_scaled("x0", x0)
    operands.arrays.append(x)
    operands.add("bias", bias)
    operands.add_forms(want, y_scale_inv)
    from loka_jax.triton import cross_tail_kernel  # not above: it imports Triton

    types = tail.result_types(m, n, want, config)
    results = tail.run(cross_tail_kernel.cross_tail_kernel, operands, types, config)
    return tail.written(results, want, y_scale_inv)


def cross_tail_backward(
    d: Scaled,
    r: Float[Array, "m n"] | None,
    x0: Scaled,
    z: Scaled,
    bias: Float[Array, "n"] | None,
    dx0: Float[Array, "m n"] | None,
    *,
    want: Forms,
    u_scale_inv: Float[Array, ""] | None = None,
    keep_g: bool = True,
    config: TuningConfig = BACKWARD_DEFAULT,
) -> CrossGradients:
    """Returns the gradients of `cross_tail` where y has the gradient `g = d + r`.

    The gradient of x is g, or d if there is no r. Deterministic.

    Args:
        d: first summand of g.
        r: second summand, bfloat16, or None.
        x0, z, bias: of the forward pass.
        dx0: bfloat16, to which the gradient of x0 is added; zero if None.
        want: the forms of u.
        u_scale_inv: scale of the FP8 form.
        keep_g: return g if there is an r.
        config: the tuning config.

    Raises:
        ValueError: if these operands are not served (see `why_not`).
        ImportError: if jax-triton is not installed.
    """
    m, n = z.data.shape
    tail.check("cross_tail_backward", m, n, d, r, x0, z, dx0)
    operands = Arguments([], dict(m=m, n=n))
    operands.add_scaled("d", d)
    operands.add("r", r)
    operands.add_scaled("x0", x0)
    operands.add_scaled("z", z)
    operands.add("bias", bias)
    operands.add("dx0", dx0)
    operands.add_forms(want, u_scale_inv)
    has_g = keep_g and r is not None
    operands.constants["has_g"] = has_g
    from loka_jax.triton import cross_tail_kernel

    bf16 = jax.ShapeDtypeStruct((m, n), jnp.bfloat16)
    sums = config.tiles_m(m), n
    types = [
        *tail.result_types(m, n, want, config),
        bf16,
        tail.optional_type(has_g, (m, n), jnp.bfloat16),
        tail.optional_type(bias is not None, sums, jnp.float32),
    ]
    kernel = cross_tail_kernel.cross_tail_backward_kernel
    *u, dx0, g, dbias = tail.run(kernel, operands, types, config)
    return CrossGradients(
        u=tail.written(u, want, u_scale_inv),
        dx0=dx0,
        g=g if has_g else None,
        dbias=None if bias is None else jnp.sum(dbias, axis=0),
    )
