"""The site product over eight devices equals the one on a single device."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from loka_jax import scaling
from loka_jax.recipe import get_recipe
from tests import support
from tests.support.stand_ins import xla_matmul

# Delayed scales need most of all: amaxes of all devices, and a state.
RECIPES = support.slow_except(
    ["bf16", "fp8_tensorwise", "fp8_tensorwise_delayed", "fp8_rowwise"],
    "fp8_tensorwise_delayed",
)
ROWS = P("data")


@pytest.fixture(scope="module")
def mesh():
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((8,), ("data",), axis_types=auto)


def arguments(recipe):
    # The devices' amaxes differ by orders of magnitude.
    lhs = support.uneven_rows(128, 32, decades=3).astype(jnp.bfloat16)
    rhs = support.normal(32, 16, seed=1)
    g = support.uneven_rows(128, 16, decades=3, seed=2).astype(jnp.bfloat16)
    state = scaling.init_delayed(recipe) if recipe.is_delayed else None
    return lhs, rhs, state, g


def gradients(recipe, axis_names=()):
    """Returns a function of lhs, rhs, state, g: out and the three gradients."""

    def step(lhs, rhs, state, g):
        product = xla_matmul(recipe, axis_names)
        out, vjp = jax.vjp(product, lhs, rhs, state)
        return out, *vjp(g)

    return step


def assert_equal(sharded, single, args):
    """Asserts equality, but for the order in which the weight gradient is summed."""
    out, dlhs, drhs, state = sharded
    chex.assert_trees_all_equal((out, dlhs, state), (single[0], single[1], single[3]))
    # Casts to FP8 round by at most 1/8.
    lhs, g = (np.abs(np.asarray(args[i], np.float64)) for i in (0, 3))
    magnitude = lhs.T @ g * (9 / 8) ** 2
    bound = 2 * support.sum_error(len(lhs), magnitude)
    assert np.all(np.abs(np.asarray(drhs) - np.asarray(single[2])) <= bound)


@pytest.mark.parametrize("name", RECIPES)
def test_under_shard_map_all_devices_do_what_one_would(mesh, name):
    recipe = get_recipe(name)
    args = arguments(recipe)
    step = jax.shard_map(
        gradients(recipe, ("data",)),
        mesh=mesh,
        in_specs=(ROWS, P(), P(), ROWS),
        out_specs=(ROWS, ROWS, P(), P()),
    )
    single = jax.jit(gradients(recipe))(*args)
    assert_equal(jax.jit(step)(*args), single, args)


@pytest.mark.parametrize("name", RECIPES)
def test_without_vma_checks_the_caller_sums_the_weight_gradient(mesh, name):
    recipe = get_recipe(name)
    args = arguments(recipe)

    def summed(*args):
        out, dlhs, drhs, state = gradients(recipe, ("data",))(*args)
        return out, dlhs, jax.lax.psum(drhs, "data"), state

    step = jax.shard_map(
        summed,
        mesh=mesh,
        in_specs=(ROWS, P(), P(), ROWS),
        out_specs=(ROWS, ROWS, P(), P()),
        check_vma=False,
    )
    single = jax.jit(gradients(recipe))(*args)
    assert_equal(jax.jit(step)(*args), single, args)


def test_every_device_holds_the_same_state(mesh):
    recipe = get_recipe("fp8_tensorwise_delayed")

    def states(*args):
        return gradients(recipe, ("data",))(*args)[3].table[None]

    step = jax.shard_map(
        states,
        mesh=mesh,
        in_specs=(ROWS, P(), P(), ROWS),
        out_specs=ROWS,
        check_vma=False,
    )
    tables = np.asarray(jax.jit(step)(*arguments(recipe)))
    chex.assert_shape(tables, (8, 3, 17))
    np.testing.assert_array_equal(tables, np.broadcast_to(tables[:1], tables.shape))


@pytest.mark.parametrize("name", RECIPES)
def test_under_jit_with_sharded_rows_scales_are_global(mesh, name):
    recipe = get_recipe(name)
    args = lhs, rhs, state, g = arguments(recipe)
    single = jax.jit(gradients(recipe))(*args)
    rows = NamedSharding(mesh, ROWS)
    lhs, g = jax.device_put((lhs, g), rows)
    rhs, state = jax.device_put((rhs, state), NamedSharding(mesh, P()))
    sharded = jax.jit(gradients(recipe))(lhs, rhs, state, g)
    assert sharded[0].sharding.is_equivalent_to(rows, 2)
    assert_equal(sharded, single, args)
