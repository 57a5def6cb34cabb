"""Attention of padded rows [B, L, h, d], to which jagged rows are compared."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from loka_jax import nn
from loka_jax.jagged import Visibility


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


def in_place_of_jagged(batch: int, longest: int) -> Callable[..., Array]:
    """Returns `ops.softmax_attention` by padding rows, cuDNN, and dropping the padding.

    Without a GPU it is XLA's. Few queries of each sequence see its rows by dense
    products; else queries are rows, and each sees all rows of its sequence.

    Args:
        batch: the number of sequences.
        longest: the most rows of one.
    """
    own = "cudnn" if jax.default_backend() == "gpu" else "xla"
    length = -(-longest // 8) * 8
    place = jnp.arange(length, dtype=jnp.int32)[None]

    def attention(q, k, v, visible: Visibility, *, scale: float, plan: Any) -> Array:
        del plan
        first, last = visible.sees.first, visible.sees.last
        is_row = last > first
        row = jnp.arange(len(first), dtype=jnp.int32)
        is_few = len(q) != len(k)
        if is_few:
            each = len(q) // batch or len(q)  # a model is initialized by one sequence
            of = row // each
        else:  # the first row of each sequence
            number = jnp.cumsum(is_row & (first == row), dtype=jnp.int32) - 1
            of = jnp.where(is_row, number, batch)
        start, end = (
            jnp.zeros(batch, jnp.int32).at[of].set(x, mode="drop")
            for x in (first, last)
        )
        rows = start[:, None] + place
        rows = jnp.where(rows < end[:, None], rows, -1).reshape(-1)
        shape = batch, length
        k, v = (nn.distinct_rows(x, rows).reshape(*shape, *x.shape[1:]) for x in (k, v))
        if is_few:
            count = len(q) // each
            few = q.reshape(count, each, *q.shape[1:])
            few = _few(few, k[:count], v[:count], (end - start)[:count], scale)
            return few.reshape(len(q), *v.shape[2:])
        queries = nn.distinct_rows(q, rows).reshape(k.shape)
        lengths = dict.fromkeys(
            ("query_seq_lengths", "key_value_seq_lengths"), end - start
        )
        how: dict[str, Any] = dict(scale=scale, implementation=own, **lengths)
        seen = jax.nn.dot_product_attention(queries, k, v, **how)
        back = jnp.where(is_row, of * length + row - first, -1)
        return nn.distinct_rows(jax.lax.collapse(seen, 0, 2), back)

    return attention


def _few(q, k, v, lengths, scale: float) -> Array:
    """Returns the attention of few queries [B, n, h, d] of each sequence."""
    scores = scale * jnp.einsum("bnhd,bjhd->bhnj", q, k).astype(jnp.float32)
    place = jnp.arange(k.shape[1])[None, None, None]
    seen = place < lengths[:, None, None, None]
    shares = jax.nn.softmax(jnp.where(seen, scores, -1e30)).astype(v.dtype)
    return jnp.einsum("bhnj,bjhd->bnhd", shares, v)
