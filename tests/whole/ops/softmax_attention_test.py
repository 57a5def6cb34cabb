"""Softmax attention by XLA against a naive reference in float64."""

import functools

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from loka_jax import jagged, nn
from loka_jax.ops.softmax_attention import softmax_attention
from tests.support import attention, normal
from tests.support.attention import CASES, Case, mask_of
from tests.support.softmax import SCALE, assert_exact, both_ways


@pytest.mark.parametrize(
    "name, dtype", [*((name, jnp.float32) for name in CASES), ("all", jnp.bfloat16)]
)
def test_output_and_gradients_are_those_of_the_equation(name, dtype):
    case = CASES[name]
    operands = attention.operands_of(case.num_rows, 2, 8, dtype, value_size=4)
    function = functools.partial(
        nn.jagged_softmax_attention,
        offsets=jnp.asarray(case.offsets),
        rule=case.rule,
        scale=SCALE,
    )
    found = both_ways(function, *operands)
    assert {x.dtype for x in found} == {jnp.dtype(dtype)}
    assert_exact(found, mask_of(case), *operands)


def test_each_row_sees_all_of_its_sequence_by_the_full_rule():
    case = Case((70, 0, 3, 150), 9)
    offsets = jnp.asarray(case.offsets)
    operands = attention.operands_of(case.num_rows, 1, 8, jnp.float32)

    def function(q, k, v):
        rule = jagged.full(offsets)
        return nn.jagged_softmax_attention(q, k, v, offsets, rule=rule, scale=SCALE)

    sequence = np.repeat(np.arange(5), (*case.lengths, case.spare))
    mask = (sequence[:, None] == sequence) & (sequence < 4)
    assert_exact(both_ways(function, *operands), mask, *operands)


def test_scores_of_any_size_have_a_softmax():
    offsets = jnp.array([0, 40], jnp.int32)
    q, k, v, _ = attention.operands_of(40, 1, 8, jnp.float32)
    out = nn.jagged_softmax_attention(1e4 * q, 1e4 * k, v, offsets, scale=1.0)
    scores = np.where(np.tril(np.ones((40, 40))), np.asarray(q[:, 0] @ k[:, 0].T), -1e9)
    np.testing.assert_array_equal(out[:, 0], v[np.argmax(scores, 1), 0])


@pytest.mark.parametrize("most", [64, 128])  # of which blocks have no token
def test_the_newest_rows_and_tokens_see_what_is_said(most):
    """Queries: the newest rows of each sequence, and tokens with a reach of their own.

    Tokens in groups see the rows of a sequence up to a place, and those before them in
    their group.
    """
    offsets = np.array([0, 150, 150, 190], np.int32)
    counts, num_rows, size = np.array([20, 3, 60]), 192, 3
    of, reach = np.array([0, 0, 0, 2, 2]), np.array([1, 70, 150, 150, 190])
    mask, queries = np.zeros((most + 15, num_rows + 15), bool), []
    for start, end, count in zip(offsets[:-1], offsets[1:], counts, strict=True):
        queries += [*range(max(start, end - count), end)]
    for i, row in enumerate(queries):
        mask[i, offsets[:-1][offsets[:-1] <= row][-1] : row + 1] = True
    for token in range(15):
        group = token // size
        mask[most + token, offsets[of[group]] : reach[group]] = True
        mask[most + token, num_rows + group * size : num_rows + token + 1] = True
    q, g = normal(len(mask), 2, 8), normal(len(mask), 2, 4, seed=1)
    k, v = normal(mask.shape[1], 2, 8, seed=2), normal(mask.shape[1], 2, 4, seed=3)

    def function(q, k, v):
        rows, kept = jagged.newest(jnp.asarray(offsets), jnp.asarray(counts), most)
        of_rows = jagged.kept_visibility(jnp.asarray(offsets), rows, kept, num_rows)
        token = np.arange(15)
        group = token // size
        spans = (offsets[of][group], reach[group]), (group * size, token + 1)
        of_tokens, own = (
            jagged.span_visibility(jnp.asarray(first), jnp.asarray(last), count)
            for (first, last), count in zip(spans, (num_rows, 15), strict=True)
        )
        visible = jagged.with_tokens(of_rows, of_tokens, own)
        return softmax_attention(q, k, v, visible, scale=SCALE)

    assert_exact(both_ways(function, q, k, v, g), mask, q, k, v, g)


def test_shapes_that_do_not_match_are_named(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # refuses first
    rows = jnp.zeros((8, 2, 4))
    with pytest.raises(ValueError, match=r"v \(8, 1, 4\) must be \[8, heads"):
        nn.jagged_softmax_attention(
            rows, rows, rows[:, :1], jnp.array([0, 8]), scale=1.0
        )
