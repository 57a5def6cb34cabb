"""What a recipe's casts do to products and operands, and how large these are."""

import functools
from types import SimpleNamespace

import jax
import numpy as np

from loka_jax.dispatch import drift
from loka_jax.dispatch.drift import RULES
from loka_jax.dispatch.policy import Limits
from loka_jax.probe.operands import operands_of
from loka_jax.recipe import OPERANDS, get_recipe
from tests.support.nn import factor_of

M, K, N = 128, 32, 64
DELAYED = "fp8_tensorwise_delayed"
WIDE = Limits(healthy=6.0)


def operands(lhs=None, rhs=None, g=None):
    """Returns these operands, or normal ones."""
    rng = np.random.default_rng(0)
    shapes = ((M, K), (K, N), (M, N))
    return [
        np.float32(rng.standard_normal(shape) if x is None else x)
        for shape, x in zip(shapes, (lhs, rhs, g), strict=True)
    ]


@functools.partial(jax.jit, static_argnames=("name", "how"))
def _health(arrays, scales, errors, name, how):
    operands = operands_of(*arrays, scales)
    return drift.health(operands, errors, get_recipe(name), **dict(how))


def healths(name, arrays, *, stored=None, errors=(0.0, 0.0, 0.0), **how):
    """Returns the health by operand, after steps with `stored` amaxes if delayed."""
    scales = np.zeros(3, np.float32)
    if stored is not None:
        scales = np.float32(factor_of(stored))
    found = _health(arrays, tuple(scales), np.float32(errors), name, tuple(how.items()))
    rows = [SimpleNamespace(**dict(zip(RULES, x, strict=True))) for x in found]
    return dict(zip(OPERANDS, rows, strict=True))


def test_the_size_is_the_squared_mean_of_roots():
    lhs = np.abs(operands()[0]) + 0.1
    lhs[:, 3] *= 100
    arrays = operands(lhs=lhs)
    found = healths("fp8_tensorwise", arrays)
    for name, x in (("lhs", arrays[0]), ("g", arrays[2])):
        sizes = np.mean(np.sqrt(np.abs(x)), axis=0)
        expected = 2 * np.log2([np.mean(sizes), sizes.max()])
        level_and_peak = found[name].level, found[name].peak
        np.testing.assert_allclose(level_and_peak, expected, rtol=1e-4)


def test_what_is_loud_flushes_all_that_shares_its_scale():
    # 448 / 2^-10 = 458,752 is the most that E4M3 spans.
    columns, rows = np.ones((M, K)), np.ones((M, K))
    columns[:, 0] = rows[0] = 1e7
    for name in ("fp8_tensorwise", "fp8_rowwise"):
        found = healths(name, operands(lhs=columns))
        np.testing.assert_allclose(found["lhs"].flushed, (K - 1) / K, rtol=1e-6)
        assert found["rhs"].flushed < 1e-3
        # drhs has a scale for each column, which holds the loud row.
        assert healths(name, operands(lhs=rows))["lhs"].flushed > 0.9


def test_a_part_that_is_lost_counts_by_its_magnitude():
    x = np.ones((M, K))
    x[0, 0], x[:, 5], x[7, :] = 1e7, 1e-3, 0.0
    flushed = x * (x < 1e7 / 458_752)
    shares = np.divide(flushed.sum(0), x.sum(0))
    rows = np.divide(flushed.sum(1), x.sum(1), where=x.sum(1) > 0, out=np.zeros(M))
    expected = max(shares.mean(), rows.sum() / (M - 1))  # a row of zeros does not count
    found = healths("fp8_tensorwise", operands(lhs=x))["lhs"]
    np.testing.assert_allclose(found.flushed, expected, rtol=1e-5)


def test_an_error_is_told_by_how_far_it_is_above_the_limit_of_its_formats():
    # The limit is 1.5 times 0.037.
    found = healths("fp8_tensorwise", operands(), errors=(0.05, 0.0555 * 4, np.nan))
    assert found["lhs"].error == 0 and np.isnan(found["g"].error)
    np.testing.assert_allclose(found["rhs"].error, 2, rtol=1e-6)
    wide = healths("fp8_tensorwise", operands(), errors=(0.0555 * 8,) * 3, limits=WIDE)
    np.testing.assert_allclose(wide["lhs"].error, 1, rtol=1e-6)


def test_a_result_in_fp8_that_saturates_is_an_error_of_its_product():
    # Of equal values all products add up: sqrt(k) times what independent ones do.
    same = [np.ones_like(x) for x in operands()]
    # The same products from operands that stay below their scales lose nothing.
    cases = ((same, 1.0), (same, 8.0), (operands(), 4.0))
    found = [
        healths(DELAYED, arrays, stored=(amax,) * 3, fp8_results=("fwd", "dlhs"))
        for arrays, amax in cases
    ]
    # In FP8 1 is 128. fwd: 32 x 2^14 in units of 2^9, of which the largest number is
    # 7/16; dlhs: 64 x 2^14 in units of 2^8, of which it is 7/64.
    for name, lost in {"lhs": 9 / 16, "rhs": 57 / 64}.items():
        expected = np.log2(lost / (1.5 * 0.037))
        errors = [x[name].error for x in found]
        np.testing.assert_allclose(errors, [expected, 0, 0], rtol=1e-5)
    assert found[0]["g"].error == 0


def test_what_has_no_cast_or_only_zeros_has_no_measures():
    found = healths("fp8_tensorwise", operands(lhs=np.zeros((M, K))))["lhs"]
    assert np.isnan([found.level, found.peak]).all() and found.flushed == 0
    found = healths("fp8_rowwise/bf16/bf16", operands(), fp8_results=("dlhs",))
    is_nan = np.isnan([list(vars(x).values()) for x in found.values()])
    np.testing.assert_array_equal(is_nan[:, 0], [False, True, True])  # dlhs and drhs
    np.testing.assert_array_equal(is_nan[:, 1:], [[False] * 3] * 2 + [[True] * 3])  # g
