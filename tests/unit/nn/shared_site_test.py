"""One state for several uses of a site: its next value is their maximum.

Each way of splitting a batch must lead to the state of one call with the whole batch,
bit for bit, six steps in a row.
"""

import functools
import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax import lax

from loka_jax import nn
from loka_jax.nn import OVERWRITE_WITH_GRADIENT, Dense, NormDense
from tests import support
from tests.support import stand_ins
from tests.support.shared_site import (
    DELAYED,
    LAYER,
    PARTS,
    K,
    N,
    assert_as_in_one_call,
    batch,
    calls,
    init,
    loss,
    next_state,
    one_call,
    tables,
    whole,
)

POLICIES = jax.checkpoint_policies


# Splits within a differentiated function.


def vmap(variables, x, factors):
    return jnp.sum(jax.vmap(loss, (None, 0, 0))(variables, x, factors))


def vmap_over_a_closure(variables, x, factors):
    part = functools.partial(loss, variables)
    return jnp.sum(jax.vmap(part)(x, factors))


def vmap_with_a_named_axis(variables, x, factors):
    part = functools.partial(loss, variables, layer=LAYER.clone(axis_names=("parts",)))
    return jnp.sum(jax.vmap(part, axis_name="parts")(x, factors))


def scan(variables, x, factors, loss=loss):
    def add(total, part):
        return total + loss(variables, *part), None

    return lax.scan(add, jnp.zeros(()), (x, factors))[0]


def scan_with_a_carried_state(variables, x, factors):
    def add(carry, part):
        total, variables = carry
        return (total + loss(variables, *part), variables), None

    return lax.scan(add, (jnp.zeros(()), variables), (x, factors))[0][0]


def fori_loop(variables, x, factors):
    def add(i, total):
        return total + loss(variables, x[i], factors[i])

    return lax.fori_loop(0, PARTS, add, jnp.zeros(()))


def checkpoint(policy):
    return functools.partial(calls, loss=jax.checkpoint(loss, policy=policy))


def jit(variables, x, factors):
    return jax.jit(calls)(variables, x[:2], factors[:2]) + jax.jit(scan)(
        variables, x[2:], factors[2:]
    )


def cond(variables, x, factors):
    def maybe(variables, x, factors):
        nothing = lambda *_: jnp.zeros(())  # noqa: E731
        return lax.cond(jnp.all(x < 1e9), loss, nothing, variables, x, factors)

    return calls(variables, x, factors, maybe)


def in_pairs(*arrays):
    return [a.reshape(2, -1, *a.shape[1:]) for a in arrays]


def vmap_in_scan_in_checkpoint(variables, x, factors):
    run = jax.checkpoint(functools.partial(scan, loss=vmap))
    return run(variables, *in_pairs(x, factors))


def checkpoint_in_scan_in_vmap(variables, x, factors):
    run = functools.partial(scan, variables, loss=jax.checkpoint(loss))
    return jnp.sum(jax.vmap(run)(*in_pairs(x, factors)))


def vmap_in_vmap(variables, x, factors):
    run = functools.partial(vmap, variables)
    return jnp.sum(jax.vmap(run)(*in_pairs(x, factors)))


QUICK = (calls, vmap, scan)
SPLITS = [
    *QUICK,
    vmap_over_a_closure,
    vmap_with_a_named_axis,
    scan_with_a_carried_state,
    fori_loop,
    jit,
    cond,
    vmap_in_scan_in_checkpoint,
    checkpoint_in_scan_in_vmap,
    vmap_in_vmap,
]


@pytest.mark.parametrize("split", support.slow_except(SPLITS, *QUICK))
def test_parts_of_a_batch_share_a_state(split):
    assert_as_in_one_call(next_state(split))


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", [None, POLICIES.nothing_saveable, POLICIES.dots_saveable]
)
def test_checkpointed_parts_share_a_state(policy):
    assert_as_in_one_call(next_state(checkpoint(policy)))


@pytest.mark.parametrize("split", support.slow_except(QUICK, vmap))
def test_outside_of_jit_they_do_too(split):
    variables, expected = one_call()
    np.testing.assert_array_equal(
        np.concatenate(jax.tree.leaves(next_state(split)(variables, *batch(0)))),
        expected[0],
    )


# Flax's transformations.


class Calls(linen.Module):
    """Calls one layer for each part."""

    cls: type[linen.Module] = Dense

    @linen.compact
    def __call__(self, x):
        layer = self.cls(N, recipe=DELAYED, use_bias=False, name="site")
        return jnp.stack([layer(part) for part in x])


class Step(linen.Module):
    """A layer as a step of a scan."""

    @linen.compact
    def __call__(self, carry, x):
        return carry, Dense(N, recipe=DELAYED, use_bias=False, name="site")(x)


def scanned(cls):
    broadcast = ["params", OVERWRITE_WITH_GRADIENT]
    return linen.scan(cls, variable_broadcast=broadcast, split_rngs={"params": False})


class Scan(linen.Module):
    """Scans over the parts, the variables broadcast."""

    cls: type[linen.Module] = Step

    @linen.compact
    def __call__(self, x):
        return scanned(self.cls)(name="scan")(jnp.zeros(()), x)[1]


class Vmap(linen.Module):
    """Maps over the parts, the variables shared."""

    @linen.compact
    def __call__(self, x):
        layer = linen.vmap(
            Dense,
            variable_axes={"params": None, OVERWRITE_WITH_GRADIENT: None},
            split_rngs={"params": False},
        )
        return layer(N, recipe=DELAYED, use_bias=False, name="site")(x)


@pytest.mark.parametrize(
    "module",
    support.slow_except(
        [
            Calls(),
            Calls(linen.remat(Dense)),
            Scan(),
            Scan(linen.remat(Step)),
            Vmap(),
        ],
        Calls(),
    ),
)
def test_a_module_shares_the_state_of_a_layer(module):
    _, expected = one_call()
    variables = init(module, batch(0)[0])
    # The kernel of the single layer, at whatever path.
    kernel = one_call()[0]["params"]["kernel"]
    variables["params"] = jax.tree.map(lambda _: kernel, variables["params"])
    split = functools.partial(loss, layer=module)
    found = tables(next_state(split), variables)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("device", [stand_ins.CPU, stand_ins.HOPPER])
def test_a_chain_of_sites_may_be_called_twice(device):
    if jax.default_backend() == "gpu":
        pytest.skip("cuBLAS sums products of more rows in another order")
    mlp = nn.Mlp((K, N), recipe=DELAYED, norm="layer", activation="relu")
    with nn.site_context(device=device):
        variables = init(mlp, batch(0)[0][0])
        # With stored scales each row is cast alike, whatever it is called with.
        first = jax.jit(next_state(functools.partial(whole, layer=mlp)))
        state = first(variables, *batch(0))
        variables = {**variables, OVERWRITE_WITH_GRADIENT: state}
        part = functools.partial(loss, layer=mlp)
        found = tables(next_state(functools.partial(calls, loss=part)), variables)
        expected = tables(next_state(functools.partial(whole, layer=mlp)), variables)
    np.testing.assert_array_equal(found, expected)


def test_layers_of_a_stack_have_their_own_states():
    cls = linen.vmap(
        NormDense,
        variable_axes={"params": 0, OVERWRITE_WITH_GRADIENT: 0},
        split_rngs={"params": True},
    )
    stack, single = (
        c(N, recipe=DELAYED, norm="none", name="site") for c in (cls, NormDense)
    )
    x, factors = batch(0)
    variables = init(stack, x)
    [found] = jax.tree.leaves(
        jax.jit(next_state(functools.partial(loss, layer=stack)))(variables, x, factors)
    )
    run = jax.jit(next_state(functools.partial(loss, layer=single)))
    for i in range(PARTS):
        own = jax.tree.map(operator.itemgetter(i), variables)
        [expected] = jax.tree.leaves(run(own, x[i], factors[i]))
        np.testing.assert_array_equal(found[i], expected)


@pytest.mark.slow
def test_examples_share_the_states_of_a_stack():
    variables, _ = one_call()
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), variables)

    def run(stack, x, factors):
        per_layer = jax.vmap(loss, (0, None, None))
        return jnp.sum(jax.vmap(per_layer, (None, 0, 0))(stack, x, factors))

    _, expected = one_call()
    [found] = jax.tree.leaves(jax.jit(next_state(run))(stack, *batch(0)))
    np.testing.assert_array_equal(found, np.stack([expected[0]] * 2))


# What measures nothing leaves the state to the others.


def test_a_call_without_measurement_does_not_hold_back_the_others():
    variables, _ = one_call()

    def run(variables, x, factors):
        too_few = loss(variables, x[0, :8], factors[0, :8])  # in bf16
        return too_few + loss(variables, x[0], factors[0])

    x, factors = batch(0)
    step = jax.jit(next_state(run))
    large = step(variables, 1024 * x, factors)
    state = {**variables, OVERWRITE_WITH_GRADIENT: large}
    for _ in range(16):
        small = step(state, x, factors)
        state = {**variables, OVERWRITE_WITH_GRADIENT: small}
    ratio = large["fp8_scaling"].scale_inv[0] / small["fp8_scaling"].scale_inv[0]
    assert ratio == 1024


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_call_that_is_not_finite_does_not_either(bad):
    variables, _ = one_call()
    x, factors = batch(0)
    bad_factors = factors.at[0, 0, 0].set(bad)
    step = jax.jit(next_state(calls))
    found = step(variables, x, bad_factors)["fp8_scaling"]
    rest = step(variables, x[1:], factors[1:])["fp8_scaling"]
    chex.assert_trees_all_equal(found.table[2], rest.table[2])  # of the gradient


def test_a_site_that_a_step_leaves_out_keeps_its_state():
    variables, _ = one_call()
    x, factors = batch(0)

    def run(variables, x, factors, is_used):
        nothing = lambda *_: jnp.zeros(())  # noqa: E731
        return lax.cond(is_used, whole, nothing, variables, x, factors)

    step = jax.jit(next_state(run))
    used = step(variables, x, factors, True)
    kept = step({**variables, OVERWRITE_WITH_GRADIENT: used}, x, factors, False)
    chex.assert_trees_all_equal(kept, used)


def test_a_state_that_leaves_beside_the_gradient_is_float32():
    variables, expected = one_call()

    def run(variables, x, factors):
        y, updated = LAYER.apply(variables, x, mutable=[OVERWRITE_WITH_GRADIENT])
        return jnp.sum(y.astype(jnp.float32) * factors), updated

    x, factors = (a.reshape(-1, a.shape[-1]) for a in batch(0))
    grad = jax.grad(run, has_aux=True)
    for step in (grad, jax.jit(grad)):
        grads, updated = step(variables, x, factors)
        state = grads[OVERWRITE_WITH_GRADIENT]["fp8_scaling"]
        np.testing.assert_array_equal(state.table, expected[0])
        chex.assert_trees_all_equal(
            updated[OVERWRITE_WITH_GRADIENT], variables[OVERWRITE_WITH_GRADIENT]
        )
