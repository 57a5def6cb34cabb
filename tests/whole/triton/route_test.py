"""Lists of distinct places by Triton's kernels: those of XLA's twin, entry by entry."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.ops import exchange
from loka_jax.triton import route
from loka_jax.triton.route import TuningConfig
from tests.support.triton import (
    compiled_programs,
    interpreted,
    on_gpu,
    spilled_bytes,
)

__all__ = ["interpreted", "on_gpu"]

PART = 300  # rows of an owner
# Several tiles a program, the last one not full; several programs, the last not full.
SMALL = TuningConfig(tile=32, blocks=4)


@pytest.fixture(params=["interpreted", pytest.param("on_gpu", marks=pytest.mark.gpu)])
def anywhere(request):
    """Runs a test interpreted and on a GPU."""
    request.getfixturevalue(request.param)


def places_of(case, owners, n=500):
    """Returns sorted places, and the former positions of the ids."""
    draw = np.random.default_rng(0)
    places = draw.integers(0, owners * PART, n)
    match case:
        case "one row":
            places[:] = owners * PART // 2
        case "one owner":
            places %= PART
            places += (owners - 1) * PART
        case "ignored":
            places[:] = owners * PART
        case "some ignored":
            places[::3] = owners * PART
        case "all distinct":
            places = draw.permutation(owners * PART)[:n]
    order = np.argsort(places, kind="stable")
    return jnp.asarray(places[order], jnp.uint32), jnp.asarray(order, jnp.int32)


CASES = ("any", "one row", "one owner", "ignored", "some ignored", "all distinct")


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("owners", [1, 3, 8])
@pytest.mark.parametrize("capacity", [24, 500])
def test_lists_are_those_of_xla(case, owners, capacity):
    places, positions = places_of(case, owners, min(500, owners * PART))
    how = dict(owners=owners, part=PART, capacity=capacity)
    ours = route.lists(places, positions, **how, config=SMALL)
    theirs = exchange._lists(places, positions, **how)
    for name, found, want in zip(ours._fields, ours, theirs, strict=True):
        np.testing.assert_array_equal(found, want, err_msg=name)
    distinct = np.unique(np.asarray(places)) // PART
    assert int(ours.need) == max(np.sum(distinct == owner) for owner in range(owners))


def test_operands_that_are_not_served_are_refused():
    assert route.why_not(10, 16) is None
    for operands, reason in (((0, 2), "0 ids are none"), ((10, 32), "32 owners")):
        assert reason in (route.why_not(*operands) or "")
    ids = jnp.zeros(4, jnp.uint32), jnp.zeros(4, jnp.int32)
    with pytest.raises(ValueError, match="32 owners are more than 16"):
        route.lists(*ids, owners=32, part=10, capacity=8)


@pytest.mark.slow
@pytest.mark.parametrize("owners", [2, 8, 16])
def test_kernels_compile_without_spills(owners):
    places = jax.ShapeDtypeStruct((1_703_936,), jnp.uint32)
    positions = jax.ShapeDtypeStruct(places.shape, jnp.int32)
    lists = functools.partial(route.lists, owners=owners, part=10**8, capacity=43336)
    programs = compiled_programs(lists, places, positions)
    assert len(programs) == 2
    for program in programs:
        assert spilled_bytes(program.ptxas_report()) == 0
