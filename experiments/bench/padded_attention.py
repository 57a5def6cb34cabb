"""Attention of padded rows [B, L, h, d], to which jagged rows are compared."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def softmax(lengths: np.ndarray | None) -> dict[str, Callable]:
    """Returns cuDNN's causal softmax attention, see `both`.

    Args:
        lengths: of the sequences; None if none has padding.
    """
    masks: dict[str, Any] = dict(is_causal=True, implementation="cudnn")
    if lengths is not None:
        own = jnp.asarray(lengths, jnp.int32)
        masks |= dict(query_seq_lengths=own, key_value_seq_lengths=own)
    return both(functools.partial(jax.nn.dot_product_attention, **masks))


def dense(size: int, max_length: int) -> dict[str, Callable]:
    """Returns HSTU's attention as dense products, see `both`.

    Rows of padding are the last of their sequence, which no other row sees.
    """

    def attention(q, k, v):
        scores = size**-0.5 * jnp.einsum("bihd,bjhd->bhij", q, k)
        seen = jnp.tri(q.shape[1], dtype=q.dtype)[None, None]
        weights = jax.nn.silu(scores) * seen / max_length
        return jnp.einsum("bhij,bjhd->bihd", weights, v)

    return both(attention)


def both(attention: Callable) -> dict[str, Callable]:
    """Returns an attention forward, and with its gradients."""

    def forward(q, k, v, gradient):
        del gradient
        return [attention(q, k, v)]

    def forward_and_backward(q, k, v, gradient):
        out, pull = jax.vjp(attention, q, k, v)
        return [out, *pull(gradient)]

    return {"forward": forward, "both": forward_and_backward}
