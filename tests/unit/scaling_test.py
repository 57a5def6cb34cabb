import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import fp8, scaling
from loka_jax.recipe import Cast, GemmRecipe, Recipe

H = 3
CAST = Cast(dtype=fp8.E4M3, scaling="delayed")


def make_recipe(**changes):
    """Returns a delayed recipe with a history of three steps and no margin."""
    fields = dict(
        name="delayed",
        fwd=GemmRecipe(first=CAST, second=CAST),
        dlhs=GemmRecipe(first=CAST, second=CAST),
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
    lhs = [448.0, 100.0, 896.0, 50.0, 60.0]
    rhs = [1.0, 0.0, 0.0, 0.0, 0.5]
    g = [448.0, 449.0, 7.0, 7.0, 7.0]
    # 448 / 448 = 1, 448 / 896 = 1/2; the 896 stays in a window of 3.
    lhs_scale_inv = [1.0, 1.0, 2.0, 2.0, 2.0]
    # 448 / 1 -> 256; forgotten after three steps of zeros; 448 / 0.5 -> 512.
    rhs_scale_inv = [1 / 256, 1 / 256, 1 / 256, LEAST, 1 / 512]
    # 448 / 7 = 64, exactly.
    g_scale_inv = [1.0, 2.0, 2.0, 2.0, 1 / 64]
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


# As the shipped delayed recipes: a history of 16 steps, a margin of one bit.
LONG = make_recipe(amax_history_length=16, margin=1)
OUTLIER = 999_999.0


def states_of(amaxes, recipe=LONG):
    """Yields the state after each step; all operands have the same amaxes."""
    update = jax.jit(scaling.update_delayed, static_argnames="recipe")
    state = scaling.init_delayed(recipe)
    for amax in amaxes:
        state = update(state, jnp.full(3, amax, jnp.float32), recipe)
        yield state


# Below the level of lhs, rhs and g: the bits of normal numbers that no outlier takes.
LEAST_BITS = jnp.float32([2**-10, 2**-10, 2**-3])


def largest(state):
    """Returns the largest magnitudes of lhs, rhs and g that the scales do not clip."""
    return state.scale_inv * jnp.float32(448)


def smallest(state):
    """Returns the smallest magnitudes that keep all mantissa bits."""
    return state.scale_inv * jnp.float32(2**-6)


@pytest.mark.parametrize(
    "are_outliers",
    [
        pytest.param(lambda step: step == 10, id="one"),
        pytest.param(lambda step: step % 15 == 10, id="one in 15 steps"),
        pytest.param(lambda step: step % 4 == 2, id="one in 4 steps"),
        pytest.param(lambda step: step % 6 > 3, id="two in a row"),
        pytest.param(lambda step: 10 <= step < 14, id="four in a row"),
    ],
)
def test_values_keep_their_precision_next_to_outliers(are_outliers):
    amaxes = [OUTLIER if are_outliers(step) else 1.0 for step in range(48)]
    for state in list(states_of(amaxes))[10:]:
        assert np.all(largest(state) >= 2)
        assert np.all(smallest(state) <= LEAST_BITS)


def test_an_outlier_in_the_first_step_is_forgotten():
    *_, state = states_of([OUTLIER, 1, 1, 1, 1, 1])
    assert np.all(smallest(state) <= LEAST_BITS)


def test_scales_follow_the_largest_amax_where_amaxes_are_alike():
    amaxes = np.exp2(np.random.default_rng(0).uniform(0, 3.8, 64)).astype(np.float32)
    for step, state in enumerate(states_of(amaxes)):
        amax = np.max(amaxes[max(0, step - 15) : step + 1])
        expected = fp8.compute_scale_inv(jnp.float32(amax), fp8.E4M3, margin=1)
        assert state.scale_inv[0] == expected


def test_a_jump_that_stays_is_followed_within_five_steps():
    states = list(states_of([1.0] * 20 + [1e4] * 5 + [1e4] * 16))
    assert largest(states[23])[0] < 1e4  # four steps could be outliers
    assert np.all(largest(states[24]) >= 2e4)
    expected = next(states_of([1e4])).scale_inv
    chex.assert_trees_all_equal(states[-1].scale_inv, expected)


def test_growth_of_90_percent_a_step_is_never_clipped():
    amaxes = 1e-3 * 1.9 ** np.arange(40)
    states = list(states_of(amaxes))
    for state, following in zip(states[:-1], amaxes[1:], strict=True):
        assert np.all(largest(state) >= following)


@pytest.mark.parametrize("low", [0.0, 1e-6])
def test_steps_of_small_amaxes_do_not_clip_the_next(low):
    # For example steps with little gradient, or batches of few nonzero features.
    amaxes = [low if step % 8 > 4 else 1.0 for step in range(48)]
    for state in list(states_of(amaxes))[5:]:
        assert np.all(largest(state) >= 2)


def test_gradients_of_rare_clicks_are_no_outliers():
    # A batch with a click has amaxes far above the others'.
    amaxes = [1.0 if step % 7 == 0 else 1e-3 for step in range(32)]
    for state in list(states_of(amaxes))[7:]:
        assert largest(state)[2] >= 2


def test_gradients_without_a_click_are_not_flushed():
    *_, state = states_of([1.0 if step % 7 == 0 else 1e-3 for step in range(32)])
    scale_inv = state.scale_inv[2]
    x = jnp.float32(1e-3) * jnp.float32([1.0, -0.5, 0.25, 1 / 16])
    error = fp8.cast(x, scale_inv, fp8.E4M3).dequantize() - x
    assert np.all(np.abs(error) <= np.abs(x) / 4)


@pytest.mark.parametrize("length", [1, 2, 4])
def test_short_histories_follow_their_amaxes(length):
    recipe = make_recipe(amax_history_length=length, margin=1)
    *_, state = states_of([1.0] * 4 + [8.0] * length, recipe)
    chex.assert_trees_all_equal(state.scale_inv, next(states_of([8.0])).scale_inv)


def test_a_large_margin_never_clips_what_was_held():
    *_, state = states_of([1.0] * 16, make_recipe(margin=8))
    assert np.all(largest(state) >= 2**8)


def test_merging_microbatches_of_which_one_has_an_outlier_equals_one_step():
    *_, before = states_of([1, 2, 1, 3, 1, 2])
    parts = [(OUTLIER, 1, 2), (2, 8, OUTLIER)]
    a, b = (scaling.update_delayed(before, jnp.float32(p), LONG) for p in parts)
    amaxes = jnp.float32([OUTLIER, 8, OUTLIER])
    whole = scaling.update_delayed(before, amaxes, LONG)
    chex.assert_trees_all_equal(scaling.merge_delayed(a, b), whole)
