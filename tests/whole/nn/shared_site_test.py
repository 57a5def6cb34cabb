"""One state for several uses of a site: its next value is their maximum.

Each way of splitting a batch must lead to the state of one call with the whole batch,
bit for bit, six steps in a row. The most common ones are in tests/unit.
"""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

from loka_jax.nn import OVERWRITE_WITH_GRADIENT, Dense
from loka_jax.ops.mesh_axes import merging_over_devices
from tests.support.nn import DELAYED, initialized
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
    scan,
    tables,
    vmap,
)

# Splits within a differentiated function.


def scan_with_a_carried_state(variables, x, factors):
    def add(carry, part):
        total, variables = carry
        return (total + loss(variables, *part), variables), None

    return lax.scan(add, (jnp.zeros(()), variables), (x, factors))[0][0]


def cond(variables, x, factors):
    def maybe(*args):
        return lax.cond(jnp.all(x < 1e9), loss, lambda *_: jnp.zeros(()), *args)

    return calls(variables, x, factors, maybe)


def in_pairs(*arrays):
    return [a.reshape(2, -1, *a.shape[1:]) for a in arrays]


def vmap_in_scan_in_checkpoint(variables, x, factors):
    run = jax.checkpoint(functools.partial(scan, loss=vmap))
    return run(variables, *in_pairs(x, factors))


# Other ways to a gradient, and gradients of parts, merged by the caller.


def of_a_vector(variables, x, factors):
    vector, restore = ravel_pytree(variables)
    gradient = jax.grad(lambda vector: calls(restore(vector), x, factors))(vector)
    return restore(gradient)[OVERWRITE_WITH_GRADIENT]


def pmap(variables, x, factors):
    part = functools.partial(loss, layer=LAYER.clone(axis_names=("parts",)))
    run = jax.pmap(next_state(part), axis_name="parts", in_axes=(None, 0, 0))
    return jax.tree.map(lambda leaf: leaf[2], run(variables, x, factors))


WITHIN = scan_with_a_carried_state, cond, vmap_in_scan_in_checkpoint


@pytest.mark.parametrize("states", [*map(next_state, WITHIN), of_a_vector, pmap])
def test_parts_of_a_batch_share_a_state(states):
    assert_as_in_one_call(states)


# Flax's transformations.

SITE = dict(recipe=DELAYED, use_bias=False, name="site")


class Step(linen.Module):
    @linen.compact
    def __call__(self, carry, x):
        return carry, Dense(N, **SITE)(x)


class Scan(linen.Module):
    @linen.compact
    def __call__(self, x):
        broadcast = dict(variable_broadcast=["params", OVERWRITE_WITH_GRADIENT])
        step = linen.scan(linen.remat(Step), **broadcast, split_rngs={"params": False})
        return step(name="scan")(jnp.zeros(()), x)[1]


def mapped(axis):
    axes = {"params": axis, OVERWRITE_WITH_GRADIENT: axis}
    split = {"params": axis is not None}
    return linen.vmap(Dense, variable_axes=axes, split_rngs=split)(N, **SITE)


@pytest.mark.parametrize("module", [Scan(), mapped(None)], ids=range(2))
def test_a_module_shares_the_state_of_a_layer(module):
    single, expected = one_call()
    variables = initialized(module, batch(0)[0])
    # The kernel of the single layer, at whatever path.
    kernel = single["params"]["kernel"]
    variables["params"] = jax.tree.map(lambda _: kernel, variables["params"])
    found = tables(next_state(functools.partial(loss, layer=module)), variables)
    np.testing.assert_array_equal(found, expected)


def test_layers_of_a_stack_have_their_own_states():
    (x, factors), stack = batch(0), mapped(0)
    variables = initialized(stack, x)
    run = jax.jit(next_state(functools.partial(loss, layer=stack)))
    (found,) = jax.tree.leaves(run(variables, x, factors))
    run = jax.jit(next_state(loss))
    for i in range(PARTS):
        own = jax.tree.map(operator.itemgetter(i), variables)
        (expected,) = jax.tree.leaves(run(own, x[i], factors[i]))
        np.testing.assert_array_equal(found[i], expected)


# Devices.


def over_devices(function, **options):
    """Returns a function of variables, rows and factors that runs a part a device."""
    if jax.device_count() < PARTS:
        pytest.skip(f"needs {PARTS} devices")
    mesh = jax.make_mesh((PARTS,), ("data",), (jax.sharding.AxisType.Auto,))
    specs = (P(), P("data"), P("data"))
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P(), **options)


@pytest.mark.parametrize("axis_names, check_vma", [((), False), (("data",), True)])
def test_devices_that_differentiate_share_a_state(axis_names, check_vma):
    part = functools.partial(loss, layer=LAYER.clone(axis_names=axis_names))

    def run(variables, x, factors):
        halves = x.reshape(2, -1, K), factors.reshape(2, -1, N)

        def total(variables):
            sum_of_parts = calls(variables, *halves, part)
            return lax.psum(sum_of_parts, "data") if check_vma else sum_of_parts

        return next_state(total)(variables)

    assert_as_in_one_call(over_devices(run, check_vma=check_vma))


@pytest.mark.parametrize(
    "axis_names, check_vma", [((), True), (("data",), True), ((), False)]
)
def test_devices_in_a_differentiated_function_share_a_state(axis_names, check_vma):
    part = functools.partial(loss, layer=LAYER.clone(axis_names=axis_names))

    def run(variables, x, factors):
        return lax.psum(part(variables, x[0], factors[0]), "data")

    assert_as_in_one_call(next_state(over_devices(run, check_vma=check_vma)))


@pytest.mark.parametrize("axis", [None, "data"])
def test_a_mean_over_devices_is_the_state_of_all(axis):
    """As of a loop that averages all gradients, by itself or over a mesh."""

    def run(variables, x, factors):
        if axis:
            with merging_over_devices():  # each has what it alone contributes
                return lax.pmean(next_state(loss)(variables, x[0], factors[0]), axis)
        parts = [next_state(loss)(variables, *x) for x in zip(x, factors, strict=True)]
        return jax.tree.map(lambda *x: sum(x) / len(x), *parts)

    assert_as_in_one_call(over_devices(run, check_vma=False) if axis else run)
