import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import fp8, maxima, scaling
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
LEAST = maxima.SMALLEST  # the factor of an operand without an amax


init = jax.jit(scaling.init_delayed, static_argnames="recipe")
compiled = jax.jit(scaling.update_delayed, static_argnames="recipe")


def update(state, amaxes, recipe=RECIPE):
    """Returns the state after a step with these amaxes of (lhs, rhs, g)."""
    return compiled(state, np.float32(amaxes), recipe)


def after(*steps, recipe=RECIPE):
    """Returns the state after steps with these amaxes of (lhs, rhs, g)."""
    return functools.reduce(
        functools.partial(update, recipe=recipe), steps, init(recipe)
    )


def read(table):
    """Returns what a table is read as: the factors, and those of the history."""
    state = scaling.DelayedScaling(jnp.asarray(table, jnp.float32))
    return np.concatenate([state.factors[:, None], state.history], axis=1)


def factors(amaxes):
    """Returns the factor of each amax by itself, 0 for 0."""
    amaxes = np.float32(amaxes)
    powers = 2 ** np.ceil(np.log2(np.where(amaxes > 0, amaxes, 1.0) / 448))
    return np.where(amaxes > 0, powers, 0.0).astype(np.float32)


def test_history_and_scales_of_five_steps_by_hand():
    amaxes = np.array(
        [[448.0, 100.0, 896.0, 50.0, 60.0], [1, 0, 0, 0, 0.5], [448, 449, 7, 7, 7]]
    )
    scale_inv = [
        [1.0, 1.0, 2.0, 2.0, 2.0],  # the 896 stays in a window of 3
        # 448 / 1 -> 256; forgotten after three steps of zeros; 448 / 0.5 -> 512.
        [1 / 256, 1 / 256, 1 / 256, LEAST, 1 / 512],
        [1.0, 2.0, 2.0, 2.0, 1 / 64],  # 448 / 7 = 64, exactly
    ]
    state = scaling.init_delayed(RECIPE)
    np.testing.assert_array_equal(state.table, np.zeros_like(state.table))
    assert state.scale_inv.tolist() == [LEAST] * 3
    newest_first = np.pad(amaxes[:, ::-1], ((0, 0), (0, H)))
    for step in range(5):
        state = update(state, amaxes[:, step])
        assert state.scale_inv.tolist() == [own[step] for own in scale_inv]
        window = newest_first[:, 4 - step : 4 - step + H]
        np.testing.assert_array_equal(state.history, factors(window))


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_non_finite_amax_leaves_its_row_as_it_was(bad):
    before = after([1, 2, 3])
    state = update(before, [4, bad, 6])
    chex.assert_trees_all_equal(state.table[1], before.table[1])
    chex.assert_trees_all_equal(state.history[::2, 0], factors([4, 6]))


def test_stored_scales_are_used_whatever_this_step_brings_except_in_first_steps():
    def scale_inv(operand, amax, recipe=RECIPE):
        state, amax = after([448, 0, 1]), jnp.float32(amax)
        return scaling.delayed_scale_inv(state, operand, amax, CAST, recipe)

    assert scale_inv("lhs", 1e9) == 1
    assert scale_inv("rhs", 896) == 2
    # Zeros once more: they say nothing of the next.
    assert scale_inv("rhs", 896, make_recipe(scales_initialized=True)) == LEAST
    assert not scaling.scales_initialized(after([1, 0, 1]))
    assert scaling.scales_initialized(after([1, 0, 1], [1, 1, 1]))


# As the shipped delayed recipes: a history of 16 steps, a margin of one bit.
LONG = make_recipe(amax_history_length=16, margin=1)
OUTLIER = 999_999.0


def states_of(amaxes, recipe=LONG):
    """Yields the state after each step; all operands have the same amaxes."""
    state = init(recipe)
    for amax in amaxes:
        state = update(state, [amax] * 3, recipe)
        yield state


# Below the level of lhs, rhs and g: the bits of normal numbers that no outlier takes.
LEAST_BITS = np.float32([2**-10, 2**-10, 2**-3])


def largest(state):
    """Returns the largest magnitudes of lhs, rhs and g that the scales do not clip."""
    return np.asarray(state.scale_inv) * 448


@pytest.mark.parametrize(
    "are_outliers",
    [
        lambda step: step in (0, 10),
        lambda step: step % 15 == 10,
        lambda step: step % 4 == 2,
        lambda step: step % 6 > 3,  # two in a row
        lambda step: 10 <= step < 14,
    ],
)
def test_values_keep_their_precision_next_to_outliers(are_outliers):
    amaxes = [OUTLIER if are_outliers(step) else 1.0 for step in range(48)]
    states = list(states_of(amaxes))
    assert all(np.all(largest(state) >= 2) for state in states[10:])
    # One in the first step is forgotten. The smallest that keeps all mantissa bits:
    smallest = [np.asarray(state.scale_inv) * 2.0**-6 for state in states[5:]]
    assert np.all(smallest <= LEAST_BITS)


def test_scales_follow_the_largest_amax_where_amaxes_are_alike():
    amaxes = np.exp2(np.random.default_rng(0).uniform(0, 3.8, 64)).astype(np.float32)
    for step, state in enumerate(states_of(amaxes)):
        amax = np.max(amaxes[max(0, step - 15) : step + 1])
        expected = 2.0 ** np.ceil(np.log2(2 * amax / 448))
        assert np.asarray(state.scale_inv)[0] == expected


def test_a_jump_that_stays_is_followed_within_five_steps():
    states = list(states_of([1.0] * 20 + [1e4] * 5 + [1e4] * 16))
    assert largest(states[23])[0] < 1e4  # four steps could be outliers
    assert np.all(largest(states[24]) >= 2e4)
    expected = next(states_of([1e4])).scale_inv
    chex.assert_trees_all_equal(states[-1].scale_inv, expected)


def test_gradients_of_rare_clicks_are_no_outliers_and_others_are_not_flushed():
    # A batch with a click has amaxes far above the others'.
    amaxes = [1.0 if step % 7 == 0 else 1e-3 for step in range(32)]
    scales = [state.scale_inv[2] for state in states_of(amaxes)]
    assert np.all(448 * np.array(scales[7:-1]) >= 2)
    x = jnp.float32(1e-3) * jnp.float32([1.0, -0.5, 0.25, 1 / 16])
    error = fp8.cast(x, scales[-1], fp8.E4M3).dequantize() - x
    assert np.all(np.abs(error) <= np.abs(x) / 4)


@pytest.mark.parametrize("other", [0.0, jnp.nan])
def test_merging_microbatches_equals_one_step(other):
    *_, before = states_of([1, 2, 1, 3, 1, 2])
    parts = [(OUTLIER, 1, 2), (2, 8, OUTLIER)]
    a, b = (update(before, part, LONG) for part in parts)
    whole = update(before, [OUTLIER, 8, OUTLIER], LONG).table
    for merged in (scaling.merge_delayed(a, b).table, (a.table + b.table) / 2):
        np.testing.assert_array_equal(read(merged), read(whole))
    # Gradients are tiny: a scale of 1 from one that saw none would flush them all.
    a, b = after([1, 1, 1e-9]), after([1, 1, other])
    chex.assert_trees_all_equal(scaling.merge_delayed(a, b), a)


def test_amax_ratios_say_how_far_amaxes_reached_into_what_scales_covered():
    # The amaxes before each of the newest two of five steps, whose margin is 2 bits.
    recipe = make_recipe(amax_history_length=6, margin=2)
    history = np.float32([[8, 4, 8, 2, 0, 0], [0, 1, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0]])
    found = jax.jit(lambda x: scaling.amax_ratios(x, recipe, 2))(history)
    expected = [[8 / 32, 4 / 32], [0, 0], [0, 0]]
    np.testing.assert_array_equal(found, expected)


def test_the_smallest_ratio_is_that_of_which_a_cast_leaves_one_bit():
    assert scaling.smallest_ratio("g", RECIPE) == 2**-9 / 448
    wide = Cast(dtype=fp8.E5M2, scaling="delayed")
    gemm = GemmRecipe(first=wide, second=CAST)
    assert scaling.smallest_ratio("g", make_recipe(dlhs=gemm)) == 2**-16 / 57344
    assert scaling.smallest_ratio("g", make_recipe(dlhs=None)) is None


def test_stored_scales_are_those_of_operands_with_a_delayed_cast():
    state = after([448, 896, 1792])
    assert scaling.stored_scales(state, RECIPE) == (None,) * 3  # first steps wait
    initialized = make_recipe(scales_initialized=True, dlhs=None)
    assert scaling.stored_scales(state, initialized) == (1, 2, None)
    assert scaling.stored_scales(None, initialized) == (None,) * 3


def test_contributions_are_updates_of_what_was_measured_and_of_all_examples():
    states = [after([1, 2, 3]), after([4, 5, 6])]
    tables = jnp.stack([state.table for state in states])
    amaxes = jnp.float32([[7, jnp.nan, 1], [2, 8, jnp.inf]])
    found = jax.jit(lambda *args: scaling.contributions(*args, RECIPE))(tables, amaxes)
    updated = np.stack([update(*x).table for x in zip(states, amaxes, strict=True)])
    # Faint where nothing was measured, so that others prevail.
    weights = np.where(np.isfinite(amaxes)[..., None], 1.0, 2.0**-12)
    np.testing.assert_array_equal(found, updated * weights)
    nothing = scaling.contributions(tables, None, RECIPE)
    np.testing.assert_array_equal(nothing, tables * 2.0**-12)
    # Examples that share a table have the largest of their amaxes.
    each = jax.vmap(lambda a: scaling.contributions(tables[0], a, RECIPE))
    shared = jax.jit(each)(jnp.float32([[7, 1, 2], [3, 9, 1]]))
    expected = update(states[0], [7, 9, 2]).table
    np.testing.assert_array_equal(shared, [expected] * 2)


LATER = [
    after([1, 2e-9, 5]).table,
    after([3, 4e-9, 1]).table,
    after([9, 1e-9, 7]).table,
]


@pytest.mark.parametrize(
    "treated",
    [
        *(pytest.param(lambda x, f=f: x * f, id=str(f)) for f in (1 / 48, 2.0**-16)),
        pytest.param(lambda x: x * 2.0**15, id="loss scale"),
        pytest.param(lambda x: np.clip(x, -1, 1), id="clipped"),
        pytest.param(lambda x: jnp.asarray(x, jnp.bfloat16), id="cast"),
    ],
)
def test_what_is_done_to_all_gradients_changes_no_scale(treated):
    for table in map(np.asarray, LATER):
        np.testing.assert_array_equal(read(treated(table)), read(table))


def test_sums_means_and_averages_are_read_as_the_maximum():
    largest = read(after([9, 4e-9, 7]).table)
    np.testing.assert_array_equal(read(sum(LATER)), largest)
    np.testing.assert_array_equal(read(sum(LATER) / 3), largest)
    average = 0.9 * sum(LATER[:2]) + 0.1 * LATER[2]
    factors, exact = read(average)[:, 0], largest[:, 0]
    assert np.all((factors >= exact / 4) & (factors <= exact))
    norm = np.linalg.norm(np.stack(LATER))
    assert norm < 1e-3  # nothing beside gradients


def test_a_use_that_measured_nothing_leaves_the_state_to_others_or_as_it_was():
    before = after([1, 2, 3])
    nothing = scaling.contributions(before.table, None, RECIPE)
    np.testing.assert_array_equal(read(nothing), read(before.table))
    for _ in range(20):  # it never fades away
        nothing = scaling.contributions(nothing, None, RECIPE)
    np.testing.assert_array_equal(read(nothing), read(before.table))
    measured = scaling.contributions(before.table, jnp.float32([0.5] * 3), RECIPE)
    np.testing.assert_array_equal(read(measured + nothing), read(measured))


def test_other_arithmetic_gives_nan():
    adam = -1e-3 * np.sign(LATER[0])
    state = scaling.DelayedScaling(jnp.float32(adam))
    assert np.all(np.isnan(state.scale_inv))


def _next_of_uses(tables, uses):
    """Returns the gradients of tables, given the amaxes of each use of them all."""
    read, pull_back = jax.vjp(lambda x: scaling.uses_of(x, RECIPE), tables)
    given = [scaling.contributions(read, amaxes, RECIPE) for amaxes in uses]
    return read, pull_back(sum(given, jnp.zeros_like(read)))[0]


def test_uses_of_several_states_read_their_factors_and_give_their_next_tables():
    rng = np.random.default_rng(0)
    states = [scaling.init_delayed(RECIPE) for _ in range(3)]
    for _ in range(7):
        amaxes = jnp.asarray(np.exp2(rng.normal(0, 6, (3, 3))), jnp.float32)
        amaxes = amaxes.at[1, 2].set(0.0)
        tables = jnp.stack([x.table for x in states])
        read, after = _next_of_uses(tables, [amaxes])
        np.testing.assert_array_equal(
            scaling.DelayedScaling(read).factors, scaling.DelayedScaling(tables).factors
        )
        states = [
            scaling.update_delayed(x, own, RECIPE)
            for x, own in zip(states, amaxes, strict=True)
        ]
        np.testing.assert_array_equal(after, jnp.stack([x.table for x in states]))


def test_of_several_uses_the_largest_amax_counts_and_unmeasured_ones_do_not():
    table = scaling.stored(jnp.array([2.0, 1.0, 0.5]), RECIPE).table[None]
    one = jnp.array([[1.0, 64.0, jnp.inf]])
    two = jnp.array([[32.0, 0.25, jnp.nan]])
    _, after = _next_of_uses(table, [one, two, None])
    largest = jnp.array([[32.0, 64.0, jnp.inf]])
    _, expected = _next_of_uses(table, [largest])
    np.testing.assert_array_equal(after, expected)
    of_g = scaling.contributions(table, None, RECIPE)[0, 2]
    np.testing.assert_array_equal(after[0, 2], of_g)
    _, unused = _next_of_uses(table, [])
    assert not unused.any()
