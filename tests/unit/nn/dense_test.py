import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from flax.training import train_state

from loka_jax import nn, scaling
from loka_jax.nn import OVERWRITE_WITH_GRADIENT, Dense, Fp8DotGeneral
from loka_jax.recipe import RECIPES, get_recipe
from tests import support
from tests.support.stand_ins import xla_matmul

DELAYED = "fp8_tensorwise_delayed"


def init(module, *args):
    return jax.jit(module.init)(jax.random.key(0), *args)


def states(variables):
    """Returns the scaling states of all sites."""
    return jax.tree.leaves(variables[OVERWRITE_WITH_GRADIENT])


# Dense.


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_dense_layer_is_its_product_plus_its_bias(recipe):
    layer = Dense(32, recipe=recipe, bias_init=linen.initializers.normal())
    x = support.normal(16, 64)
    variables = init(layer, x)
    params = variables["params"]
    chex.assert_shape((params["kernel"], params["bias"]), ((64, 32), (32,)))
    recipe = get_recipe(recipe)
    dtype = recipe.compute_dtype
    state = scaling.init_delayed(recipe) if recipe.is_delayed else None
    product = xla_matmul(recipe)(x.astype(dtype), params["kernel"], state)
    expected = product.astype(jnp.float32) + params["bias"][None, :]
    chex.assert_trees_all_equal(layer.apply(variables, x), expected.astype(dtype))


def test_the_gradient_of_a_bias_is_summed_in_float32():
    layer, rows = Dense(8, recipe="bf16"), 1 << 14
    x = support.normal(rows, 16)
    variables = init(layer, x)
    g = support.normal(rows, 8, seed=1).astype(jnp.bfloat16)

    # Not jitted: within a program XLA for CPUs drops roundings to bfloat16.
    def gradient(params, g):
        return jax.vjp(lambda p: layer.apply({"params": p}, x), params)[1](g)[0]

    ours = np.asarray(gradient(variables["params"], g)["bias"], np.float64)
    exact = np.asarray(g, np.float64).sum(axis=0)
    bound = support.sum_error(rows, np.abs(np.asarray(g, np.float64)).sum(axis=0))
    assert np.all(np.abs(ours - exact) <= bound)
    # 2^14 + 1 is no bfloat16.
    ones = jnp.ones((rows, 8), jnp.bfloat16).at[0].set(2)
    summed = gradient(variables["params"], ones)["bias"]
    np.testing.assert_array_equal(summed, np.full(8, rows + 1, np.float32))


def test_a_dense_layer_keeps_its_leading_dims():
    x = support.normal(2, 8, 64)
    y, _ = Dense(32, recipe="fp8_rowwise").init_with_output(jax.random.key(0), x)
    chex.assert_shape(y, (2, 8, 32))
    chex.assert_type(y, jnp.bfloat16)


# Roundings of the products of two parts and of their sum; FP8 reads the whole rows.
@pytest.mark.parametrize(
    "recipe, limit", [("f32", 1e-6), ("bf16", 3 * 2.0**-9), ("fp8_rowwise", 0.0)]
)
def test_parts_of_rows_are_multiplied_as_the_rows_are(recipe, limit):
    layer = Dense(32, recipe=recipe)
    parts = support.normal(16, 13), support.normal(16, 51, seed=1)
    whole = jnp.concatenate(parts, axis=1)
    variables = init(layer, whole)
    chex.assert_trees_all_equal(init(layer, parts), variables)

    def results(x):
        def loss(params, x):
            y = layer.apply({**variables, "params": params}, x)
            return jnp.sum(jnp.float32(y) ** 2), y

        grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (_, y), (dparams, dx) = grad(variables["params"], x)
        dx = jnp.concatenate(dx, axis=1) if isinstance(dx, tuple) else dx
        return y, dparams["kernel"], dx

    for ours, theirs in zip(results(parts), results(whole), strict=True):
        ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
        # Gradients have the rounding of y besides.
        assert np.linalg.norm(ours - theirs) <= 2 * limit * np.linalg.norm(theirs)
    sites = [nn.list_sites(layer, x) for x in (parts, whole)]
    assert sites[0] == sites[1] and sites[0][0].spec.k == 64


def test_parameters_are_those_of_a_flax_dense():
    x = jnp.ones((16, 64))
    ours = Dense(32, recipe=DELAYED).init(jax.random.key(0), x)["params"]
    flax = linen.Dense(32).init(jax.random.key(0), x)["params"]
    chex.assert_trees_all_equal(ours, flax)


def test_without_bias_there_is_only_a_kernel():
    variables = init(Dense(32, use_bias=False), jnp.ones((16, 64)))
    assert set(variables["params"]) == {"kernel"}


@pytest.mark.parametrize(
    "recipe, features, has_state",
    [
        (DELAYED, 32, True),
        (DELAYED, 33, False),  # can never be FP8
        ("fp8_tensorwise", 32, False),
        ("bf16", 32, False),
    ],
)
def test_only_delayed_fp8_sites_have_a_state(recipe, features, has_state):
    # Initialized with one row, as models often are.
    variables = init(Dense(features, recipe=recipe), jnp.ones((1, 64)))
    assert (OVERWRITE_WITH_GRADIENT in variables) == has_state


def test_a_delayed_site_that_cannot_be_fp8_runs_as_bf16():
    x = support.normal(16, 64)
    variables = init(Dense(33, recipe=DELAYED), x)
    bf16 = Dense(33, recipe="bf16").apply(variables, x)
    chex.assert_trees_all_equal(Dense(33, recipe=DELAYED).apply(variables, x), bf16)


def test_evaluation_leaves_the_state_alone():
    layer, x = Dense(32, recipe=DELAYED), support.normal(16, 64)
    variables = init(layer, x)
    _, updated = layer.apply(variables, x, mutable=[OVERWRITE_WITH_GRADIENT])
    chex.assert_trees_all_equal(states(updated), states(variables))


def test_remat_of_a_delayed_layer_changes_nothing():
    x = support.normal(16, 64)

    def gradients(cls):
        layer = cls(32, recipe=DELAYED, name="layer")
        variables = init(layer, x)
        # Relu, for it rounds nothing: XLA may leave bfloat16 roundings out of fusions.
        loss = lambda v: jnp.sum(  # noqa: E731
            jax.nn.relu(layer.apply(v, x)).astype(jnp.float32)
        )
        return jax.jit(jax.grad(loss))(variables)

    chex.assert_trees_all_equal(gradients(linen.remat(Dense)), gradients(Dense))


# Fp8DotGeneral.


@pytest.mark.parametrize("recipe", ["f32", "fp8_tensorwise", "fp8_rowwise"])
def test_inside_a_flax_dense_it_does_what_our_dense_does(recipe):
    dtype = get_recipe(recipe).compute_dtype
    x = support.normal(16, 64, dtype=dtype)
    product = functools.partial(Fp8DotGeneral, recipe=recipe)
    flax = linen.Dense(32, dtype=dtype, dot_general_cls=product)
    variables = init(flax, x)
    # Flax's hands over a kernel in the compute dtype, ours is float32.
    kernel = variables["params"]["kernel"].astype(dtype).astype(jnp.float32)
    params = variables["params"] | {"kernel": kernel}
    ours = Dense(32, recipe=recipe).apply({"params": params}, x)
    chex.assert_trees_all_equal(flax.apply(variables, x), ours)


@pytest.mark.parametrize(
    "features, axis, shape",
    [((4, 8), -1, (16, 4, 8)), (32, (-2, -1), (32,)), (8, (0, 2), (2, 8))],
)
def test_inside_a_dense_general_it_contracts_the_same_dims(features, axis, shape):
    x = support.normal(16, 2, 8) if axis != -1 else support.normal(16, 64)
    shape = (16, *shape) if axis == (-2, -1) else shape
    make = functools.partial(linen.DenseGeneral, features, axis=axis)
    variables = init(make(), x)
    f32 = make(dot_general_cls=functools.partial(Fp8DotGeneral, recipe="f32"))
    y = f32.apply(variables, x)
    chex.assert_shape(y, shape)
    chex.assert_trees_all_close(y, make().apply(variables, x), rtol=1e-5, atol=1e-5)


def test_results_have_the_common_dtype_of_the_operands():
    layer = linen.Dense(32, dot_general_cls=Fp8DotGeneral)
    y, _ = layer.init_with_output(jax.random.key(0), jnp.ones((16, 64)))
    assert y.dtype == jnp.float32


def test_batched_products_run_in_their_own_dtype():
    lhs, rhs = support.normal(2, 16, 32), support.normal(2, 32, 16, seed=1)
    dims = (((2,), (1,)), ((0,), (0,)))
    y = Fp8DotGeneral().apply({}, lhs, rhs, dims)
    chex.assert_trees_all_equal(y, jax.lax.dot_general(lhs, rhs, dims))


# Training.


class Tower(linen.Module):
    """Two delayed sites of ours and one inside a Flax layer."""

    @linen.compact
    def __call__(self, x):
        x = jax.nn.relu(Dense(32, recipe=DELAYED)(x))
        x = nn.Mlp((32,), recipe=DELAYED, norm="layer")(x)
        product = functools.partial(Fp8DotGeneral, recipe=DELAYED)
        return linen.Dense(16, dtype=jnp.bfloat16, dot_general_cls=product)(x)


def test_flax_train_state_replaces_the_state_and_optimizes_only_parameters():
    x, tower = support.normal(32, 64), Tower()
    variables = init(tower, x)
    # A clip and a decay that would ruin the state if they saw it.
    optimizer = optax.chain(
        optax.clip_by_global_norm(1e-3),
        optax.add_decayed_weights(0.1),
        optax.sgd(1e-2, momentum=0.9),
    )
    state = train_state.TrainState.create(
        apply_fn=tower.apply, params=variables, tx=optimizer
    )

    @jax.jit
    def step(state, x):
        loss = lambda v: jnp.mean(tower.apply(v, x).astype(jnp.float32) ** 2)  # noqa: E731
        gradients = jax.grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), gradients

    initial = states(state.params)
    for i in range(2):
        state, gradients = step(state, x * (i + 1))
        chex.assert_trees_all_equal(states(state.params), states(gradients))
    assert len(initial) == 3
    for before, after in zip(initial, states(state.params), strict=True):
        # Every scale and both amaxes of every operand have moved (MaxText #5021).
        assert np.all(np.asarray(before)[:, :3] != np.asarray(after)[:, :3])
    momentum = state.opt_state[2][0].trace
    chex.assert_trees_all_equal_structs(momentum, state.params["params"])


def test_scaling_states_are_one_array_a_site():
    variables = init(Tower(), jnp.ones((32, 64)))
    chex.assert_shape(states(variables), [(3, 17)] * 3)
