"""States that the caller merges, and those of devices, are those of one call."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

from loka_jax import scaling
from loka_jax.nn import OVERWRITE_WITH_GRADIENT
from tests import support
from tests.support.shared_site import (
    LAYER,
    PARTS,
    K,
    N,
    assert_as_in_one_call,
    batch,
    calls,
    loss,
    next_state,
    one_call,
)

# Other ways to a gradient, and gradients of parts, merged by the caller.


def of_a_vector(variables, x, factors):
    vector, restore = ravel_pytree(variables)
    gradient = jax.grad(lambda vector: calls(restore(vector), x, factors))(vector)
    return restore(gradient)[OVERWRITE_WITH_GRADIENT]


def accumulated_by_scan(variables, x, factors):
    def merge(state, part):
        state_of_part = next_state(loss)(variables, *part)
        return scaling.merge_delayed(state, state_of_part), None

    nothing = jax.tree.map(jnp.zeros_like, variables[OVERWRITE_WITH_GRADIENT])
    return lax.scan(merge, nothing, (x, factors))[0]


def accumulated_by_hand(variables, x, factors):
    parts = zip(x, factors, strict=True)
    states = [next_state(loss)(variables, *part) for part in parts]
    return functools.reduce(scaling.merge_delayed, states)


def of_one_example(variables, x, factors):
    states = jax.vmap(next_state(loss), (None, 0, 0))(variables, x, factors)
    return jax.tree.map(lambda leaf: leaf[1], states)


def pmap(variables, x, factors):
    part = functools.partial(loss, layer=LAYER.clone(axis_names=("parts",)))
    run = jax.pmap(next_state(part), axis_name="parts", in_axes=(None, 0, 0))
    return jax.tree.map(lambda leaf: leaf[2], run(variables, x, factors))


@pytest.mark.parametrize(
    "accumulate",
    support.slow_except(
        [
            of_a_vector,
            accumulated_by_scan,
            accumulated_by_hand,
            of_one_example,
            pmap,
        ],
        accumulated_by_hand,
    ),
)
def test_gradients_of_parts_merge_to_that_of_the_batch(accumulate):
    assert_as_in_one_call(accumulate)


# Devices.


def over_devices(function, **options):
    """Returns a function of variables, rows and factors that runs a part a device."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((PARTS,), ("data",), auto)
    specs = (P(), P("data"), P("data"))
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P(), **options)


@pytest.fixture
def four_devices():
    if jax.device_count() < PARTS:
        pytest.skip(f"needs {PARTS} devices")


@pytest.mark.slow
@pytest.mark.parametrize("axis_names", [(), ("data",)])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("parts_of_part", [1, 2])
def test_devices_that_differentiate_share_a_state(
    four_devices, axis_names, check_vma, parts_of_part
):
    part = functools.partial(loss, layer=LAYER.clone(axis_names=axis_names))

    def run(variables, x, factors):
        x = x.reshape(parts_of_part, -1, K)
        factors = factors.reshape(parts_of_part, -1, N)

        def total(variables):
            sum_of_parts = calls(variables, x, factors, part)
            return lax.psum(sum_of_parts, "data") if check_vma else sum_of_parts

        return next_state(total)(variables)

    assert_as_in_one_call(over_devices(run, check_vma=check_vma))


@pytest.mark.slow
@pytest.mark.parametrize("axis_names", [(), ("data",)])
def test_devices_in_a_differentiated_function_share_a_state(four_devices, axis_names):
    part = functools.partial(loss, layer=LAYER.clone(axis_names=axis_names))

    def run(variables, x, factors):
        zero = lax.pcast(jnp.zeros(()), "data", to="varying")

        def add(total, half):
            return total + part(variables, *half), None

        halves = x.reshape(2, -1, K), factors.reshape(2, -1, N)
        return lax.psum(lax.scan(add, zero, halves)[0], "data")

    assert_as_in_one_call(next_state(over_devices(run)))


def test_a_sum_over_devices_that_cannot_be_mended_is_refused(four_devices):
    def run(variables, x, factors):
        return lax.psum(loss(variables, x[0], factors[0]), "data")

    variables, _ = one_call()
    split = over_devices(run, check_vma=False)
    with pytest.raises(ValueError, match="differentiate inside of the shard_map"):
        jax.jit(next_state(split))(variables, *batch(0))
    # Without a gradient there is no sum.
    chex.assert_tree_all_finite(jax.jit(split)(variables, *batch(0)))
