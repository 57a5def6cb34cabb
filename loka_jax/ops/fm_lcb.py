"""Wukong's interactions of embeddings: compression, and factorization machine.

    P^T = W^T X          [k + l, d]    W = [Y | W_L], shared by all examples
    fm  = X P_k          [n, k]        P_k = X^T Y, of the first k rows of P^T
    lcb = W_L^T X        [l, d]        the last l rows of P^T

Letters: B examples, X the n embeddings of an example, of dimension d.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax.ops.kernels import equally_varying


def fm_lcb(
    x: Float[Array, "B n d"], weight: Float[Array, "n m"], *, k: int
) -> tuple[Float[Array, "B n k"], Float[Array, "B l d"]]:
    """Returns `X (X^T Y)` and `W_L^T X` of each example, from one product with X.

    Differentiable. Sums are float32; `P^T`, both results and the gradient of x are
    rounded to x's dtype, the gradient of the weight is in its own.

    Args:
        x: bfloat16 or float32.
        weight: `[Y | W_L]`, m = k + l, float32.
        k: the number of columns of Y.

    References:
        Wukong, arXiv 2403.02545, sections 3.4 and 3.5.
    """
    p = compress(x, weight)
    return _einsum("bnd,bkd->bnk", x, p[:, :k]), p[:, k:]


def compress(
    x: Float[Array, "B n d"], weight: Float[Array, "n m"]
) -> Float[Array, "B m d"]:
    """Returns `W^T X`: m linear combinations of the n embeddings of each example.

    The result and the gradient of x have x's dtype, the gradient of the weight its own.
    """
    return _compress(*equally_varying(x, weight))


def product(
    lhs: Float[Array, "B m k"], rhs: Float[Array, "B k n"]
) -> Float[Array, "B m n"]:
    """Returns `lhs @ rhs` of each example, summed in float32, in their dtype."""
    return _einsum("bmk,bkn->bmn", lhs, rhs)


@jax.custom_vjp
def _compress(x, weight):
    return _einsum("nm,bnd->bmd", weight.astype(x.dtype), x)


def _compress_fwd(x, weight):
    return _compress(x, weight), (x, weight)


def _compress_bwd(operands, g):
    x, weight = operands
    dx = _einsum("nm,bmd->bnd", weight.astype(x.dtype), g)
    # JAX would round it to x's dtype.
    return dx, _einsum("bnd,bmd->nm", x, g, weight.dtype)


_compress.defvjp(_compress_fwd, _compress_bwd)


def _einsum(
    subscripts: str, a: Array, b: Array, out_dtype: DTypeLike | None = None
) -> Array:
    """Returns an einsum, summed in float32; by default in a's dtype."""
    # GPUs would multiply float32 in TF32.
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dtype = out_dtype or a.dtype
    return jnp.einsum(
        subscripts, a, b, precision=precision, preferred_element_type=dtype
    )
