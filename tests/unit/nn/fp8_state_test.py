"""The FP8 state through optax: overwritten in one documented way, else refused."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import core, linen, serialization
from flax.training.train_state import TrainState

from loka_jax import nn
from loka_jax.nn import OVERWRITE_WITH_GRADIENT
from loka_jax.recipe import Cast, GemmRecipe, Recipe
from tests import support

RECIPE = "fp8_tensorwise_delayed"
MODEL = nn.Mlp((32, 16), recipe=RECIPE)
X = support.normal(32, 64)


@pytest.fixture(autouse=True)
def promoting():
    with jax.numpy_dtype_promotion("standard"):  # optax's optimizers need it
        yield


@pytest.fixture(scope="module")
def initial():
    return jax.jit(MODEL.init)(jax.random.key(0), X)


def loss(variables, x):
    return jnp.mean(MODEL.apply(variables, x).astype(jnp.float32) ** 2)


gradients = jax.jit(jax.grad(loss))


def step(tx, variables, opt_state, x):
    updates, opt_state = tx.update(gradients(variables, x), opt_state, variables)
    return optax.apply_updates(variables, updates), opt_state


def train(tx, variables, steps):
    opt_state = tx.init(variables)
    for i in range(steps):
        variables, opt_state = step(tx, variables, opt_state, X * (i + 1))
    return variables


def tables(variables):
    return jax.tree.leaves(variables[OVERWRITE_WITH_GRADIENT])


# What is wrong is refused.


WRONG = {
    "adam": optax.adam(1e-3),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "decay": optax.chain(optax.set_to_zero(), optax.add_decayed_weights(-0.1)),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_optimizer_of_all_variables_is_refused_by_name(initial, name):
    moved = train(nn.overwriting(optax.sgd(0.0)), initial, 1)  # scales are set
    ruined = train(WRONG[name], moved, 1)
    with pytest.raises(ValueError, match=r"'dense_0' is .* nn.overwriting"):
        MODEL.apply(ruined, X)
    # Inside of jit values are unknown, and what comes out is NaN.
    assert np.all(np.isnan(jax.jit(MODEL.apply)(ruined, X).astype(np.float32)))
    assert np.isnan(jax.jit(jax.value_and_grad(loss))(ruined, X)[0])


def test_the_second_step_of_adam_over_all_variables_has_a_nan_loss(initial):
    tx = optax.adam(1e-3)
    opt_state = tx.init(initial)
    assert np.isfinite(loss(initial, X))
    ruined, opt_state = jax.jit(step, static_argnums=0)(tx, initial, opt_state, X)
    assert np.isnan(jax.jit(loss)(ruined, X))
    with pytest.raises(ValueError, match="delayed scale of lhs at site 'dense_0' is -"):
        nn.check_scales(ruined)


def test_the_mean_of_states_is_refused(initial):
    parts = [gradients(initial, X * size) for size in (1.0, 40.0)]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *parts)
    ruined = initial | {OVERWRITE_WITH_GRADIENT: mean[OVERWRITE_WITH_GRADIENT]}
    with pytest.raises(ValueError, match="microbatches by nn.accumulate"):
        MODEL.apply(ruined, X)


def test_an_average_of_variables_is_named_before_any_step(initial):
    first = train(nn.overwriting(optax.sgd(0.1)), initial, 1)
    second = train(nn.overwriting(optax.sgd(0.1)), initial, 4)
    average = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, first, second)
    with pytest.raises(ValueError, match="at site 'dense_0' is .* powers of two"):
        nn.check_scales(average)
    nn.check_scales(average, pow2_scale=False)  # such a recipe's might be right
    ruined = jax.tree.map(lambda table: -table, average)
    with pytest.raises(ValueError, match="at site 'dense_0' is -"):
        nn.check_scales(ruined, pow2_scale=False)


def test_scales_that_are_no_powers_of_two_pass_where_the_recipe_has_them():
    cast = Cast(scaling="delayed", pow2_scale=False)
    own = Recipe(name="own", fwd=GemmRecipe(first=cast, second=cast))  # g has none
    model = nn.Dense(32, recipe=own)
    variables = model.init(jax.random.key(0), X)
    grads = jax.grad(lambda v: jnp.sum(model.apply(v, X).astype(jnp.float32)))(
        variables
    )
    model.apply(grads, X)
    nn.check_scales(grads, pow2_scale=False)
    with pytest.raises(ValueError, match="powers of two"):
        nn.check_scales(grads)


@pytest.mark.parametrize("scale", [-0.5, np.inf, np.nan, 3.0])
def test_what_is_no_scale_is_refused(initial, scale):
    wrong = jax.tree.map(
        lambda table: table.at[2, 0].set(scale), initial[OVERWRITE_WITH_GRADIENT]
    )
    with pytest.raises(ValueError, match="scale of g at site 'dense_0'"):
        MODEL.apply(initial | {OVERWRITE_WITH_GRADIENT: wrong}, X)


def test_parameters_alone_are_refused(initial):
    with pytest.raises(ValueError, match="'dense_0' has no delayed scales.*all that"):
        MODEL.apply({"params": initial["params"]}, X)


def test_a_state_restored_without_a_template_is_refused(initial):
    data = serialization.to_bytes(initial)
    plain = serialization.msgpack_restore(data)
    for use in (
        nn.check_scales,
        lambda variables: MODEL.apply(variables, X),
        jax.jit(lambda variables: MODEL.apply(variables, X)),
    ):
        with pytest.raises(ValueError, match="of site 'dense_0' .* template: restore"):
            use(plain)
    restored = jax.tree.map(jnp.asarray, serialization.from_bytes(initial, data))
    nn.check_scales(restored)
    MODEL.apply(restored, X)


def test_probes_statistics_are_no_parameters():
    with nn.probing(nn.ProbeConfig()):
        variables = MODEL.init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="nn.merge_stats"):
        nn.overwriting(optax.sgd(1.0)).init(variables)


# The one way.


def test_overwriting_does_what_train_state_does(initial):
    tx = optax.chain(optax.clip_by_global_norm(1e-3), optax.adamw(1e-2))
    state = TrainState.create(apply_fn=MODEL.apply, params=initial, tx=tx)
    for i in range(3):
        state = state.apply_gradients(grads=gradients(state.params, X * (i + 1)))
    ours = train(nn.overwriting(tx), initial, 3)
    chex.assert_trees_all_equal(ours, state.params)
    nn.check_scales(ours)
    inside = TrainState.create(
        apply_fn=MODEL.apply, params=initial, tx=nn.overwriting(tx)
    )
    inside = inside.apply_gradients(grads=gradients(initial, X))
    chex.assert_trees_all_equal(inside.params, train(nn.overwriting(tx), initial, 1))


def test_overwriting_is_exact_where_a_difference_is_not(initial):
    def with_scale(scale):
        states = initial[OVERWRITE_WITH_GRADIENT]
        states = jax.tree.map(lambda table: table.at[:, 0].set(scale), states)
        return initial | {OVERWRITE_WITH_GRADIENT: states}

    old, new = with_scale(2.0**100), with_scale(2.0**-100)
    tx = nn.overwriting(optax.sgd(0.0))
    updates, _ = jax.jit(tx.update)(new, tx.init(old), old)
    for before in (old, jax.tree.map(np.asarray, old)):
        after = optax.apply_updates(before, updates)
        chex.assert_trees_all_equal(tables(after), tables(new))


def test_frozen_variables_stay_frozen(initial):
    frozen = core.freeze(initial)
    tx = nn.overwriting(optax.sgd(0.1))
    after = train(tx, frozen, 1)
    assert isinstance(after, core.FrozenDict)
    chex.assert_trees_all_equal(core.unfreeze(after), train(tx, initial, 1))


def test_multi_steps_accumulates_gradients_and_every_step_moves_the_state(initial):
    tx = nn.overwriting(optax.MultiSteps(optax.sgd(0.1), 2))
    opt_state = tx.init(initial)
    first, opt_state = step(tx, initial, opt_state, X)
    chex.assert_trees_all_equal(first["params"], initial["params"])
    second, _ = step(tx, first, opt_state, 40 * X)
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), second, first)
    assert all(jax.tree.leaves(moved))
    for table, gradient in zip(tables(second), tables(gradients(first, 40 * X))):  # noqa: B905
        np.testing.assert_array_equal(table, gradient)


def test_accumulation_keeps_the_loudest_microbatch(initial):
    parts = [gradients(initial, X * size) for size in (1.0, 40.0, 2.0, 1.0)]
    total = jax.tree.map(jnp.zeros_like, initial)
    for part in parts:
        total = nn.accumulate(total, part, 1 / len(parts))
    chex.assert_trees_all_equal(
        tables(total),
        [jnp.max(jnp.stack(x), 0) for x in zip(*map(tables, parts))],  # noqa: B905
    )
    mean = jax.tree.map(lambda *x: sum(x) / 4, *(part["params"] for part in parts))
    chex.assert_trees_all_close(total["params"], mean, rtol=1e-5, atol=1e-7)
    after = train_with(total, initial)
    nn.check_scales(after)
    (lhs, *_), _ = tables(after)
    assert lhs[1] == jnp.max(jnp.abs((40 * X).astype(jnp.bfloat16)))


def train_with(total, variables):
    tx = nn.overwriting(optax.sgd(0.1))
    updates, _ = tx.update(total, tx.init(variables), variables)
    return optax.apply_updates(variables, updates)


# A site on which the loss does not depend.


class Towers(linen.Module):
    """Two towers, of which a step may use one, or stop the gradient of the other."""

    def setup(self):
        self.a, self.b = (nn.Dense(32, recipe=RECIPE) for _ in range(2))

    def __call__(self, x):
        return self.a(x) + self.b(x)

    def only_a(self, x):
        return self.a(x)

    def fixed_b(self, x):
        return self.a(x) + jax.lax.stop_gradient(self.b(x))


TOWERS = Towers()


def gradients_by(method, variables):
    def loss(variables):
        return jnp.mean(TOWERS.apply(variables, X, method=method) ** 2)

    return jax.jit(jax.grad(loss))(variables)


@pytest.mark.parametrize("method", ["only_a", "fixed_b"])
def test_the_state_of_a_site_without_a_gradient_stays_as_it_was(method):
    variables = TOWERS.init(jax.random.key(0), X)
    tx = nn.overwriting(optax.adam(1e-3))
    opt_state = tx.init(variables)
    after = []
    for name in ("__call__", method, "__call__"):
        grads = gradients_by(name, variables)
        updates, opt_state = tx.update(grads, opt_state, variables)
        variables = optax.apply_updates(variables, updates)
        after.append(variables)
    first, second, third = after
    a, b = (tables(variables) for variables in (first, second))
    assert jnp.any(a[0] != b[0])
    np.testing.assert_array_equal(a[1], b[1])
    nn.check_scales(third)
    assert np.all(np.isfinite(TOWERS.apply(third, X).astype(np.float32)))


@pytest.mark.parametrize("method", ["only_a", "fixed_b"])
def test_under_train_state_a_site_without_a_gradient_starts_anew(method):
    variables = TOWERS.init(jax.random.key(0), X)
    state = TrainState.create(
        apply_fn=TOWERS.apply, params=variables, tx=optax.sgd(0.0)
    )
    for name in ("__call__", method):
        state = state.apply_gradients(grads=gradients_by(name, state.params))
    assert not jnp.any(tables(state.params)[1])
    nn.check_scales(state.params)
    chex.assert_trees_all_equal(
        jax.jit(TOWERS.apply)(state.params, X), TOWERS.apply(variables, X)
    )
    for initialized in (False, True):
        model = nn.Planned(nn.Dense(32, recipe=RECIPE), (), initialized)
        old, new = (
            {name: of[name]["b"] for name in of} for of in (state.params, variables)
        )
        chex.assert_trees_all_equal(model.apply(old, X), model.apply(new, X))
    chex.assert_trees_all_equal(
        tables(gradients_by("__call__", state.params))[1],
        tables(gradients_by("__call__", variables))[1],
    )


def test_microbatches_that_use_no_tower_leave_its_state():
    variables = TOWERS.init(jax.random.key(0), X)
    both, one = (gradients_by(m, variables) for m in ("__call__", "only_a"))
    total = jax.tree.map(jnp.zeros_like, variables)
    total = nn.accumulate(nn.accumulate(total, one, 0.5), both, 0.5)
    np.testing.assert_array_equal(tables(total)[1], tables(both)[1])
    total = jax.tree.map(jnp.zeros_like, variables)
    after = train_with(nn.accumulate(total, one), variables)
    np.testing.assert_array_equal(tables(after)[1], tables(variables)[1])


# Several models in one tree.


def loss_of_both(variables):
    return sum(loss(own, X * size) for own, size in zip(of_both(variables), (1, 4)))  # noqa: B905


def of_both(variables):
    return variables.values() if hasattr(variables, "values") else variables


@pytest.mark.parametrize("pair", [dict, list, core.freeze])
def test_the_states_of_two_models_in_one_tree_are_overwritten(initial, pair):
    names = ("item", "user")
    both = pair(dict.fromkeys(names, initial)) if pair is not list else [initial] * 2
    tx = nn.overwriting(optax.adam(1e-2))
    opt_state = tx.init(both)
    assert OVERWRITE_WITH_GRADIENT not in str(jax.tree.structure(opt_state))
    for _ in range(3):
        grads = jax.grad(loss_of_both)(both)
        total = jax.tree.map(jnp.zeros_like, both)
        total = nn.accumulate(nn.accumulate(total, grads, 0.5), grads, 0.5)
        chex.assert_trees_all_equal(*map(all_tables, (total, grads)))
        updates, opt_state = tx.update(total, opt_state, both)
        both = optax.apply_updates(both, updates)
        chex.assert_trees_all_equal(*map(all_tables, (both, grads)))
    nn.check_scales(both)
    assert jax.tree.structure(both) == jax.tree.structure(grads)


def all_tables(both):
    return [tables(own) for own in of_both(both)]


def test_probes_statistics_are_refused_at_any_depth():
    with nn.probing(nn.ProbeConfig()):
        variables = MODEL.init(jax.random.key(0), X)
    both = {"user": variables, "item": variables}
    for tree in (both, jax.tree.map(jnp.zeros_like, both)):
        with pytest.raises(ValueError, match="nn.merge_stats"):
            nn.accumulate(tree, tree)


def test_a_layer_may_have_the_name_of_probes_collection():
    params = {"params": {"probe": {"kernel": jnp.ones(3)}}}
    for variables in (params, params["params"]):
        ours = nn.overwriting(optax.adam(1.0)).init(variables)
        chex.assert_trees_all_equal(ours, optax.adam(1.0).init(variables))


def test_the_optimizer_of_one_model_sees_its_parameters_as_they_were(initial):
    for variables in (initial, core.freeze(initial)):
        ours = nn.overwriting(optax.adam(1e-2)).init(variables)
        rest, _ = core.pop(variables, OVERWRITE_WITH_GRADIENT)
        chex.assert_trees_all_equal(ours, optax.adam(1e-2).init(rest))
        assert jax.tree.structure(ours) == jax.tree.structure(
            optax.adam(1e-2).init(rest)
        )


def test_bad_scales_of_two_models_are_named(initial):
    ruined = train(WRONG["adam"], train(nn.overwriting(optax.sgd(0.0)), initial, 1), 1)
    both = {"user": initial, "item": ruined}
    with pytest.raises(ValueError, match="at site 'item/dense_0' is"):
        nn.check_scales(both)
    with pytest.raises(ValueError, match="at site '1/dense_0' is"):
        nn.check_scales([initial, ruined])
