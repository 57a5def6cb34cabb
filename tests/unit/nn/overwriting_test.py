"""The FP8 state through optax and loops: overwritten, else as it was, or refused."""

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
from tests.support.nn import initialized, rounded, scales_of, states

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
            name: {"fp8_scaling": np.abs(values(3, 36))} for name in names
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
    rest, rest_state = updated(ADAM, OLD["params"], GRADIENTS["params"])
    chex.assert_trees_all_equal(after["params"], rest)
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


X, G = rounded(64, 48), rounded(64, 16, seed=1)
LAYER = nn.Dense(16, recipe="fp8_tensorwise_delayed")


@jax.jit
def gradients_of(variables, loss_scale=1.0):
    """Returns the gradients of a batch."""

    def loss(variables, x, g):
        y = LAYER.apply(variables, x).astype(jnp.float32)
        return loss_scale * jnp.sum(y * g * (1 + y))

    return jax.grad(loss)(variables, X, G)


LOOPS = {
    "divided": dict(treated=lambda x: x / 48),
    "loss scale": dict(loss_scale=2.0**12, treated=lambda x: x / 2.0**12),
    "clipped": dict(treated=lambda x: np.clip(x, -1e9, 1e9)),
}


@pytest.mark.parametrize("name", LOOPS)
def test_what_a_loop_does_to_all_gradients_leaves_the_scales(name):
    options = dict(LOOPS[name])
    treated = options.pop("treated", lambda x: x)
    tx = nn.overwriting(optax.set_to_zero())
    found = expected = initialized(LAYER, X)
    for _ in range(3):
        for_all = jax.tree.map(treated, gradients_of(found, **options))
        found, _ = updated(tx, found, for_all)
        expected, _ = updated(tx, expected, gradients_of(expected))
    found, expected = (scales_of(states(x)[0]) for x in (found, expected))
    if name == "loss scale":
        expected[2] *= 2.0**12
    np.testing.assert_array_equal(found, expected)


def test_an_average_of_all_variables_has_the_scales_of_a_step():
    tx, old = nn.overwriting(optax.sgd(1e-3)), initialized(LAYER, X)
    average = old
    for _ in range(8):
        old, _ = updated(tx, old, gradients_of(old))
        average = optax.incremental_update(old, average, 0.1)
    nn.check_scales(average)
    np.testing.assert_array_equal(
        scales_of(states(average)[0])[:, 0], scales_of(states(old)[0])[:, 0]
    )
    norms = map(optax.tree.norm, (gradients_of(old), gradients_of(old)["params"]))
    assert np.isclose(*norms, rtol=1e-6)


def test_other_collections_are_refused_by_name():
    with_stats = OLD | {"batch_stats": {"mean": np.ones(3)}}
    tx = nn.overwriting(ADAM)
    for use in (tx.init, lambda x: updated(tx, x, x)):
        with pytest.raises(ValueError, match="'batch_stats' beside the parameters"):
            use(with_stats)


def test_masks_and_line_searches_are_of_the_parameters():
    mask = jax.tree.map(lambda x: False, OLD["params"])
    decay = optax.adamw(0.1, weight_decay=1.0, mask=mask)
    zero = jax.tree.map(np.zeros_like, OLD)
    after, _ = updated(nn.overwriting(decay), OLD, zero)
    chex.assert_trees_all_equal(after["params"], OLD["params"])

    def loss(variables):
        assert OVERWRITE_WITH_GRADIENT in variables
        return optax.tree.norm(variables["params"], squared=True)

    @jax.jit
    def step(old):
        tx = nn.overwriting(optax.lbfgs())
        value, gradients = jax.value_and_grad(loss)(old)
        extra = dict(value=value, grad=gradients, value_fn=loss)
        updates, _ = tx.update(gradients, tx.init(old), old, **extra)
        after = optax.apply_updates(old, updates)
        return value, loss(after), after

    value, newer, after = step(OLD)
    assert newer < value / 2
    chex.assert_trees_all_equal(states(after), states(OLD))


def test_optimizers_of_pairs_of_parameters_are_refused():
    tx = nn.overwriting(optax.lookahead(optax.sgd(0.1), 5, 0.5))
    pair = optax.LookaheadParams.init_synced(OLD)
    with pytest.raises(ValueError, match="gradients, not that of LookaheadParams"):
        tx.update(GRADIENTS, tx.init(pair), pair)


def test_probes_statistics_are_refused_at_any_depth():
    with nn.probing(nn.ProbeConfig()):
        variables = initialized(nn.Dense(16, recipe="bf16"), rounded(32, 16))
    tx = nn.overwriting(optax.sgd(1.0))
    for tree in (variables, [{"user": variables}]):
        with pytest.raises(ValueError, match="nn.merge_stats"):
            tx.init(tree)
    # A layer may have the name of Probe's collection.
    tx.init({"params": {"probe": {"kernel": jnp.ones(3)}}})
