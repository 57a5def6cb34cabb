"""`jagged_attention` by XLA against a naive reference in float64."""

import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from loka_jax import fp8
from loka_jax.jagged import Rule
from loka_jax.ops.jagged_attention import BY_XLA, jagged_attention
from tests.support import attention
from tests.support.attention import CASES, Case

HOW = dict(scale=0.3, max_length=50)


def both_ways(case, operands, **how):
    """Returns the output and the gradients of q, k and v."""

    @jax.jit
    def run(q, k, v, gradient):
        f = functools.partial(
            jagged_attention, offsets=jnp.asarray(case.offsets), rule=case.rule, **how
        )
        out, pull = jax.vjp(f, q, k, v)
        return out, *pull(gradient)

    return run(*operands)


@pytest.mark.parametrize(
    "name, dtype", [*((name, jnp.float32) for name in CASES), ("all", jnp.bfloat16)]
)
def test_output_and_gradients_are_those_of_the_equation(name, dtype):
    case = CASES[name]
    operands = attention.operands_of(case.num_rows, 2, 8, dtype, value_size=4)
    found = both_ways(case, operands, **HOW)
    assert {x.dtype for x in found} == {jnp.dtype(dtype)}
    attention.assert_exact(found, case, operands, **HOW)


def test_blocks_that_none_sees_are_skipped_rightly():
    case = Case((700, 0, 301, 9), 30, (2, 1, 1, 1), (3, 0, 5, 1), 100, 3)
    operands = attention.operands_of(case.num_rows, 1, 4, jnp.float32)
    found = both_ways(case, operands, **HOW)
    attention.assert_exact(found, case, operands, **HOW)


def test_rows_beyond_the_last_sequence_have_no_part():
    case = CASES["causal"]
    *operands, gradient = attention.operands_of(case.num_rows, 2, 8, jnp.float32)
    operands = [x.at[-case.spare :].set(1e9) for x in (*operands, gradient)]
    for found in both_ways(case, operands, **HOW):
        assert not np.any(found[-case.spare :])
        assert np.max(np.abs(found)) < 1e3


def test_offsets_beyond_the_rows_are_cut():
    whole, cut = Case((60, 50, 20)), Case((60, 40, 0))
    operands = attention.operands_of(cut.num_rows, 1, 8, jnp.float32)
    results = [both_ways(case, operands, **HOW) for case in (whole, cut)]
    for x, y in zip(*results, strict=True):
        np.testing.assert_array_equal(x, y)


def test_two_runs_agree_bit_by_bit():
    case = CASES["all"]
    operands = attention.operands_of(case.num_rows, 2, 8, jnp.bfloat16)
    for x, y in zip(*(both_ways(case, operands, **HOW) for _ in range(2)), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_fp8_rounds_the_forward_pass_alone():
    case = CASES["all"]
    operands = attention.operands_of(case.num_rows, 2, 8, jnp.bfloat16)
    plans = BY_XLA, BY_XLA._replace(why_not_fp8=None)
    exact, rounded = (both_ways(case, operands, plan=plan, **HOW) for plan in plans)
    assert rounded[0].dtype == jnp.bfloat16
    q, k, v = (fp8.saturate(x, fp8.E4M3) for x in operands[:3])
    attention.assert_exact_in_fp8(rounded[0], case, q, k, v, **HOW)
    for x, y in zip(exact[1:], rounded[1:], strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(rule=Rule(window=0)), "window=0"),
        (dict(rule=Rule(oldest=3)), "oldest=3"),
        (dict(max_length=0), "max_length=0"),
        (dict(offsets=jnp.zeros(1, jnp.int32)), "offsets"),
        (dict(v=jnp.zeros((8, 1, 4))), "v"),
    ],
)
def test_faulty_arguments_are_named(changes, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # refuses first
    rows = jnp.zeros((8, 2, 4))
    arguments = dict(q=rows, k=rows, v=rows, offsets=jnp.array([0, 8])) | HOW
    with pytest.raises(ValueError, match=message):
        jagged_attention(**arguments | changes)
