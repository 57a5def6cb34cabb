"""The site product by itself: values, gradients, shapes, state."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import scaling
from loka_jax.recipe import RECIPES, Recipe, get_recipe
from tests import support
from tests.support import oracle
from tests.support.stand_ins import xla_matmul

FP8 = [name for name in RECIPES if name.startswith("fp8")]
DELAYED = [name for name in RECIPES if get_recipe(name).is_delayed]
every_recipe = pytest.mark.parametrize("name", RECIPES)


def operands(m, k, n, dtype=jnp.bfloat16):
    """Returns lhs and g in `dtype`, and a float32 rhs: (lhs, rhs, g)."""
    return (
        support.normal(m, k, dtype=dtype),
        support.normal(k, n, seed=1) / k**0.5,
        support.normal(m, n, seed=2, dtype=dtype),
    )


def uneven(x):
    """Returns `x` with rows, and columns, of sizes from 1 to 1e-6."""
    sizes = [np.logspace(0, -6, n, dtype=np.float32) for n in x.shape]
    return (x.astype(jnp.float32) * np.outer(*sizes)).astype(x.dtype)


def initial(recipe):
    return scaling.init_delayed(recipe) if recipe.is_delayed else None


@functools.partial(jax.jit, static_argnames="recipe")
def three_products(lhs, rhs, g, state, *, recipe: Recipe):
    """Returns (out, dlhs, drhs) and the next state."""
    out, vjp = jax.vjp(xla_matmul(recipe), lhs, rhs, state)
    *gradients, state = vjp(g.astype(out.dtype))
    return (out, *gradients), state


def run(name, lhs, rhs, g):
    recipe = get_recipe(name)
    return three_products(lhs, rhs, g, initial(recipe), recipe=recipe)


# Is it right?


@every_recipe
@pytest.mark.parametrize("sizes", [(32, 64, 16), (144, 272, 160), (127, 271, 257)])
def test_products_are_exact_products_of_the_rounded_operands(name, sizes):
    # Under power-of-two scales all granularities round alike, until values underflow.
    lhs, rhs, g = (uneven(x) for x in operands(*sizes, get_recipe(name).compute_dtype))
    products, _ = run(name, lhs, rhs, g)
    references = (
        oracle.products(name, lhs, rhs, g),
        oracle.magnitudes(name, lhs, rhs, g),
    )
    for x, expected, magnitude in zip(products, *references, strict=True):
        # Half an ulp of the result's dtype, and float32 summation.
        ulp = float(jnp.finfo(x.dtype).eps)
        error = np.abs(np.asarray(x, np.float64) - expected)
        bound = support.sum_error(max(sizes), magnitude)
        assert np.all(error <= 0.51 * ulp * np.abs(expected) + bound)


@every_recipe
def test_results_have_the_dtypes_that_training_needs(name):
    recipe = get_recipe(name)
    lhs, rhs, g = operands(16, 32, 16, dtype=recipe.compute_dtype)
    (out, dlhs, drhs), _ = run(name, lhs, rhs, g)
    assert out.dtype == dlhs.dtype == recipe.compute_dtype
    assert drhs.dtype == jnp.float32


# Is FP8 good enough?


@pytest.mark.parametrize("name", FP8)
def test_products_keep_their_sqnr(name):
    lhs, rhs, g = operands(256, 256, 256)
    products, _ = run(name, lhs, rhs, g)
    exact = oracle.products("f32", lhs, rhs, g)
    for ref, x in zip(exact, products, strict=True):
        assert support.sqnr_db(ref, x) > support.FLOOR_DB["e4m3_x_e4m3"]


@pytest.mark.parametrize("name", ["fp8_rowwise", "fp8_blockwise"])
def test_rows_of_any_size_keep_their_precision(name):
    lhs, rhs, g = operands(256, 256, 256)
    lhs = support.uneven_rows(256, 256).astype(jnp.bfloat16)
    g = support.uneven_rows(256, 256, seed=2).astype(jnp.bfloat16)
    (out, dlhs, _), _ = run(name, lhs, rhs, g)
    ref_out, ref_dlhs, _ = oracle.products("f32", lhs, rhs, g)
    # A single row of 256 scatters by about 1 dB around the floor's 2.
    floor = support.FLOOR_DB["e4m3_x_e4m3"] - 1
    assert support.sqnr_db(ref_out, out, axis=1).min() > floor
    assert support.sqnr_db(ref_dlhs, dlhs, axis=1).min() > floor


def test_features_of_any_size_keep_the_precision_of_their_weight_gradients():
    lhs, rhs, g = operands(256, 256, 256)
    lhs = support.uneven_rows(256, 256).T.astype(jnp.bfloat16)
    (_, _, drhs), _ = run("fp8_rowwise", lhs, rhs, g)
    *_, ref = oracle.products("f32", lhs, rhs, g)
    worst = support.sqnr_db(ref, drhs, axis=1).min()
    assert worst > support.FLOOR_DB["e4m3_x_e4m3"] - 1


def test_tensorwise_flushes_small_rows():
    lhs, rhs, g = operands(256, 256, 256)
    lhs = support.uneven_rows(256, 256).astype(jnp.bfloat16)
    (out, _, _), _ = run("fp8_tensorwise", lhs, rhs, g)
    ref, _, _ = oracle.products("f32", lhs, rhs, g)
    assert support.sqnr_db(ref, out, axis=1).min() < 1


# Shapes.


@pytest.mark.parametrize("name", ["fp8_tensorwise_delayed", "fp8_rowwise_bf16_drhs"])
@pytest.mark.parametrize("sizes", [(30, 64, 32), (32, 60, 32), (32, 64, 1)])
def test_sizes_that_fp8_cannot_take_run_exactly_as_bf16(name, sizes):
    lhs, rhs, g = operands(*sizes)
    products, state = run(name, lhs, rhs, g)
    expected, _ = run("bf16", lhs, rhs, g)
    chex.assert_trees_all_equal(products, expected)
    chex.assert_trees_all_equal(state, initial(get_recipe(name)))


@every_recipe
def test_an_empty_batch_has_a_zero_weight_gradient(name):
    lhs, rhs, g = operands(0, 32, 16, dtype=get_recipe(name).compute_dtype)
    (out, dlhs, drhs), _ = run(name, lhs, rhs, g)
    chex.assert_shape((out, dlhs), ((0, 16), (0, 32)))
    chex.assert_trees_all_equal(drhs, jnp.zeros((32, 16)))


# Transformations.


@pytest.mark.parametrize("name", ["fp8_tensorwise_delayed", "fp8_rowwise_bf16_drhs"])
def test_eager_and_jitted_products_are_equal(name):
    lhs, rhs, g = operands(32, 64, 16)
    recipe = get_recipe(name)
    eager = three_products.__wrapped__(lhs, rhs, g, initial(recipe), recipe=recipe)
    # Bar the order of float32 summation.
    chex.assert_trees_all_close(run(name, lhs, rhs, g), eager, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["fp8_tensorwise", "fp8_blockwise"])
def test_vmap_equals_a_loop(name):
    lhs, rhs, g = (jnp.stack([x, 3 * x]) for x in operands(32, 64, 16))
    products, _ = jax.vmap(functools.partial(run, name))(lhs, rhs, g)
    for i in range(2):
        expected, _ = run(name, lhs[i], rhs[i], g[i])
        chex.assert_trees_all_equal(jax.tree.map(lambda x: x[i], products), expected)  # noqa: B023


@pytest.mark.parametrize("name", ["fp8_tensorwise_delayed", "fp8_rowwise_bf16_drhs"])
def test_remat_changes_nothing(name):
    recipe = get_recipe(name)
    lhs, rhs, g = operands(32, 64, 16)
    product = xla_matmul(recipe)

    def gradients(f):
        # Relu, for it rounds nothing: XLA may leave bfloat16 roundings out of fusions.
        def loss(*args):
            return jnp.sum((jax.nn.relu(f(*args)) * g).astype(jnp.float32))

        args = (lhs, rhs, initial(recipe))
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*args)

    chex.assert_trees_all_equal(gradients(jax.checkpoint(product)), gradients(product))


# State.


@pytest.mark.parametrize("name", DELAYED)
def test_the_gradient_of_the_state_is_its_next_value(name):
    recipe = get_recipe(name)
    lhs, rhs, g = operands(32, 64, 16)
    state = initial(recipe)
    for step in range(3):
        amaxes = jnp.stack(
            [jnp.max(jnp.abs(x)).astype(jnp.float32) for x in (lhs, rhs, g)]
        )
        expected = scaling.update_delayed(state, amaxes, recipe)
        _, state = three_products(lhs, rhs, g, state, recipe=recipe)
        chex.assert_trees_all_equal(state, expected)
        lhs, g = lhs * 2, g / (step + 3)


@pytest.mark.parametrize("name", DELAYED)
def test_later_steps_cast_with_the_scale_of_the_history(name):
    recipe = get_recipe(name)
    lhs, rhs, g = operands(32, 64, 16)
    _, state = run(name, lhs, rhs, g)
    # 100 times what the history has seen: clipped, as the stored scale says.
    (out, _, _), _ = three_products(100 * lhs, rhs, g, state, recipe=recipe)
    amax = [np.abs(np.asarray(x, np.float64)).max() for x in (lhs, rhs)]
    cast = functools.partial(support.cast_with_amax, dtype=support.E4M3, margin=1)
    expected = cast(100 * lhs, amax[0]) @ cast(rhs, amax[1])
    np.testing.assert_allclose(
        np.asarray(out, np.float64), expected, rtol=2**-8, atol=1e-4
    )


@pytest.mark.parametrize("name", DELAYED)
def test_a_first_step_neither_clips_nor_flushes(name):
    recipe = get_recipe(name)
    lhs, rhs, g = operands(256, 256, 256)
    lhs, g = lhs * 1e4, g * 1e-9
    exact = oracle.products("f32", lhs, rhs, g)
    state, steps = initial(recipe), []
    for _ in range(3):
        products, state = three_products(lhs, rhs, g, state, recipe=recipe)
        steps.append(jax.tree.map(support.sqnr_db, exact, products))
    assert np.all(np.array(steps) > support.FLOOR_DB["e4m3_x_e4m3"])
    assert np.all(np.array(steps[0]) > np.array(steps[2]) - 0.5)


@pytest.mark.parametrize("name", DELAYED)
def test_initialized_steps_equal_guarded_ones(name):
    lhs, rhs, g = operands(32, 64, 16)
    _, state = run(name, lhs, rhs, g)
    guarded = three_products(lhs, rhs, g, state, recipe=get_recipe(name))
    recipe = get_recipe(f"{name}:initialized")
    chex.assert_trees_all_equal(
        three_products(lhs, rhs, g, state, recipe=recipe), guarded
    )


@pytest.mark.parametrize("name", FP8)
def test_a_nan_is_seen_in_the_output(name):
    lhs, rhs, g = operands(32, 64, 16)
    (out, _, _), _ = run(name, lhs.at[3, 5].set(jnp.nan), rhs, g)
    assert jnp.all(jnp.isnan(out[3]))


@pytest.mark.parametrize("name", DELAYED)
def test_a_nan_never_enters_the_history(name):
    recipe = get_recipe(name)
    lhs, rhs, g = operands(32, 64, 16)
    _, before = run(name, lhs, rhs, g)
    bad = lhs.at[3, 5].set(jnp.nan)
    (out, _, _), after = three_products(bad, rhs, g, before, recipe=recipe)
    assert jnp.all(jnp.isnan(out[3])) and jnp.all(jnp.isfinite(out[4:]))
    chex.assert_trees_all_equal(after.table[0], before.table[0])
    chex.assert_tree_all_finite(after)


def test_microbatches_merged_by_their_maximum_give_the_history_of_one_batch():
    recipe = get_recipe("fp8_tensorwise_delayed")
    lhs, rhs, g = operands(128, 64, 16)
    g = g * jnp.bfloat16(1e-6)
    _, before = run(recipe.name, 2 * lhs, rhs, g)

    def microbatch(merged, part):
        _, state = three_products(part[0], rhs, part[1], before, recipe=recipe)
        return scaling.merge_delayed(merged, state), None

    parts = (lhs.reshape(4, 32, 64), g.reshape(4, 32, 16))
    nothing = jax.tree.map(jnp.zeros_like, before)
    merged, _ = jax.lax.scan(microbatch, nothing, parts)
    _, whole = three_products(lhs, rhs, g, before, recipe=recipe)
    chex.assert_trees_all_equal(merged, whole)


def test_a_donated_state_is_overwritten():
    recipe = get_recipe("fp8_tensorwise_delayed")
    step = jax.jit(
        lambda state, *args: three_products(*args, state, recipe=recipe)[1],
        donate_argnums=0,
    )
    args = operands(32, 64, 16)
    old = initial(recipe)
    new = step(old, *args)
    assert old.table.is_deleted()
    chex.assert_trees_all_equal(new, run(recipe.name, *args)[1])


def test_a_delayed_recipe_without_a_state_is_refused():
    lhs, rhs, _ = operands(16, 16, 16)
    with pytest.raises(ValueError, match="needs a delayed-scaling state"):
        xla_matmul(get_recipe("fp8_tensorwise_delayed"))(lhs, rhs)


def test_a_state_without_a_delayed_recipe_is_refused():
    lhs, rhs, _ = operands(16, 16, 16)
    state = scaling.init_delayed(get_recipe("fp8_tensorwise_delayed"))
    with pytest.raises(ValueError, match="takes no delayed-scaling state"):
        xla_matmul(get_recipe("fp8_tensorwise"))(lhs, rhs, state)
