"""What is learned of a site from batches that say nothing."""

import chex
import jax
import jax.numpy as jnp
import pytest

from loka_jax.probe.site import ProbeConfig, empty_stats, merge, observe
from tests import support

CONFIG = ProbeConfig(decay=0.5)
K, N = 4, 3


@jax.jit
def _learn(stats, lhs, rhs, g):
    return merge(stats, observe(stats, lhs, rhs, g, (None,) * 3, CONFIG), CONFIG)


def _operands(m, seed=0):
    shapes = ((m, K), (K, N), (m, N))
    return [support.normal(*s, seed=seed + i) for i, s in enumerate(shapes)]


@pytest.mark.parametrize("operand", [0, 2], ids=["lhs", "g"])
@pytest.mark.parametrize(
    "rows",
    [
        lambda x: x[:0],
        lambda x: jnp.full_like(x, jnp.nan),
        lambda x: x.at[1, 2].set(jnp.inf),
        lambda x: x.at[1, 2].set(1e30),  # its fourth power is not finite
    ],
    ids=["no rows", "nan", "inf", "too large"],
)
def test_rows_that_say_nothing_change_nothing(rows, operand):
    stats = _learn(empty_stats(K, N, CONFIG), *_operands(20))
    operands = _operands(20, seed=9)
    operands[operand] = rows(operands[operand])
    if operands[operand].shape[0] == 0:
        operands[2 - operand] = rows(operands[2 - operand])
    after = _learn(stats, *operands)
    name = ("lhs", "rhs", "g")[operand]
    chex.assert_trees_all_equal(getattr(after, name), getattr(stats, name))
    assert after.rhs.normal.steps == 2
