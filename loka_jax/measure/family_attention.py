"""What attention over jagged rows is checked on: against float32 by XLA.

Examples of many lengths, none and one among them, with all that a mask has; more tiles
than two rounds of CTAs.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loka_jax.measure.check_families import BF16, Case, normal
from loka_jax.ops.jagged_attention import BY_XLA, AttentionPlan, jagged_attention

# silu of the scores and their gradients are rounded to bfloat16.
_NOISE = 2.0**-6
_EXAMPLES, _HEADS, _LONGEST, _SPARE = 60, 4, 333, 45


def _operands(size: int) -> tuple[Any, ...]:
    lengths = np.linspace(0, _LONGEST, _EXAMPLES).astype(np.int32)
    lengths[1::2] = lengths[1::2][::-1]
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int32)
    shape = (int(offsets[-1]) + _SPARE, _HEADS, size)
    rows = [normal(*shape, seed=i, dtype=BF16) for i in range(4)]
    counts = [np.arange(_EXAMPLES, dtype=np.int32) % n for n in (4, 6)]
    return *rows, offsets, *counts


def _both_ways(plan: AttentionPlan, operands, dtype) -> tuple[Any, ...]:
    """Returns the output and the gradients of q, k and v."""
    *rows, offsets, num_contextual, num_candidates = operands
    q, k, v, gradient = (x.astype(dtype) for x in rows)

    def attention(q, k, v):
        return jagged_attention(
            q,
            k,
            v,
            offsets,
            num_contextual=num_contextual,
            num_candidates=num_candidates,
            window=200,
            oldest=7,
            scale=q.shape[-1] ** -0.5,
            max_length=_LONGEST,
            plan=plan,
        )

    out, pull = jax.vjp(attention, q, k, v)
    return tuple(x.astype(BF16) for x in (out, *pull(gradient)))


def jagged_attentions() -> list[Case]:
    """Returns a case of each size of heads, forward and backward."""

    def case(size: int) -> Case:
        return Case(
            f"attention of heads of {size}",
            lambda: _operands(size),
            lambda *x: _both_ways(AttentionPlan(None), x, jnp.bfloat16),
            lambda *x: _both_ways(BY_XLA, x, jnp.float32),
            _NOISE,
        )

    return [case(size) for size in (64, 128, 256)]
