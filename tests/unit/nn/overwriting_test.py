"""The FP8 state through optax: overwritten, merged by the maximum, else refused."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import core

from loka_jax import nn
from loka_jax.nn import OVERWRITE_WITH_GRADIENT
from loka_jax.scaling import DelayedScaling
from tests.support.nn import initialized, rounded, states

pytestmark = pytest.mark.usefixtures("as_users_do")


def variables_of(seed, scale=1.0):
    """Returns variables of a model of two sites, or gradients of it."""
    rng = np.random.default_rng(seed)

    def values(*shape):
        return np.float32(scale) * rng.standard_normal(shape, np.float32)

    names = ("dense_0", "dense_1")
    return {
        "params": {name: {"kernel": values(3, 2)} for name in names},
        OVERWRITE_WITH_GRADIENT: {
            name: {"fp8_scaling": DelayedScaling(np.abs(values(3, 17)))}
            for name in names
        },
    }


OLD, GRADIENTS = variables_of(0), variables_of(1, 2.0**-30)  # no difference would do
# That would ruin the states if they saw them.
ADAM = optax.chain(
    optax.clip_by_global_norm(1e-3), optax.add_decayed_weights(0.1), optax.adamw(1e-2)
)


@functools.partial(jax.jit, static_argnums=0)
def updated(tx, variables, gradients, opt_state=None):
    """Returns variables and optimizer state after a step."""
    opt_state = tx.init(variables) if opt_state is None else opt_state
    updates, opt_state = tx.update(gradients, opt_state, variables)
    return optax.apply_updates(variables, updates), opt_state


def params_of(variables):
    return {"params": variables["params"]}


def test_the_optimizer_sees_parameters_alone_and_states_are_overwritten():
    after, opt_state = updated(nn.overwriting(ADAM), OLD, GRADIENTS)
    rest, rest_state = updated(ADAM, params_of(OLD), params_of(GRADIENTS))
    chex.assert_trees_all_equal(after["params"], rest["params"])
    chex.assert_trees_all_equal(opt_state, rest_state)
    assert jax.tree.structure(opt_state) == jax.tree.structure(rest_state)
    chex.assert_trees_all_equal(states(after), states(GRADIENTS))


def test_a_state_without_a_gradient_stays_as_it_was():
    gradients = jax.tree.map(np.copy, GRADIENTS)
    first, second = jax.tree.leaves(gradients[OVERWRITE_WITH_GRADIENT])
    second[:] = 0  # as JAX makes it where the loss does not depend on the site
    first[1] = 0  # of one operand
    after, _ = updated(nn.overwriting(ADAM), OLD, gradients)
    old, _ = states(OLD)
    np.testing.assert_array_equal(states(after)[0], [first[0], old[1], first[2]])
    np.testing.assert_array_equal(states(after)[1], states(OLD)[1])


PAIRS = {
    "list": lambda user, item: [user, item],
    "frozen within": lambda user, item: {"user": core.freeze(user), "item": item},
    "one without states": lambda user, item: {"user": user, "item": params_of(item)},
}


@pytest.mark.parametrize("pair", PAIRS)
def test_the_states_of_two_models_in_one_tree_are_overwritten(pair):
    gradients = GRADIENTS, variables_of(3)
    old, new = PAIRS[pair](OLD, variables_of(2)), PAIRS[pair](*gradients)
    after, opt_state = updated(nn.overwriting(optax.sgd(0.5, 0.9)), old, new)
    assert OVERWRITE_WITH_GRADIENT not in str(jax.tree.structure(opt_state))
    assert jax.tree.structure(after) == jax.tree.structure(old)

    def check(path, old, new, after):
        is_state = "fp8_scaling" in jax.tree_util.keystr(path)
        expected = new if is_state else old - np.float32(0.5) * new
        np.testing.assert_allclose(after, expected, rtol=1e-6, atol=0)

    jax.tree_util.tree_map_with_path(check, old, new, after)


def test_microbatches_add_their_share_of_gradients_and_keep_the_loudest_state():
    parts = [variables_of(seed) for seed in range(1, 4)]

    @jax.jit
    def accumulated(*parts):
        total = jax.tree.map(jnp.zeros_like, parts[0])
        for part in parts:
            total = nn.accumulate(total, part, 0.25)
        return total

    total = accumulated(*parts)
    loudest = [np.max(np.stack(x), 0) for x in zip(*map(states, parts), strict=True)]
    chex.assert_trees_all_equal(states(total), loudest)
    summed = jax.tree.map(lambda *x: sum(x) / 4, *(x["params"] for x in parts))
    chex.assert_trees_all_close(total["params"], summed, rtol=1e-5, atol=1e-6)
    half = {"params": np.ones(2, jnp.bfloat16)}
    total = jax.eval_shape(lambda a: nn.accumulate(a, a, jnp.float32(0.5)), half)
    assert total["params"].dtype == jnp.bfloat16


def test_probes_statistics_are_refused_at_any_depth():
    with nn.probing(nn.ProbeConfig()):
        variables = initialized(nn.Dense(16, recipe="bf16"), rounded(32, 16))
    tx = nn.overwriting(optax.sgd(1.0))
    for tree in (variables, [{"user": variables}]):
        for use in (tx.init, functools.partial(nn.accumulate, params_of(variables))):
            with pytest.raises(ValueError, match="nn.merge_stats"):
                use(tree)
    # A layer may have the name of Probe's collection.
    tx.init({"params": {"probe": {"kernel": jnp.ones(3)}}})
