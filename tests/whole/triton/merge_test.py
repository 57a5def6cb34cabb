"""Ascending lists merged by Triton's kernel: as by a stable sort, entry by entry."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.ops.embedding import BAD_ID
from loka_jax.triton import merge
from loka_jax.triton.merge import TuningConfig
from tests.support.triton import (
    compiled_programs,
    interpreted,
    on_gpu,
    spilled_bytes,
)

__all__ = ["interpreted", "on_gpu"]

SMALL = TuningConfig(tile=32)


@pytest.fixture(params=["interpreted", pytest.param("on_gpu", marks=pytest.mark.gpu)])
def anywhere(request):
    """Runs a test interpreted and on a GPU."""
    request.getfixturevalue(request.param)


def lists_of(case, count, capacity):
    """Returns ascending lists, most with unused entries at their ends."""
    draw = np.random.default_rng(0)
    numbers = draw.integers(0, 3 * capacity, (count, capacity))
    match case:
        case "equal lists":
            numbers[:] = numbers[0]
        case "one number":
            numbers[:] = 7
        case "unused":
            numbers[:] = BAD_ID
        case "one after the other":
            numbers += 3 * capacity * np.arange(count)[::-1, None]
        case "partly used":
            used = draw.integers(0, capacity + 1, count)
            numbers[np.arange(capacity) >= used[:, None]] = BAD_ID
    return np.sort(numbers, axis=1).astype(np.int32)


CASES = (
    "any",
    "equal lists",
    "one number",
    "unused",
    "one after the other",
    "partly used",
)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count, capacity", [(1, 40), (2, 1), (2, 64), (3, 50), (8, 7)])
def test_entries_are_those_of_a_stable_sort(case, count, capacity):
    lists = lists_of(case, count, capacity)
    entries, order = merge.merged(jnp.asarray(lists), config=SMALL)
    want = np.argsort(lists.ravel(), kind="stable")
    np.testing.assert_array_equal(order, want)
    np.testing.assert_array_equal(entries, lists.ravel()[want])


def test_operands_that_are_not_served_are_refused():
    assert merge.why_not(16, 160) is None
    for operands, reason in (((17, 170), "17 lists"), ((2, 0), "0 entries are none")):
        assert reason in (merge.why_not(*operands) or "")
    with pytest.raises(ValueError, match="17 lists are more than 16"):
        merge.merged(jnp.zeros((17, 10), jnp.int32))


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 8, 16])
def test_the_kernel_compiles_without_spills(count):
    lists = jax.ShapeDtypeStruct((count, 43336), jnp.int32)
    (program,) = compiled_programs(merge.merged, lists)
    assert spilled_bytes(program.ptxas_report()) == 0
