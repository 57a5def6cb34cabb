"""The kernel of attention over jagged rows against float64, with the race detector.

Errors are bounded by what is rounded to bfloat16: silu of the scores, the gradients of
the scores, and the results. Sums differ in their order, by far less.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from loka_jax import jagged
from loka_jax.fp8 import E4M3, saturate
from loka_jax.heads import Heads, Qkv
from loka_jax.jagged import BY_KEY, BY_QUERY, FORWARD, Rule
from loka_jax.measure import families, family_pallas
from loka_jax.ops import jagged_attention as ops
from loka_jax.ops.jagged_attention import AttentionPlan, jagged_attention
from loka_jax.ops.softmax_attention import SoftmaxPlan
from loka_jax.pallas import jagged_attention as kernel
from loka_jax.pallas import jagged_attention_launch
from loka_jax.pallas.jagged_attention import TuningConfig, attend, search_space
from tests.support import attention
from tests.support import pallas as support
from tests.support.attention import CASES, Case
from tests.support.pallas import interpret

__all__ = ["interpret"]

BF16 = jnp.bfloat16
HOW = dict(scale=0.3, max_length=50)


def both_ways(case, operands, interpret):
    """Returns the output and the gradients of q, k and v by the kernels."""
    plan = AttentionPlan(None, interpret)
    attend = functools.partial(
        jagged_attention, offsets=jnp.asarray(case.offsets), plan=plan, rule=case.rule
    )
    out, pull = jax.vjp(functools.partial(attend, **HOW), *operands[:3])
    found = out, *pull(operands[3])
    if interpret is not None:
        support.assert_no_races()
    return found


# Where `in_one_array`, rows that lie in one array are compared with them, too.
@pytest.mark.parametrize(
    "name, size, in_one_array",
    [
        ("causal", 128, True),
        ("nothing", 64, False),
        ("contextual", 64, False),
        ("candidates", 128, False),
        ("window", 256, True),
        ("all", 64, True),
        ("more than there are", 64, False),
        ("candidates", 48, True),
    ],
)
def test_output_and_gradients_are_those_of_the_equation(
    name, size, in_one_array, interpret
):
    case = CASES[name]
    operands = attention.operands_of(case.num_rows, 2, size, jnp.bfloat16)
    found = both_ways(case, operands, interpret)
    attention.assert_exact(found, case, operands, **HOW)
    if in_one_array:
        assert_the_same_in_one_array(found, case, operands, size, interpret)


def assert_the_same_in_one_array(found, case, operands, size, interpret):
    """Asserts the same results where U, V, Q and K are columns, as the gradients."""
    *operands, gradient = operands
    q, k, v = (x.reshape(len(x), -1) for x in operands)
    u, du = 2 * v, 3 * q
    uvqk = jnp.concatenate([u, v, q, k], axis=1)
    # What is said of other columns does not count.
    of_rows = jnp.full_like(uvqk, jnp.nan).at[:, : u.shape[1]].set(du)
    offsets, plan = jnp.asarray(case.offsets), AttentionPlan(None, interpret)

    @jax.jit
    def run(uvqk, of_rows, gradient):
        def attend(uvqk):
            qkv = Qkv((uvqk,), 2, size)
            return ops.attend(qkv, offsets, plan=plan, rule=case.rule, **HOW)

        (rows, out), pull = jax.vjp(attend, uvqk)
        return rows, out, *pull((of_rows[:, : rows.shape[1]], gradient))

    out, dq, dk, dv = found
    columns = [du, *(x.reshape(len(x), -1) for x in (dv, dq, dk))]
    found = run(uvqk, of_rows, gradient)
    expected = uvqk[:, : found[0].shape[1]], out, jnp.concatenate(columns, axis=1)
    for x, y in zip(found, expected, strict=True):
        assert jnp.array_equal(x, y)
    support.assert_no_races()


# Masks of all kinds, and spans of few and of many blocks.
@pytest.mark.parametrize(
    "name, size, config",
    [
        ("all", 64, None),
        ("causal", 64, TuningConfig(1, 64, 2, 2, 3, takes_turns=False)),
        ("one", 128, TuningConfig(2, 64, 1, 2, 2, overlaps=False)),
        ("candidates", 128, None),
        ("window", 256, None),
    ],
)
def test_the_forward_pass_in_fp8_is_that_of_the_equation(name, size, config, interpret):
    case = CASES[name]
    *operands, _ = attention.operands_of(case.num_rows, 2, size, jnp.bfloat16)
    q, k, v = (saturate(x, E4M3) for x in operands)
    offsets = jnp.asarray(case.offsets)
    visible = jagged.visibility(offsets, case.num_rows, case.rule)
    run = support.interpreted(attend, interpret)
    first, *streamed = map(Heads.of, (q, k, v))
    (out,) = run(FORWARD, (first,), tuple(streamed), visible, config=config, **HOW)
    attention.assert_exact_in_fp8(out, case, q, k, v, **HOW)


# Rings that go round, blocks larger than tiles and the reverse, no turns, and products
# that do not overlap.
@pytest.mark.parametrize(
    "config",
    [
        TuningConfig(1, 64, 1, 2, 2),
        TuningConfig(3, 128, 2, 3, 2, takes_turns=False),
        TuningConfig(2, 64, 1, 2, 2, overlaps=False),
    ],
)
def test_all_configs_are_right(config, interpret):
    case = Case((130, 0, 61), 65, (2, 0, 1), (3, 0, 9))
    operands = attention.operands_of(256, 1, 64, jnp.bfloat16)
    q, k, v, gradient = map(Heads.of, operands)
    visible = jagged.visibility(jnp.asarray(case.offsets), 256, case.rule)
    run = functools.partial(
        support.interpreted(attend, interpret), config=config, visible=visible, **HOW
    )
    found = [
        *run(FORWARD, (q,), (k, v)),
        *run(BY_QUERY, (q, gradient), (k, v)),
        *run(BY_KEY, (k, v), (q, gradient)),
    ]
    attention.assert_exact(found, case, operands, **HOW)


@pytest.fixture
def small_check(interpret, monkeypatch):
    """Returns the check of a family on one case, interpreted."""
    plan = AttentionPlan(None, interpret=interpret)
    monkeypatch.setattr(family_pallas, "_BY_KERNEL", plan)
    softmax = SoftmaxPlan(None, interpret=interpret)
    monkeypatch.setattr(family_pallas, "_SOFTMAX_BY_KERNEL", softmax)
    monkeypatch.setattr(family_pallas, "_EXAMPLES", 3)
    monkeypatch.setattr(family_pallas, "_LONGEST", 100)

    def why_wrong(name):
        family = families.FAMILIES[name]
        cases = family.cases()[:1]
        checked = family._replace(cases=lambda: cases)
        monkeypatch.setitem(families.FAMILIES, name, checked)
        how = dict(compiled=lambda kernel: kernel, workers=1)
        return families.why_wrong(name, **how)

    return why_wrong


@pytest.mark.parametrize(
    "name", ["jagged_attention", "jagged_attention_fp8", "jagged_softmax"]
)
def test_what_is_right_passes_the_check(name, small_check):
    assert small_check(name) is None


def test_keys_in_another_order_fail_the_check(small_check, monkeypatch):
    kernel._attend.clear_cache()
    monkeypatch.setattr(jagged_attention_launch, "interleave", lambda x: x)
    reason = small_check("jagged_attention_fp8")
    kernel._attend.clear_cache()
    assert reason is not None and "attention in FP8 of heads of 64" in reason


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize(
    "kind, dtype",
    [(FORWARD, BF16), (BY_QUERY, BF16), (BY_KEY, BF16), (FORWARD, E4M3)],
)
def test_the_ends_of_the_search_space_lower(size, kind, dtype):
    rows = Heads(jax.ShapeDtypeStruct((999, 8 * size), dtype), 2 * size, 4, size)
    counts = jax.ShapeDtypeStruct((8,), jnp.int32)
    offsets = jax.ShapeDtypeStruct((9,), jnp.int32)

    def run(config, fixed, streamed, offsets, *counts):
        visible = jagged.visibility(offsets, 999, Rule(*counts, 100, 7))
        return attend(kind, fixed, streamed, visible, config=config, **HOW)

    fixed = (rows,) * (1 + kind.has_slopes)
    default, *others = search_space(kind, size, dtype)
    for config in (default, *others[-1:]):
        traced = jax.jit(functools.partial(run, config)).trace(
            fixed, (rows, rows), offsets, counts, counts
        )
        lowered = traced.lower(lowering_platforms=("cuda",))
        assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_heads_of_32_on_a_gpu_are_those_of_the_equation(name):
    case = CASES[name]
    operands = attention.operands_of(case.num_rows, 2, 32, jnp.bfloat16)
    attention.assert_exact(both_ways(case, operands, None), case, operands, **HOW)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128, 256])
def test_a_thousand_launches_agree(size):
    case = Case((777, 0, 333, 1000), 3)
    operands = attention.operands_of(case.num_rows, 4, size, jnp.bfloat16)
    run = functools.partial(both_ways, case, interpret=None)
    support.assert_launches_repeat(lambda *x: run(x), *operands)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128, 256])
def test_a_thousand_launches_in_fp8_agree(size):
    case = Case((777, 0, 333, 1000), 3)
    *operands, _ = attention.operands_of(case.num_rows, 4, size, jnp.bfloat16)
    plan = AttentionPlan(None, why_not_fp8=None)

    def run(*x):
        offsets = jnp.asarray(case.offsets)
        return jagged_attention(*x, offsets, rule=case.rule, plan=plan, **HOW)

    support.assert_launches_repeat(run, *operands)
