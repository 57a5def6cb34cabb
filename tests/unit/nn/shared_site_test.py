"""One state for several uses of a site: its next value is their maximum.

All ways of splitting a batch are in tests/whole; here are the most common ones.
"""

import functools

import chex
import jax
import numpy as np
import pytest

from loka_jax import scaling
from loka_jax.nn import OVERWRITE_WITH_GRADIENT
from tests.support.nn import scales_of, states, table_after
from tests.support.shared_site import (
    batch,
    calls,
    checkpointed_scan,
    loss,
    next_state,
    one_call,
    scan,
    vmap,
    vmap_with_a_named_axis,
)


def merged_by_hand(variables, x, factors):
    parts = zip(x, factors, strict=True)
    of_parts = [next_state(loss)(variables, *part) for part in parts]
    return functools.reduce(scaling.merge_delayed, of_parts)


SPLITS = {
    split.__name__: next_state(split)
    for split in (calls, vmap, vmap_with_a_named_axis, scan, checkpointed_scan)
} | {"merged_by_hand": merged_by_hand}


@pytest.fixture(scope="module")
def step():
    """Returns the next tables by each way, of variables and parts of a batch."""

    def run(*args):
        return {name: next_state(*args) for name, next_state in SPLITS.items()}

    compiled = jax.jit(run)
    return lambda *args: {
        name: scales_of(states({OVERWRITE_WITH_GRADIENT: state})[0])
        for name, state in compiled(*args).items()
    }


def test_parts_of_a_batch_share_a_state(step):
    variables, expected = one_call()
    kernel, table = np.abs(variables["params"]["kernel"]).max(), states(variables)[0]
    for i in range(3):
        x, factors = batch(i)
        amaxes = [np.abs(x).max(), kernel, np.abs(factors).max()]
        table = table_after(table, amaxes)
        scales = scales_of(table)
        np.testing.assert_array_equal(scales, expected[i])
        chex.assert_trees_all_equal(
            step(variables, x, factors), dict.fromkeys(SPLITS, scales)
        )
        state = jax.tree.map(lambda _: table, variables[OVERWRITE_WITH_GRADIENT])  # noqa: B023
        variables = variables | {OVERWRITE_WITH_GRADIENT: state}


def test_a_part_that_is_not_finite_leaves_the_state_to_the_others(step):
    variables, _ = one_call()
    x, factors = batch(0)
    factors[0, 0, 0] = np.nan
    found = step(variables, x, factors)
    amaxes = [np.abs(x).max(), np.abs(variables["params"]["kernel"]).max()]
    expected = table_after(states(variables)[0], [*amaxes, np.abs(factors[1:]).max()])
    for split in ("calls", "scan", "checkpointed_scan"):
        np.testing.assert_array_equal(found[split], scales_of(expected))
