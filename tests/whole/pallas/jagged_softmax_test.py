"""The kernel of softmax attention against float64, with the race detector.

Errors are bounded by what is rounded to bfloat16: the shares, the gradients of the
scores, and the results. Sums differ in their order, by far less.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import jagged, nn
from loka_jax.jagged import Rule
from loka_jax.nn.context import site_context
from loka_jax.ops.device import Device
from loka_jax.pallas import jagged_softmax as kernel
from loka_jax.pallas.jagged_attention import TuningConfig
from loka_jax.xla import jagged_softmax as xla
from tests.support import attention, normal
from tests.support import pallas as support
from tests.support.attention import CASES, Case, mask_of
from tests.support.pallas import interpret
from tests.support.softmax import SCALE, assert_exact
from tests.support.softmax import both_ways as both_ways_of

__all__ = ["interpret"]

BF16 = jnp.bfloat16


def operands_of(num_rows, size):
    """Returns q, k, v and g, of scores that a bound of bfloat16 says something of."""
    q, k, v, g = attention.operands_of(num_rows, 2, size, BF16)
    factor = 4 / size**0.5
    return *((factor * x).astype(BF16) for x in (q, k)), v, g


def both_ways(visible, operands, interpret, config=None):
    """Returns the output, lse, and the gradients of q, k and v by the kernels."""
    q, k, v, g = operands
    how: dict[str, Any] = dict(visible=visible, scale=SCALE, interpret=interpret)
    out, lse = kernel.forward(q, k, v, config=config, **how)
    delta = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), -1)
    grads = kernel.backward(q, k, v, g, (lse, delta), **how)
    if interpret is not None:
        jax.block_until_ready((lse, grads))
        support.assert_no_races()
    return out, lse, grads


def check(visible, mask, operands, interpret, config=None):
    """Asserts that results are right, and lse is XLA's."""
    out, lse, grads = both_ways(visible, operands, interpret, config)
    assert_exact((out, *grads), mask, *operands)
    q, k, v, _ = operands
    _, theirs = xla.forward(q, k, v, visible, SCALE)
    np.testing.assert_allclose(lse, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name, size",
    [
        ("causal", 64),
        ("nothing", 64),
        ("contextual", 64),
        ("candidates", 128),
        ("all", 256),
        ("more than there are", 64),
    ],
)
def test_output_and_gradients_are_those_of_the_equation(name, size, interpret):
    case = CASES[name]
    operands = operands_of(case.num_rows, size)
    visible = jagged.visibility(jnp.asarray(case.offsets), case.num_rows, case.rule)
    check(visible, mask_of(case), operands, interpret)


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
    operands = operands_of(256, 64)
    visible = jagged.visibility(jnp.asarray(case.offsets), 256, case.rule)
    check(visible, mask_of(case), operands, interpret, config)


def test_queries_may_be_other_rows_than_keys(interpret):
    """Newest rows of histories, tokens after all rows, and padding of both."""
    offsets, reach = np.array([0, 150, 150, 190], np.int32), np.array([1, 150, 190])
    of = np.array([0, 0, 2])
    histories = nn.Histories(*map(jnp.asarray, (offsets, of, reach)))
    rows, newest = histories.newest(200, 64)
    visible = nn.tokens_visibility(histories, (rows, newest), 200, 5)
    limits = jax.tree.map(lambda x: x[:, None], visible._replace(seen_by=()))
    mask = np.asarray(jagged.is_visible(limits, jnp.arange(215)[None]))
    assert mask.shape == (len(rows) + 15, 215)
    q, g, k, v = (
        normal(count, 2, 64, seed=seed).astype(BF16)
        for seed, count in enumerate((len(mask),) * 2 + (215,) * 2)
    )
    check(visible, mask, (q, k, v, g), interpret)


@pytest.mark.parametrize("size", [64, 20])
def test_the_operation_runs_by_kernels_where_they_serve_it(size, interpret):
    case = CASES["causal"]
    operands = operands_of(case.num_rows, size)
    function = functools.partial(
        nn.jagged_softmax_attention, offsets=jnp.asarray(case.offsets), scale=SCALE
    )
    with site_context(device=Device(interpret=interpret)):
        found = both_ways_of(function, *operands)
    support.assert_no_races()
    by_xla = both_ways_of(function, *operands)
    assert not all(map(jnp.array_equal, found, by_xla))
    assert_exact(found, mask_of(case), *operands)


def test_scores_of_any_size_have_a_softmax(interpret):
    offsets = jnp.array([0, 100], jnp.int32)
    q, k, v, _ = attention.operands_of(128, 1, 64, BF16)
    visible = jagged.visibility(offsets, 128, Rule())
    out, _ = kernel.forward(1e4 * q, 1e4 * k, v, visible, 1.0, interpret=interpret)
    scores = np.asarray(q[:, 0], np.float64) @ np.asarray(k[:, 0], np.float64).T
    largest = np.argmax(np.where(np.tril(np.ones((128, 128))), scores, -1e9), 1)[:100]
    np.testing.assert_array_equal(out[:100, 0], v[largest, 0])
    assert not np.any(out[100:])


@pytest.mark.parametrize("size", [64, 128, 256])
def test_both_passes_lower(size):
    queries, keys = 999, 1500
    q, k = (jax.ShapeDtypeStruct((n, 4, size), BF16) for n in (queries, keys))
    of_rows = jax.ShapeDtypeStruct((queries, 4), jnp.float32)
    limits = jax.ShapeDtypeStruct((queries,), jnp.int32)

    def run(q, k, v, g, of_rows, first, last):
        visible = nn.span_visibility(first, last, keys)
        config = kernel.search_space(jagged.FORWARD, size)[-1]
        out = kernel.forward(q, k, v, visible, SCALE, config=config)
        return out, kernel.backward(q, k, v, g, of_rows, visible, SCALE)

    traced = jax.jit(run).trace(q, k, k, q, (of_rows, of_rows), limits, limits)
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("@mosaic_gpu") == (4 if size == 256 else 3)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128, 256])
def test_a_thousand_launches_agree(size):
    case = Case((777, 0, 333, 1000), 3, (3, 1, 5, 2), (9, 1, 35, 4))
    operands = operands_of(case.num_rows, size)
    visible = jagged.visibility(jnp.asarray(case.offsets), case.num_rows, case.rule)
    run = functools.partial(both_ways, visible, interpret=None)
    support.assert_launches_repeat(lambda *x: run(x), *operands)
