"""A cross layer's wide product with its tail by Triton, in one kernel each way.

    forward   z = lhs rhs^T          y = x0 * (z + bias) + x
    backward  g = lhs rhs^T + r      u = g * x0    dx0 += g * (z + bias)

In a cross layer of low rank the product that gives z contracts the rank, and so does
the product that gives d, the gradient of the layer's input: at rank 512 they take as
long as reading and writing their results. Here neither is written: z goes to memory in
FP8 at most, for the backward pass.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax.fp8 import Fp8Array
from loka_jax.tails import CrossGradients, Forms, Scaled, Written
from loka_jax.triton import tail
from loka_jax.triton.tail import Arguments

_K_MULTIPLE = 16  # bytes of one asynchronous copy


@dataclasses.dataclass(frozen=True)
class TuningConfig(tail.TuningConfig):
    """The tunable parameters of a product with a tail.

    Attributes:
        block_k: columns of K that are multiplied at a time.
    """

    block_k: int = 128


CONFIGS = (
    TuningConfig(64, 128, 8, 3),
    TuningConfig(64, 128, 8, 2),
    TuningConfig(64, 128, 4, 3),
    TuningConfig(128, 64, 8, 3),
    TuningConfig(128, 64, 8, 2),
    TuningConfig(64, 64, 4, 3),
    TuningConfig(128, 128, 16, 3),
    TuningConfig(128, 128, 8, 3),
)
DEFAULT = CONFIGS[0]


def why_not(m: int, k: int, n: int, *operands: Scaled | Array | None) -> str | None:
    """Returns why an (m, k) x (k, n) product is not served, or None if it is.

    Args:
        m, k, n: of the product.
        operands: of its tail, as in `tail.why_not`.
    """
    if k <= 0 or k % _K_MULTIPLE:
        return f"k={k} is not a positive multiple of {_K_MULTIPLE}"
    return tail.why_not(m, n, *operands)


def cross_matmul(
    lhs: Fp8Array,
    rhs: Fp8Array,
    features: tuple[Scaled, Array],
    bias: Float[Array, "n"] | None = None,
    *,
    want: tuple[Forms, Forms],
    scale_inv: tuple[Array | None, Array | None] = (None, None),
    fast_accumulation: bool = True,
    config: TuningConfig = DEFAULT,
) -> tuple[Written, Written]:
    """Returns z, `lhs rhs^T`, and `x0 * (z + bias) + x`, in the requested forms.

    Args:
        lhs: (m, k), one scale.
        rhs: (n, k), one scale.
        features: x0, and x in bfloat16.
        bias: float32; None if absent.
        want: the forms of z and of the result.
        scale_inv: the scales of their FP8 forms.
        fast_accumulation: as in `fp8_matmul`.
        config: the tuning config.

    Raises:
        ValueError: if these operands are not served (see `why_not`).
        ImportError: if jax-triton is not installed.
    """
    x0, x = features
    (m, n), k = x.shape, lhs.data.shape[1]
    _check("cross_matmul", m, k, n, x0, x)
    operands = _product(lhs, rhs, n, fast_accumulation)
    operands.add_scaled("x0", x0)
    operands.arrays.append(x)
    operands.add("bias", bias)
    types = []
    for forms, scale, prefix in zip(want, scale_inv, ("z_", ""), strict=True):
        operands.add_forms(forms, scale, prefix)
        types += tail.result_types(m, n, forms, config)
    from loka_jax.triton import cross_matmul_kernel  # not above: it imports Triton

    kernel = cross_matmul_kernel.cross_matmul_kernel
    results = tail.run(kernel, operands, types, config)
    z = tail.written(results[:4], want[0], scale_inv[0])
    return z, tail.written(results[4:], want[1], scale_inv[1])


def cross_matmul_backward(
    lhs: Fp8Array,
    rhs: Fp8Array,
    gradients: tuple[Array, Array],
    operands: tuple[Scaled, Scaled, Array | None],
    *,
    want: Forms,
    u_scale_inv: Float[Array, ""] | None = None,
    keep_g: bool = True,
    fast_accumulation: bool = True,
    config: TuningConfig = DEFAULT,
) -> CrossGradients:
    """Returns the gradients of a cross tail where y has the gradient `lhs rhs^T + r`.

    Args:
        lhs: (m, k), one scale.
        rhs: (n, k), one scale.
        gradients: r, and the part of the gradient of x0 so far; both bfloat16.
        operands: x0, z and bias of the forward pass.
        want: the forms of u.
        u_scale_inv: scale of the FP8 form.
        keep_g: return g.
        fast_accumulation: as in `fp8_matmul`.
        config: the tuning config.

    Raises:
        ValueError: if these operands are not served (see `why_not`).
        ImportError: if jax-triton is not installed.
    """
    (r, dx0), (x0, z, bias) = gradients, operands
    (m, n), k = r.shape, lhs.data.shape[1]
    _check("cross_matmul_backward", m, k, n, r, x0, z, dx0)
    arguments = _product(lhs, rhs, n, fast_accumulation)
    arguments.constants["has_g"] = keep_g
    arguments.arrays.append(r)
    arguments.add_scaled("x0", x0)
    arguments.add_scaled("z", z)
    arguments.add("bias", bias)
    arguments.arrays.append(dx0)
    arguments.add_forms(want, u_scale_inv)
    from loka_jax.triton import cross_matmul_kernel

    bf16 = jax.ShapeDtypeStruct((m, n), jnp.bfloat16)
    sums = config.tiles_m(m), n
    types = [
        *tail.result_types(m, n, want, config),
        bf16,
        tail.optional_type(keep_g, (m, n), jnp.bfloat16),
        tail.optional_type(bias is not None, sums, jnp.float32),
    ]
    kernel = cross_matmul_kernel.cross_matmul_backward_kernel
    *u, dx0, g, dbias = tail.run(kernel, arguments, types, config)
    return CrossGradients(
        u=tail.written(u, want, u_scale_inv),
        dx0=dx0,
        g=g if keep_g else None,
        dbias=None if bias is None else jnp.sum(dbias, axis=0),
    )


def _product(
    lhs: Fp8Array, rhs: Fp8Array, n: int, fast_accumulation: bool
) -> Arguments:
    m, k = lhs.data.shape
    scales = lhs.scale_inv.reshape(1), rhs.scale_inv.reshape(1)
    arrays = [lhs.data, scales[0], rhs.data, scales[1]]
    constants = dict(m=m, n=n, k=k, fast_accumulation=fast_accumulation)
    return Arguments(arrays, constants)


def _check(name: str, m: int, k: int, n: int, *operands: Scaled | Array | None):
    """Raises an error if operands are not served, or Triton is not installed."""
    reason = why_not(m, k, n, *operands)
    if reason is not None:
        raise ValueError(f"{name}: {reason}.")
    tail.check(name, m, n, *operands)
