"""Errors of FP8 products on the operands of a step, against the whole products."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import quality
from loka_jax.ops import roles
from loka_jax.probe import live_errors
from loka_jax.probe.capture import Sampler, at_step
from loka_jax.probe.live_errors import Operands
from loka_jax.recipe import ROLE_OPERANDS, ROLES, get_recipe
from tests import support

RECIPES = ("fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_bf16_drhs")
NO_SCALES = (None, None, None)
_MEAN = 2  # place in the moments

_errors = functools.partial(jax.jit, static_argnames="recipes")(live_errors.live_errors)


def _measure(operands, names, steps=0.0):
    return _errors(operands, tuple(map(get_recipe, names)), steps)


def _operands(m=192, k=48, n=32, scales=NO_SCALES, seed=0):
    lhs = support.normal(m, k, seed=seed, dtype=jnp.bfloat16)
    rhs = support.normal(k, n, seed=seed + 1)
    g = support.normal(m, n, seed=seed + 2, dtype=jnp.bfloat16)
    return Operands(lhs, rhs, 1e-25 * g, scales)


def _products(operands, role, name):
    """Returns the whole product of a role, exact and in a recipe."""
    first, second = (getattr(operands, x) for x in ROLE_OPERANDS[role])
    out = roles.product(role, first, second, get_recipe(name))
    return roles.exact_product(role, first, second), out.astype(jnp.float32)


def test_small_products_are_measured_whole():
    operands = _operands()
    found = _measure(operands, RECIPES)
    for i, name in enumerate(RECIPES):
        for j, role in enumerate(ROLES):
            weight, _, errors, _ = np.moveaxis(np.asarray(found.moments[i, j]), 1, 0)
            if get_recipe(name).gemm(role) is None:
                np.testing.assert_array_equal(weight, 0.0)
                continue
            ref, out = _products(operands, role, name)
            # Sums in another order: far below the error of a cast, 2^-4.
            close = functools.partial(np.testing.assert_allclose, rtol=1e-3)
            close(errors[0], quality.relative_l2(ref, out))
            close(errors[1], 10 ** (-quality.worst_slice_sqnr(ref, out) / 20))
            close(errors[2], quality.mere(ref, out), rtol=2e-2)  # near zeros
            np.testing.assert_array_equal(weight, 1.0)


def test_parts_of_large_products_represent_them():
    operands = _operands(m=2048, k=256, n=192)
    steps = [_measure(operands, RECIPES, float(i)) for i in range(4)]
    merged = functools.reduce(live_errors.merge, steps)
    for j, role in enumerate(ROLES):
        ref, out = _products(operands, role, RECIPES[0])
        # Of 4 parts with 4,096 elements or more: their mean error deviates by 1 %.
        found = merged.moments[0, j, 0, _MEAN]
        np.testing.assert_allclose(found, quality.relative_l2(ref, out), rtol=0.05)
    # Not the same rows at each step.
    assert len({float(step.moments[0, 0, 1, _MEAN]) for step in steps}) == 4


def test_columns_beyond_a_multiple_of_64_count():
    """Columns that cancel over the batch have large errors, wherever they lie."""
    operands = _operands(m=512, k=96, n=96)
    sign = (-1.0) ** jnp.arange(512, dtype=jnp.float32)[:, None]
    loud = sign * (0.99 + 0.02 * support.normal(512, 32, seed=5))
    g = jnp.concatenate([1e-3 * support.normal(512, 64, seed=6), loud], axis=1)
    lhs = 1.0 + 0.01 * support.normal(512, 96, seed=7)
    operands = Operands(
        lhs.astype(jnp.bfloat16), operands.rhs, g.astype(jnp.bfloat16), NO_SCALES
    )
    steps = [_measure(operands, RECIPES[:1], float(i)) for i in range(40)]
    found = functools.reduce(live_errors.merge, steps).moments[0, 2, 0, _MEAN]
    ref, out = _products(operands, "drhs", RECIPES[0])
    np.testing.assert_allclose(found, quality.relative_l2(ref, out), rtol=0.3)


@pytest.mark.parametrize("size", [64, 65, 96, 127, 191, 400, 479, 1000, 4097])
def test_columns_are_spread_evenly_and_all_are_seen(size):
    x, seen = jnp.arange(size)[None], set()
    for step in range(400):
        shift = jnp.float32(step * 0.618034 % 1)
        found = np.asarray(live_errors._some(x, 64, shift, axis=1))[0].tolist()
        assert len(set(found)) == 64 == len(found)
        assert max(np.diff(found)) - min(np.diff(found)) <= 1
        seen |= set(found)
    assert seen == set(range(size))


def test_looks_at_different_steps_see_different_elements():
    operands = _operands(m=512, k=96, n=100)
    sampler = Sampler(recipes=(get_recipe("fp8_tensorwise"),))
    empty = sampler.init(512, 96, 100)
    errors = []
    for step in (0, 64, 128):
        begun = at_step({"site": empty}, jnp.int32(step))["site"]
        seen = sampler.observe(begun, *operands[:3], NO_SCALES)
        errors.append(np.asarray(seen.errors.relative_l2))
    assert not np.array_equal(errors[0], errors[1])
    assert not np.array_equal(errors[1], errors[2])


def test_dependent_operands_have_larger_errors_than_independent_ones():
    # As in a trained model: the gradient of the weight nearly vanishes.
    operands = _operands(m=2048)
    lhs, g = (np.asarray(x, np.float64) for x in (operands.lhs, 1e25 * operands.g))
    rest = g - lhs @ np.linalg.lstsq(lhs, g)[0]
    near = operands._replace(g=jnp.asarray(rest + 0.02 * g, jnp.float32))
    apart, together = (_measure(x, RECIPES).moments[0, 2] for x in (operands, near))
    assert together[0, _MEAN] > 5 * apart[0, _MEAN]


def test_delayed_casts_use_the_stored_scales():
    name = ("fp8_tensorwise_delayed",)
    fits = _measure(_operands(), name).moments[0, 0, 0, _MEAN]
    stored = (jnp.float32(2.0**-12), None, None)  # 448 times it is 0.11
    clips = _measure(_operands(scales=stored), name).moments[0, 0, 0, _MEAN]
    none_yet = (jnp.float32(0.0), None, None)
    before = _measure(_operands(scales=none_yet), name).moments[0, 0, 0, _MEAN]
    assert fits < 0.06 and clips > 0.5
    assert before == fits


def test_moments_are_those_of_the_steps():
    steps = [_measure(_operands(seed=10 * i), RECIPES) for i in range(5)]
    values = np.stack([step.moments[..., _MEAN] for step in steps])
    merged = functools.reduce(live_errors.merge, steps)
    assert merged.steps == 5
    weight, squares, mean, m2 = np.moveaxis(np.asarray(merged.moments), 3, 0)
    measured = weight > 0
    np.testing.assert_array_equal(weight[measured], 5)
    np.testing.assert_array_equal(squares[measured], 5)
    np.testing.assert_allclose(mean, values.mean(0), rtol=1e-5)
    np.testing.assert_allclose(m2, values.var(0) * 5, rtol=1e-3, atol=1e-7)


def test_earlier_steps_count_less_under_decay():
    steps = [_measure(_operands(seed=10 * i), RECIPES) for i in range(3)]
    decayed = functools.partial(live_errors.merge, decay=0.5)
    merged = functools.reduce(decayed, steps).moments[0, 0, 0]
    values = [step.moments[0, 0, 0, _MEAN] for step in steps]
    weights = np.array([0.25, 0.5, 1.0])
    mean = np.average(values, weights=weights)
    expected = (weights.sum(), (weights**2).sum(), mean)
    np.testing.assert_allclose(merged[:3], expected, rtol=1e-5)
    m2 = np.sum(weights * (np.array(values) - mean) ** 2)
    np.testing.assert_allclose(merged[3], m2, rtol=1e-3)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_a_product_that_is_not_finite_is_left_out(value):
    good = _measure(_operands(), RECIPES)
    bad = _operands()._replace(g=_operands().g.at[3, 4].set(value))
    merged = live_errors.merge(good, _measure(bad, RECIPES))
    fwd, dlhs, drhs = np.moveaxis(np.asarray(merged.moments[0, :, 0]), 0, 0)
    assert fwd[0] == 2 and dlhs[0] == drhs[0] == 1
    assert np.all(np.isfinite(merged.moments))


def test_sizes_that_are_never_in_fp8_have_no_errors():
    assert not np.any(_measure(_operands(n=13), RECIPES).moments)
    # Kernels pad rows.
    assert np.all(_measure(_operands(m=100), RECIPES).moments[0, :, 0, _MEAN] > 0)


def test_the_mean_of_relative_l2_is_read_by_recipe_and_role():
    errors = _measure(_operands(), RECIPES)
    found = np.asarray(errors.relative_l2)
    assert np.isnan(found).tolist() == [[False] * 3, [False] * 3, [False, False, True]]
    np.testing.assert_array_equal(found[:2], errors.moments[:2, :, 0, _MEAN])
