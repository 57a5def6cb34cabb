import chex
import jax
import jax.numpy as jnp
import pytest

from loka_jax import fp8, scaling
from loka_jax.recipe import Cast, GemmRecipe, Recipe

H = 3
CAST = Cast(dtype=fp8.E4M3, scaling="delayed")
G_CAST = Cast(dtype=fp8.E5M2, scaling="delayed")


def make_recipe(**changes):
    """Returns a delayed recipe with a history of three steps and no margin."""
    fields = dict(
        name="delayed",
        fwd=GemmRecipe(first=CAST, second=CAST),
        dlhs=GemmRecipe(first=G_CAST, second=CAST),
        amax_history_length=H,
        margin=0,
    )
    return Recipe(**(fields | changes))


RECIPE = make_recipe()
LEAST = 2.0**-125  # the factor of amax 0


def after(*steps, recipe=RECIPE):
    """Returns the state after steps with these amaxes of (lhs, rhs, g)."""
    state = scaling.init_delayed(recipe)
    for amaxes in steps:
        state = scaling.update_delayed(state, jnp.float32(amaxes), recipe)
    return state


def test_history_and_scales_of_five_steps_by_hand():
    lhs = [448.0, 100.0, 896.0, 1.0, 2.0]
    rhs = [1.0, 0.0, 0.0, 0.0, 0.5]
    g = [57344.0, 57345.0, 7.0, 7.0, 7.0]
    # 448 / 448 = 1, 448 / 896 = 1/2; the 896 stays in a window of 3.
    lhs_scale_inv = [1.0, 1.0, 2.0, 2.0, 2.0]
    # 448 / 1 -> 256; forgotten after three steps of zeros; 448 / 0.5 -> 512.
    rhs_scale_inv = [1 / 256, 1 / 256, 1 / 256, LEAST, 1 / 512]
    # 57344 / 7 = 8192, exactly.
    g_scale_inv = [1.0, 2.0, 2.0, 2.0, 1 / 8192]
    state = scaling.init_delayed(RECIPE)
    chex.assert_trees_all_equal(state.scale_inv, jnp.full(3, LEAST))
    chex.assert_trees_all_equal(state.amax_history, jnp.zeros((3, H)))
    for step in range(5):
        amaxes = jnp.float32([lhs[step], rhs[step], g[step]])
        state = scaling.update_delayed(state, amaxes, RECIPE)
        expected = [lhs_scale_inv[step], rhs_scale_inv[step], g_scale_inv[step]]
        chex.assert_trees_all_equal(state.scale_inv, jnp.float32(expected))
        window = [(x[: step + 1][::-1] + [0.0] * H)[:H] for x in (lhs, rhs, g)]
        chex.assert_trees_all_equal(state.amax_history, jnp.float32(window))


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_non_finite_amax_leaves_its_row_as_it_was(bad):
    before = after([1, 2, 3])
    state = scaling.update_delayed(before, jnp.float32([4, bad, 6]), RECIPE)
    chex.assert_trees_all_equal(state.table[1], before.table[1])
    chex.assert_trees_all_equal(state.amax_history[::2, 0], jnp.float32([4, 6]))


def test_margin_doubles_the_factor_for_every_bit():
    with_margin = after([3, 3, 3], recipe=make_recipe(margin=2))
    chex.assert_trees_all_equal(with_margin.scale_inv, 4 * after([3, 3, 3]).scale_inv)


def test_an_operand_of_zeros_stays_uninitialized():
    assert not scaling.scales_initialized(after([1, 0, 1]))
    assert scaling.scales_initialized(after([1, 0, 1], [1, 1, 1]))


def test_a_stored_scale_is_used_whatever_this_step_brings():
    state = after([448, 1, 1])
    scale_inv = scaling.delayed_scale_inv(state, "lhs", jnp.float32(1e9), CAST, RECIPE)
    assert scale_inv == 1


def test_before_the_first_amax_the_current_one_gives_the_scale():
    state = after([448, 0, 1])
    scale_inv = scaling.delayed_scale_inv(state, "rhs", jnp.float32(896), CAST, RECIPE)
    assert scale_inv == 2


def test_initialized_operands_of_zeros_count_as_zero_once_more():
    initialized = make_recipe(scales_initialized=True)
    state = after([448, 0, 1])
    x = jnp.float32([0, 3, -896])
    scale_inv = scaling.delayed_scale_inv(state, "rhs", fp8.amax(x), CAST, initialized)
    y = fp8.cast(x, scale_inv, CAST.dtype).dequantize()
    chex.assert_trees_all_close(y, jnp.zeros(3), atol=1e-30)


def test_merging_microbatches_equals_one_step_with_the_larger_amaxes():
    before = after([1, 2, 3], [5, 1, 1])
    parts = [(7, 1, 2e-9), (2, 8, 1e-9)]
    a, b = (scaling.update_delayed(before, jnp.float32(p), RECIPE) for p in parts)
    whole = scaling.update_delayed(before, jnp.float32([7, 8, 2e-9]), RECIPE)
    chex.assert_trees_all_equal(scaling.merge_delayed(a, b), whole)


@pytest.mark.parametrize("other", [0.0, jnp.nan])
def test_a_microbatch_that_saw_nothing_does_not_touch_a_tiny_scale(other):
    # Gradients are tiny: a scale of 1 from the other microbatch would flush them all.
    a, b = after([1, 1, 1e-9]), after([1, 1, other])
    chex.assert_trees_all_equal(scaling.merge_delayed(a, b), a)


def test_the_state_is_one_float32_array_that_passes_through_jit():
    update = jax.jit(scaling.update_delayed, static_argnames="recipe")
    state = update(scaling.init_delayed(RECIPE), jnp.ones(3), RECIPE)
    chex.assert_shape(jax.tree.leaves(state), (3, 1 + H))
    chex.assert_trees_all_equal(state, after([1, 1, 1]))
