"""What a recipe's casts do to operands: clipped, flushed, and how large these are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import fp8, scaling
from loka_jax.dispatch.operand_health import Health, health
from loka_jax.probe.capture import Operands, Sample
from loka_jax.recipe import OPERANDS, get_recipe
from loka_jax.site import compose

M, K, N = 128, 32, 64
DELAYED = "fp8_tensorwise_delayed"


def sample(lhs=None, rhs=None, g=None):
    keys = jax.random.split(jax.random.key(0), 3)
    given = zip(keys, ((M, K), (K, N), (M, N)), (lhs, rhs, g), strict=True)
    arrays = [
        jax.random.normal(key, shape) if x is None else jnp.asarray(x, jnp.float32)
        for key, shape, x in given
    ]
    amaxes = jnp.stack([fp8.amax(x) for x in arrays])
    return Sample(Operands(*arrays), amaxes)


def healths(name, operands, amaxes=None):
    """Returns the health by operand, after steps with these amaxes if delayed."""
    recipe = get_recipe(name)
    state = None
    if recipe.is_delayed:
        state = scaling.init_delayed(recipe)
        for _ in range(16):
            state = scaling.update_delayed(state, jnp.float32(amaxes), recipe)
    found = health(operands, recipe, state)
    return {
        name: Health(*[float(x[i]) for x in found]) for i, name in enumerate(OPERANDS)
    }


def test_normal_operands_lose_nothing():
    for name in ("fp8_tensorwise", "fp8_rowwise", "fp8_blockwise"):
        for found in healths(name, sample()).values():
            assert found.clipped == 0
            # Of N(0, 1), E4M3 flushes below amax / 4.6e5: a few of 10^5 elements.
            assert found.flushed < 1e-4


def test_the_size_is_the_squared_mean_of_roots():
    x = np.abs(np.random.default_rng(0).normal(size=(M, K))) + 0.1
    x[:, 3] *= 100
    found = healths("fp8_rowwise", sample(lhs=x))["lhs"]
    sizes = np.mean(np.sqrt(x), axis=0)
    np.testing.assert_allclose(found.level, 2 * np.log2(np.mean(sizes)), rtol=1e-5)
    np.testing.assert_allclose(found.peak, 2 * np.log2(sizes[3]), rtol=1e-5)


def test_a_loud_column_flushes_the_others_under_one_scale():
    x = np.ones((M, K))
    x[:, 0] = 1e7
    # 448 / 2^-10 = 458,752 is the most that E4M3 spans.
    for name in ("fp8_tensorwise", "fp8_rowwise", "fp8_blockwise"):
        found = healths(name, sample(lhs=x))["lhs"]
        np.testing.assert_allclose(found.flushed, (K - 1) / K, rtol=1e-6)


def test_a_loud_row_flushes_the_others_under_one_scale_only():
    x = np.ones((M, K))
    x[0] = 1e7
    found = healths("fp8_tensorwise", sample(lhs=x))["lhs"]
    np.testing.assert_allclose(found.flushed, (M - 1) / M, rtol=1e-6)
    assert healths("fp8_rowwise_bf16_drhs", sample(lhs=x))["lhs"].flushed == 0
    # drhs has a scale for each column, which holds the loud row.
    assert healths("fp8_rowwise", sample(lhs=x))["lhs"].flushed > 0.9


def test_rows_beyond_the_sample_set_the_current_scale():
    quiet = sample(lhs=np.ones((M, K)))
    amaxes = quiet.amaxes.at[0].set(1e7)
    found = healths("fp8_tensorwise", quiet._replace(amaxes=amaxes))
    assert found["lhs"].flushed == 1


def test_stored_scales_clip_and_flush():
    ones = sample(lhs=np.ones((M, K)))
    reach = [1e-3, 8.0, 8.0]
    found = healths(DELAYED, ones, reach)
    assert found["lhs"].clipped == 1 and found["g"].clipped == 0
    assert healths(DELAYED, ones, [1e7, 8.0, 8.0])["lhs"].flushed == 1
    # The margin is one bit; pow2 scales leave up to another.
    assert healths(DELAYED, ones, [0.5, 8.0, 8.0])["lhs"].clipped == 0


def test_one_clipped_row_is_no_clipped_column():
    x = np.ones((M, K))
    x[0] = 1e6
    found = healths(DELAYED, sample(lhs=x), [1.0, 8.0, 8.0])["lhs"]
    np.testing.assert_allclose(found.clipped, 1 / M)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_sizes_at_the_ends_of_float32_are_measured(size):
    found = healths("fp8_tensorwise", sample(g=np.full((M, N), size)))["g"]
    assert found.flushed == found.clipped == 0
    np.testing.assert_allclose(found.level, np.log2(size), rtol=1e-5)


def test_what_has_no_cast_or_only_zeros_has_no_measures():
    found = healths("fp8_tensorwise", sample(lhs=np.zeros((M, K))))["lhs"]
    assert np.isnan([found.level, found.peak]).all() and found.flushed == 0
    without_g = health(sample(), compose("fp8_rowwise/bf16/bf16"), None)
    for measure in without_g:
        assert np.isnan(measure).tolist() == [False, False, True]
