"""What a recipe's casts do to products and operands, and how large these are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import fp8, scaling
from loka_jax.dispatch.operand_health import Health, health
from loka_jax.dispatch.policy import Limits
from loka_jax.ops.tailed_products import unit_of_fp8
from loka_jax.probe.capture import Operands, Sample
from loka_jax.probe.live_errors import empty_errors
from loka_jax.recipe import OPERANDS, get_recipe

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
    return Sample(Operands(*arrays), amaxes, empty_errors(0))


def healths(name, operands, amaxes=None, errors=(0.0, 0.0, 0.0), **options):
    """Returns the health by operand, after steps with these amaxes if delayed."""
    recipe = get_recipe(name)
    state = None
    if recipe.is_delayed:
        state = scaling.init_delayed(recipe)
        for _ in range(16):
            state = scaling.update_delayed(state, jnp.float32(amaxes), recipe)
    found = health(operands, jnp.float32(errors), recipe, state, **options)
    return {
        name: Health(*[float(x[i]) for x in found]) for i, name in enumerate(OPERANDS)
    }


def test_normal_operands_lose_nothing():
    for name in ("fp8_tensorwise", "fp8_rowwise", "fp8_blockwise"):
        for found in healths(name, sample()).values():
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


def test_stored_scales_flush():
    ones = sample(lhs=np.ones((M, K)))
    assert healths(DELAYED, ones, [8.0, 8.0, 8.0])["lhs"].flushed == 0
    assert healths(DELAYED, ones, [1e7, 8.0, 8.0])["lhs"].flushed == 1


def test_an_error_is_told_by_how_far_it_is_above_the_limit_of_its_formats():
    # The limit is 1.5 times 0.037.
    found = healths("fp8_tensorwise", sample(), errors=(0.05, 0.0555 * 4, np.nan))
    assert found["lhs"].error == 0 and np.isnan(found["g"].error)
    np.testing.assert_allclose(found["rhs"].error, 2, rtol=1e-6)
    wide = Limits(healthy=6.0)
    found = healths("fp8_tensorwise", sample(), errors=(0, 0.0555 * 4, 0), limits=wide)
    np.testing.assert_allclose(found["rhs"].error, 0, atol=1e-6)


@pytest.mark.parametrize("role, i", [("fwd", 0), ("dlhs", 1)])
def test_a_result_in_fp8_that_saturates_is_an_error_of_its_product(role, i):
    # Of equal values all products add up: sqrt(k) times what independent ones do.
    same = sample(*(np.ones(shape) for shape in ((M, K), (K, N), (M, N))))
    by_itself = healths(DELAYED, same, [1.0, 1.0, 1.0])
    assert all(x.error == 0 for x in by_itself.values())
    found = [
        healths(DELAYED, operands, amaxes, fp8_results=(role,))[OPERANDS[i]].error
        for operands, amaxes in (
            (same, [1.0, 1.0, 1.0]),
            # The same products from operands that stay below their scales.
            (same, [8.0, 8.0, 8.0]),
            (sample(), [4.0, 4.0, 4.0]),
        )
    ]
    # In FP8 1 is 128. fwd: 32 x 2^14 in units of 2^9, of which the largest number is
    # 7/16; dlhs: 64 x 2^14 in units of 2^8, of which it is 7/64.
    lost = {"fwd": 9 / 16, "dlhs": 57 / 64}[role]
    expected = np.log2(lost / (1.5 * 0.037))
    np.testing.assert_allclose(found, [expected, 0, 0], rtol=1e-5)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_sizes_at_the_ends_of_float32_are_measured(size):
    found = healths("fp8_tensorwise", sample(g=np.full((M, N), size)))["g"]
    assert found.flushed == 0
    np.testing.assert_allclose(found.level, np.log2(size), rtol=1e-5)


def test_what_has_no_cast_or_only_zeros_has_no_measures():
    found = healths("fp8_tensorwise", sample(lhs=np.zeros((M, K))))["lhs"]
    assert np.isnan([found.level, found.peak]).all() and found.flushed == 0
    forward = get_recipe("fp8_rowwise/bf16/bf16")
    without_g = health(sample(), jnp.zeros(3), forward, None, fp8_results=("dlhs",))
    assert np.isnan(without_g.error).tolist() == [False, True, True]
    for measure in without_g[1:]:
        assert np.isnan(measure).tolist() == [False, False, True]


def test_a_padded_product_has_the_unit_of_its_padded_size():
    units = [unit_of_fp8("fwd", k) for k in (1000, 1023, 1024)]
    assert 2 * units[0] == units[1] == units[2]
