"""Softmax attention over jagged rows.

    out_i = sum over j of softmax_j(scale q_i . k_j) v_j

over the keys j that query i sees, see `jagged`. Queries and keys may be other rows.
XLA runs it, in blocks of rows that skip what none of them sees. Scores are not stored:
the backward pass computes them again, from the outputs and the logarithm of the sum of
the exponentials of each query.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from loka_jax.jagged import Visibility
from loka_jax.mapped import equally_varying
from loka_jax.xla import jagged_softmax as xla


def softmax_attention(
    q: Float[Array, "Q heads d_qk"],
    k: Float[Array, "C heads d_qk"],
    v: Float[Array, "C heads d_v"],
    visible: Visibility,
    *,
    scale: float,
) -> Float[Array, "Q heads d_v"]:
    """Returns the attention of each query, in the dtype of v; differentiable.

    Sums are float32; the shares and, in the backward pass, the gradient of the scores
    are rounded to the dtype of the rows. A query that sees no key gets zeros and has no
    gradient; rows that are not seen must be finite, as all rows of a block are
    multiplied.

    Args:
        visible: which of the keys each query sees.
        scale: factor of the scores, usually `d_qk ** -0.5`.

    Raises:
        ValueError: if shapes do not match.
    """
    queries, keys = len(visible.sees.first), len(visible.seen_by.first)
    shapes = (queries, *q.shape[1:]), (keys, *q.shape[1:]), (keys, q.shape[1])
    if q.ndim != 3 or shapes != (q.shape, k.shape, v.shape[:2]):
        raise ValueError(
            f"q {q.shape}, k {k.shape} and v {v.shape} must be [{queries}, heads, "
            f"d_qk], [{keys}, heads, d_qk] and [{keys}, heads, d_v]."
        )
    q, k, v, *leaves = equally_varying(q, k, v, *jax.tree.leaves(visible))
    visible = jax.tree.unflatten(jax.tree.structure(visible), leaves)
    return _attention(scale, q, k, v, visible)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(scale: float, q, k, v, visible: Visibility) -> Any:
    return xla.forward(q, k, v, visible, scale)[0]


def _attention_fwd(scale: float, q, k, v, visible):
    out, lse = xla.forward(q, k, v, visible, scale)
    return out, (q, k, v, visible, out, lse)


def _attention_bwd(scale: float, residuals, gradient):
    q, k, v, visible, out, lse = residuals
    delta = jnp.sum(gradient.astype(jnp.float32) * out.astype(jnp.float32), -1)
    grads = xla.backward(q, k, v, gradient, (lse, delta), visible, scale)
    # Integers have gradients of a type of their own.
    none = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), visible)
    return *grads, none


_attention.defvjp(_attention_fwd, _attention_bwd)
