"""Errors of FP8 products on the operands of a step, against numpy in float64."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from loka_jax.probe import live_errors
from loka_jax.probe.live_errors import quantized
from loka_jax.probe.operands import operands_of
from loka_jax.recipe import ROLES, get_recipe
from tests import support

M, K, N = 42, 32, 16
DELAYED = "fp8_tensorwise_delayed"
NAMES = (DELAYED, "fp8_rowwise", "fp8_tensorwise/bf16/bf16")
WEIGHT, SQUARES, MEAN, SQUARE = range(4)  # places in the sums
NONE_YET = (0.0, 0.0, 0.0)

_merge = jax.jit(live_errors.merge, static_argnames="decay")


@functools.partial(jax.jit, static_argnames="names")
def _errors(lhs, rhs, g, scales, steps, names):
    recipes = tuple(map(get_recipe, names))
    operands = operands_of(lhs, rhs, g, tuple(scales))
    return live_errors.live_errors(operands, recipes, steps).sums


def _bf16(x):
    return np.float32(x).astype(ml_dtypes.bfloat16)


def _operands(n=N):
    """Returns operands whose rows or columns are of very different sizes."""
    rng = np.random.default_rng(0)
    lhs = rng.standard_normal((M, K)) * np.logspace(0, -2, M)[:, None]
    lhs[5] = 0.0
    rhs = rng.standard_normal((K, n)) * np.logspace(0, -1, n)
    g = rng.standard_normal((M, n)) * np.logspace(-3, 0, M)[:, None]
    return _bf16(lhs), np.float32(rhs), _bf16(1e-25 * g)


def _measured(operands, scales=NONE_YET, steps=0.0, names=NAMES):
    """Returns the sums by recipe, role, measure and place."""
    found = _errors(*operands, jnp.asarray(scales), steps, names)
    return dict(zip(names, np.asarray(found), strict=True))


def _expected(operands, role, name, scales=NONE_YET):
    """Returns the measures of a whole product in a recipe, and how close they come."""
    lhs, rhs, g = (np.asarray(x, np.float64) for x in operands)
    of_lhs, of_rhs, of_g = scales
    first, second, stored = {
        "fwd": (lhs, rhs.T, (of_lhs, of_rhs)),
        "dlhs": (g, rhs, (of_g, of_rhs)),
        "drhs": (lhs.T, g.T, (of_lhs, of_g)),
    }[role]
    quantized = []
    for x, scale_inv in zip((first, second), stored, strict=True):
        if name == DELAYED and scale_inv:
            clipped = np.clip(x / scale_inv, -448, 448).astype(np.float32)
            quantized.append(clipped.astype(support.E4M3).astype(float) * scale_inv)
        else:
            margin = int(name == DELAYED)
            axes = (1,) if "rowwise" in name else None
            quantized.append(support.cast_exactly(x, support.E4M3, axes, margin))
    ref, out = first @ second.T, quantized[0] @ quantized[1].T
    if role != "drhs":
        out = np.float32(out).astype(ml_dtypes.bfloat16).astype(np.float64)
    noise, seen = np.abs(out - ref), np.any(ref != 0, axis=1)
    rows = np.sum(noise**2, axis=1)[seen] / np.sum(ref**2, axis=1)[seen]
    total = np.linalg.norm(noise) / np.linalg.norm(ref)
    is_counted = ref != 0
    mere = np.mean(noise[is_counted] / np.abs(ref[is_counted]))
    return total, np.sqrt(rows.max()), mere


@pytest.mark.parametrize(
    "scales", [NONE_YET, (2.0**-8, 2.0**-9, 1e-27), (2.0**-12, 0.0, 2.0**-80)]
)
def test_small_products_are_measured_whole(scales):
    operands = _operands()
    found = _measured(operands, scales)
    for name in NAMES:
        for role, moments in zip(ROLES, found[name], strict=True):
            if get_recipe(name).gemm(role) is None:
                np.testing.assert_array_equal(moments, 0.0)
                continue
            np.testing.assert_array_equal(moments[:, [WEIGHT, SQUARES]], 1)
            np.testing.assert_allclose(moments[:, SQUARE], moments[:, MEAN] ** 2)
            expected = _expected(operands, role, name, scales)
            # Sums of 42 float32 terms at most: far below the error of a cast, 2^-4,
            # but for relative errors of elements in which terms cancel.
            np.testing.assert_allclose(moments[:2, MEAN], expected[:2], rtol=1e-3)
            np.testing.assert_allclose(moments[2, MEAN], expected[2], rtol=5e-3)


def test_a_delayed_scale_leaves_headroom_before_it_is_stored():
    arrays = np.float32([448.0, 896.0, 1792.0])[:, None, None]
    operands = operands_of(*map(jnp.asarray, arrays))
    for name, factor in (("fp8_tensorwise", 1), (DELAYED, 2)):
        pairs = ("fwd", arrays[:2], (1, 2)), ("dlhs", arrays[[2, 1]], (4, 2))
        for role, pair, amaxes in pairs:
            views = quantized(operands, role, get_recipe(name), *map(jnp.asarray, pair))
            assert [view.scale_inv for view in views] == [factor * x for x in amaxes]


def test_a_product_that_is_not_finite_is_left_out():
    lhs, rhs, g = _operands()
    g[3, 4] = np.inf
    found = _measured((lhs, rhs, g))[DELAYED]
    np.testing.assert_array_equal(found[:, :, WEIGHT], [[1] * 3, [0] * 3, [0] * 3])
    assert np.all(np.isfinite(found)) and not found[1:].any()


def test_parts_of_large_products_represent_them():
    """Columns that cancel over the batch have large errors, wherever they lie."""
    m, n, rng, name = 320, 96, np.random.default_rng(0), NAMES[1]
    lhs = 1.0 + 0.01 * rng.standard_normal((m, K))
    loud = 0.99 + 0.02 * rng.standard_normal((m, 32))
    loud[::2] *= -1
    g = np.concatenate([1e-3 * rng.standard_normal((m, 64)), loud], axis=1)
    operands = _bf16(lhs), _operands(n=n)[1], _bf16(g)
    steps = [_measured(operands, steps=float(i), names=(name,)) for i in range(24)]
    means = np.stack([step[name] for step in steps])[:, :, :, MEAN]
    for j, role in enumerate(ROLES):
        expected, worst, _ = _expected(operands, role, name)
        # 256 of 320 rows, 64 of 96 columns, others at each step.
        np.testing.assert_allclose(means[:, j, 0].mean(), expected, rtol=0.03)
        assert len(set(means[:, j, 0].tolist())) >= 3
        assert 0.8 < means[:, j, 1].max() / worst < 3


def test_the_worst_row_is_that_of_all_as_far_as_the_tail_tells():
    worst = jax.jit(live_errors._worst_of_all, static_argnums=1)
    errors = np.float32(0.01 + np.arange(64) % 7 / 100)
    errors[[3, 50, 8]] = 0.9, 0.5, 0.4
    np.random.default_rng(0).shuffle(errors)
    assert worst(errors, 64) == worst(errors, 8) == np.float32(0.9)
    # The mean logarithm of the 8 largest above the ninth.
    logs = np.log(np.sort(errors)[::-1])
    slope = np.mean(logs[:8]) - logs[8]
    assert 0.4 < slope < 1
    np.testing.assert_allclose(worst(errors, 256), 0.9 * 4**slope, rtol=1e-5)
    errors[errors < 0.3] = 0.0  # an infinite slope counts as 1
    np.testing.assert_allclose(worst(errors, 256), 0.9 * 4, rtol=1e-5)
    assert worst(errors[:7], 256) == errors[:7].max()


def test_devices_together_measure_the_whole_product():
    """Each of two devices has half of the rows, of very different sizes."""
    lhs, rhs, g = _operands()
    recipes = [get_recipe("fp8_tensorwise")]

    @functools.partial(jax.vmap, axis_name="data", in_axes=(0, 0, None))
    def apart(lhs, g, rhs):
        operands = operands_of(lhs, rhs, g, axis_names=("data",))
        args = operands, recipes, "drhs", jnp.zeros(()), ("data",)
        return live_errors._role_errors(*args)[0]

    found = jax.jit(apart)(*(x.reshape(2, M // 2, -1) for x in (lhs, g)), rhs)
    expected = _expected((lhs, rhs, g), "drhs", "fp8_tensorwise")
    np.testing.assert_allclose(found, [expected] * 2, rtol=5e-3)


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_merged_sums_are_those_of_the_steps(decay):
    sums = np.random.default_rng(0).uniform(0.01, 0.1, (6, 2, 3, 3, 4))
    amaxes = np.arange(18.0, dtype=np.float32).reshape(6, 3)
    each = zip(sums, amaxes, strict=True)
    empty = live_errors.empty_errors(2)._replace(steps=jnp.ones(()))
    steps = [empty._replace(sums=np.float32(x), amaxes=newest) for x, newest in each]
    pairs = [_merge(a, b) for a, b in zip(steps[::2], steps[1::2], strict=True)]
    merged = functools.reduce(functools.partial(_merge, decay=decay), pairs)
    assert merged.steps == 6
    weights = np.repeat(decay ** np.arange(2.0, -1, -1), 2)[:, None, None, None, None]
    powers = weights ** np.array([1, 2, 1, 1])
    np.testing.assert_allclose(merged.sums, np.sum(powers * sums, 0), rtol=1e-5)
    np.testing.assert_array_equal(merged.amaxes, amaxes[-1])
    # What was not seen ages nothing.
    kept = _merge(merged, live_errors.empty_errors(2), decay=decay)
    for part, expected in zip(kept, merged, strict=True):
        np.testing.assert_array_equal(part, expected)


@functools.partial(jax.jit, static_argnames="copies")
def _error_of_drhs(lhs, g, copies):
    operands = operands_of(lhs, jnp.ones((64, 64)), g)
    recipes = [get_recipe("fp8_tensorwise")]
    return live_errors.live_errors(operands, recipes, copies=copies).relative_l2[0, 2]


@pytest.mark.parametrize("clicks, least, most", [(None, 0.03, 0.045), (0.05, 1.0, 2.0)])
def test_the_error_of_many_rows_is_told_by_a_part_of_them(clicks, least, most):
    rows, part = 32_768, 2048
    rng = np.random.default_rng(1)
    g = rng.standard_normal((rows, 64))
    lhs = rng.standard_normal((rows, 64))
    if (
        clicks is not None
    ):  # p - y of a head without a norm below it: p is rounded alike
        g = (0.05 - (rng.random((rows, 1)) < clicks)) * np.linspace(1, 1.9, 64)
        lhs = np.abs(lhs)
    lhs, g = (x.astype(np.float32) for x in (lhs, g))
    whole = _error_of_drhs(lhs, g, 1)
    assert least < whole < most
    told = _error_of_drhs(lhs[:part], g[:part], rows // part)
    assert told == pytest.approx(float(whole), rel=0.5)
    if clicks is not None:
        assert _error_of_drhs(lhs[:part], g[:part], 1) < 0.4 * whole
