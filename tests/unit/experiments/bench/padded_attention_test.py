"""Padded attention that stands in for that of jagged rows, against XLA's of these."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench.padded_attention import in_place_of_jagged
from loka_jax import jagged, nn
from loka_jax.ops import softmax_attention as ops
from tests.support import normal

OFFSETS = jnp.array([0, 5, 5, 12, 13], jnp.int32)
ROWS = 16  # of which the last three are padding


@pytest.mark.parametrize("seeds", [None, 2])
def test_padding_changes_neither_outputs_nor_gradients(seeds):
    row = jnp.arange(ROWS, dtype=jnp.int32)
    of = jnp.repeat(jnp.arange(4), seeds) if seeds else jagged.sequence_of(OFFSETS, row)
    is_query = jnp.diff(OFFSETS)[of] > 0
    is_query = is_query if seeds else row < OFFSETS[-1]
    is_query = jnp.where(is_query, 1.0, 0.0)[:, None, None]
    visible = nn.span_visibility(OFFSETS[of], OFFSETS[of + 1], ROWS)
    q, k, v = normal(len(of), 2, 8), normal(ROWS, 2, 8, seed=1), normal(ROWS, 2, 8)
    gradient = normal(len(of), 2, 8, seed=2) * is_query

    def both(attention):
        def run(q, k, v):
            return attention(q, k, v, visible, scale=0.3, plan=ops.BY_XLA)

        out, pull = jax.vjp(run, q, k, v)
        return out * is_query, *pull(gradient)

    got = both(in_place_of_jagged(4, 9))
    for own, expected in zip(got, both(ops.softmax_attention), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-5)
