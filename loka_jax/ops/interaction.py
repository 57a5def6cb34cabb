"""Features for the next layer: pairwise dot products of vectors, and concatenation.

Letters: B examples, F embeddings of an example, D their dimension, n vectors (the
embeddings, preceded by the bottom vector if there is one), p features.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax import checked
from loka_jax.mapped import by_kernel, equally_varying
from loka_jax.triton import Implementation, chosen, why_not_here
from loka_jax.triton import dot_features as _triton
from loka_jax.triton.dot_features import Pairs

# Features are padded to a multiple of 64 for the fused kernels, or of 16 for FP8 GEMMs
# if more than this share of them would be zeros.
_MIN_MULTIPLE, _MULTIPLE, _MAX_ZEROS = 16, 64, 1 / 8


def dot_features(
    bottom: Float[Array, "B D"] | None,
    embeddings: Float[Array, "B F D"],
    *,
    multiple: int | None = None,
    implementation: Implementation | None = None,
    pairs: Pairs = "i > j",
) -> Float[Array, "B p"]:
    """Returns `[bottom; <z_i, z_j> for i > j, row by row; zeros]`, z = [bottom; e].

    Differentiable. The gradient is `dz = S z` with `S_ij = S_ji = g_ij`, `S_ii = 0`, or
    `2 g_ii` of pairs with i = j; the bottom vector also gets that of the leading
    features. Sums are float32;
    products, `dz` and the bottom vector's gradient are each rounded to the operands'
    dtype.

    Args:
        bottom: output of the bottom MLP, in the dtype of the embeddings. If None, z is
            e alone and there are no leading features.
        multiple: the number of features is padded to a multiple of it, see `padded`.
        implementation: as in `embedding.sum_by_row`; Triton has one kernel each way.
        pairs: other pairs, row by row: "i >= j", "i < j" or "i <= j".

    Raises:
        ValueError: if the dtypes differ, or Triton is required and cannot run.

    References:
        DLRM, arXiv 1906.00091, section 2.1.3.
    """
    if bottom is not None:
        if bottom.dtype != embeddings.dtype:
            raise ValueError(f"{bottom.dtype=} and {embeddings.dtype=} differ.")
        bottom, embeddings = equally_varying(bottom, embeddings)
    batch, fields, dim = embeddings.shape
    n = fields + (bottom is not None)
    why_not = _triton.why_not(batch, n, dim, embeddings.dtype)
    provider = chosen(implementation, why_not, "dot_features")
    return _dot_features(bottom, embeddings, multiple, provider, pairs)


def why_not_by_kernel(vectors: tuple[int, ...], dtype: DTypeLike) -> str | None:
    """Returns why no kernel multiplies vectors [B, n, D] here, or None."""
    batch, n, dim = vectors
    reason = _triton.why_not(batch, n, dim, dtype) or why_not_here()
    return reason or checked.why_wrong("dot_features")


def padded(count: int, multiple: int | None = None) -> int:
    """Returns `count` rounded up to a multiple.

    Args:
        multiple: if None, 64 if at most an eighth of the result is zeros, else 16.
    """
    if multiple is None:
        size = padded(count, _MULTIPLE)
        is_full = size - count <= _MAX_ZEROS * size
        multiple = _MULTIPLE if is_full else _MIN_MULTIPLE
    return count + -count % multiple


def join_features(
    first: Float[Array, "B a"] | None,
    second: Float[Array, "B b"],
    multiple: int | None = None,
) -> Float[Array, "B p"]:
    """Returns `[first; second; zeros]`, of the size that `padded` returns."""
    start = 0 if first is None else first.shape[1]
    end = start + second.shape[1]
    rest = padded(end, multiple) - end
    joined = jnp.pad(second, ((0, 0), (start, rest)))
    if first is None:
        return joined
    # XLA fuses a select with its operands' producers; a concatenation would be a slower
    # kernel of its own.
    leading = jnp.pad(first, ((0, 0), (0, joined.shape[1] - start)))
    is_leading = np.arange(joined.shape[1]) < start
    return jnp.where(is_leading[None, :], leading, joined)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _dot_features(bottom, embeddings, multiple, implementation, pairs):
    if implementation == "xla":
        return _by_xla(bottom, embeddings, multiple, pairs)
    lead = 0 if bottom is None else bottom.shape[1]
    n = embeddings.shape[1] + (bottom is not None)
    width = padded(lead + _triton.count(n, pairs), multiple)
    run = functools.partial(_triton.dot_features, width=width, pairs=pairs)
    return by_kernel(run, bottom, embeddings)


def _dot_features_fwd(bottom, embeddings, multiple, implementation, pairs):
    out = _dot_features(bottom, embeddings, multiple, implementation, pairs)
    return out, (bottom, embeddings)


def _dot_features_bwd(multiple, implementation, pairs, operands, g):
    del multiple
    bottom, embeddings = operands
    if implementation == "triton":
        run = functools.partial(_triton.dot_features_backward, pairs=pairs)
        return by_kernel(run, bottom, embeddings, g)
    return _backward_by_xla(bottom, embeddings, g, pairs)


_dot_features.defvjp(_dot_features_fwd, _dot_features_bwd)


def _by_xla(bottom, embeddings, multiple, pairs: Pairs):
    z = _vectors(bottom, embeddings)
    batch, n, _ = z.shape
    gram = jnp.einsum("bnd,bmd->bnm", z, z, preferred_element_type=z.dtype)
    rows, cols = indices(n, pairs)
    products = gram.reshape(batch, n * n)[:, rows * n + cols]
    features = join_features(bottom, products, multiple)
    # Without it XLA may choose a column-major layout, to suit the gather of columns:
    # 166 us instead of 40 us for 65,536 x 368 on an H200.
    return with_layout_constraint(features, Layout(major_to_minor=(0, 1)))


def _backward_by_xla(bottom, embeddings, g, pairs: Pairs):
    z = _vectors(bottom, embeddings)
    batch, n, _ = z.shape
    lead = 0 if bottom is None else bottom.shape[1]
    if not _triton.count(n, pairs):  # nothing to gather
        return (None if bottom is None else g[:, :lead]), jnp.zeros_like(embeddings)
    # A gather, because the derivative of the forward pass's gather is a scatter, which
    # is slow in 16 bit on GPUs.
    pair_of, has_pair = _pair_index(n, pairs)
    zero = jnp.zeros((), g.dtype)
    symmetric = jnp.where(has_pair[None, :], g[:, lead + pair_of], zero)
    symmetric = symmetric.reshape(batch, n, n)
    if "=" in pairs:
        symmetric = jnp.where(np.eye(n, dtype=bool), 2 * symmetric, symmetric)
    dz = jnp.einsum("bnm,bmd->bnd", symmetric, z, preferred_element_type=z.dtype)
    if bottom is None:
        return None, dz
    return dz[:, 0] + g[:, :lead], dz[:, 1:]


def _vectors(bottom, embeddings) -> Float[Array, "B n D"]:
    """Returns the bottom vector and the embeddings in one array.

    XLA fuses a select with its operands' producers; a concatenation would be a kernel
    of its own: 130 us instead of 40 us for 65,536 x 27 x 16 on an H200.
    """
    if bottom is None:
        return embeddings
    later = jnp.pad(embeddings, ((0, 0), (1, 0), (0, 0)))
    is_first = np.arange(later.shape[1]) == 0
    return jnp.where(is_first[None, :, None], bottom[:, None, :], later)


@functools.cache
def _pair_index(n: int, pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
    """Returns each element's pair in a flat (n, n) matrix, and a mask of the pairs."""
    index = np.zeros((n, n), np.int32)
    rows, cols = indices(n, pairs)
    index[rows, cols] = index[cols, rows] = np.arange(len(rows))
    return index.ravel(), ("=" in pairs) | ~np.eye(n, dtype=bool).ravel()


def indices(n: int, pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
    """Returns i and j of each pair, row by row."""
    if "<" in pairs:
        return np.triu_indices(n, int("=" not in pairs))
    return np.tril_indices(n, int("=" in pairs) - 1)
