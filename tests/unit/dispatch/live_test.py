"""Live errors as intervals, and drawn errors corrected by them."""

import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import t as student

from loka_jax.dispatch import live
from loka_jax.dispatch.candidates import table_key
from loka_jax.dispatch.header import Header
from loka_jax.dispatch.table import MEASURES, Entry, Table
from loka_jax.measure.intervals import Interval
from loka_jax.nn import Site
from loka_jax.ops.plan import resolve
from loka_jax.probe import live_errors
from loka_jax.recipe import ROLES
from loka_jax.site import Choice, SiteSpec
from tests.support import stand_ins

ROW = "xla fp8_rowwise"


def _steps(values, decay=1.0, recipes=1):
    """Returns the errors of steps in which all errors had these values."""
    empty = live_errors.empty_errors(recipes)
    steps = []
    for value in values:
        parts = [jnp.ones_like(empty.moments[..., 0])] * 2
        parts += [jnp.full_like(parts[0], value), jnp.zeros_like(parts[0])]
        steps.append(live_errors.LiveErrors(jnp.ones(()), jnp.stack(parts, axis=-1)))
    merge = functools.partial(live_errors.merge, decay=decay)
    return functools.reduce(merge, steps, empty)


def _errors(value, recipe="fp8_rowwise", half=0.0):
    interval = Interval(value, value - half, value + half)
    return {role: {recipe: dict.fromkeys(MEASURES, interval)} for role in ROLES}


def test_the_interval_is_that_of_another_step():
    values = [0.03, 0.05, 0.04, 0.06]
    found = live.live_intervals(_steps(values), ("fp8_rowwise",))
    error = found["drhs"]["fp8_rowwise"]["relative_l2"]
    half = student.ppf(0.975, 3) * np.std(values, ddof=1) * math.sqrt(1 + 1 / 4)
    np.testing.assert_allclose(error, (0.045, 0.045 - half, 0.045 + half), rtol=1e-4)


def test_another_step_lies_in_it_as_often_as_it_says():
    rng = np.random.default_rng(0)
    values = rng.normal(0.05, 0.01, size=(300, 9))
    inside = 0
    for *seen, another in values:
        errors = live.live_intervals(_steps(seen), ("fp8_rowwise",))
        _, low, high = errors["fwd"]["fp8_rowwise"]["relative_l2"]
        inside += low <= another <= high
    # 95 % of 300, give or take three standard deviations of 1.3 %.
    assert 0.91 <= inside / 300 <= 0.99


def test_steps_that_are_forgotten_count_less():
    same = [0.03, 0.05, 0.04, 0.06] * 10
    few = live.live_intervals(_steps(same, decay=0.5), ("fp8_rowwise",))
    many = live.live_intervals(_steps(same), ("fp8_rowwise",))
    assert (
        few["fwd"]["fp8_rowwise"]["mere"].half
        > 1.5 * many["fwd"]["fp8_rowwise"]["mere"].half
    )


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_steps_say_nothing(count):
    found = live.live_intervals(_steps([0.03] * count), ("fp8_rowwise",))
    assert found == {role: {} for role in ROLES}


def test_sites_that_were_not_seen_are_left_out():
    seen = {"a": _steps([0.03] * 3), "b": _steps([])}
    found = live.seen_errors(seen, ("fp8_rowwise",))
    assert found == {"a": live.live_intervals(seen["a"], ("fp8_rowwise",))}


def test_drawn_errors_are_corrected_by_what_was_seen_of_others():
    drawn = {path: _errors(0.03) | {} for path in "abc"}
    for errors in drawn.values():
        for role in ROLES:
            errors[role] |= _errors(0.04, "fp8_blockwise", half=0.004)[role]
    seen = {"a": _errors(0.06), "b": _errors(0.03 * 2.2), "c": _errors(0.03 * 1.8)}
    by_role = live.ratios(seen, drawn)
    ratio = by_role["drhs"]["relative_l2"]
    logs = np.log([2.0, 2.2, 1.8])
    np.testing.assert_allclose(ratio, (logs.mean(), logs.std(ddof=1), 3), rtol=1e-6)

    own = live.own_errors(seen["a"], drawn["a"], by_role)["drhs"]
    assert own["fp8_rowwise"] == seen["a"]["drhs"]["fp8_rowwise"]
    mean, low, high = own["fp8_blockwise"]["relative_l2"]
    half = student.ppf(0.975, 2) * ratio.deviation * math.sqrt(1 + 1 / 3)
    half = math.hypot(half, math.log(1.1))  # of the ratio, and of the draws
    expected = 0.04 * np.exp(logs.mean() + np.array([0, -half, half]))
    np.testing.assert_allclose((mean, low, high), expected, rtol=1e-6)


def test_what_cannot_be_corrected_is_left_out():
    drawn = _errors(0.04, "fp8_blockwise")
    by_role = live.ratios({"a": _errors(0.06)}, {"a": _errors(0.03)})  # of one site
    own = live.own_errors(_errors(0.06), drawn, by_role)
    assert list(own["fwd"]) == ["fp8_rowwise"]
    # Draws count as they are if nothing at all was seen live.
    assert live.own_errors({role: {} for role in ROLES}, drawn, {}) == drawn


def _site(path="top/dense_0", n=64) -> Site:
    plan = resolve(SiteSpec(128, 64, n), Choice.parse(ROW), stand_ins.CPU)
    return Site(path=path, plan=plan)


def _table(*sites) -> Table:
    times = {"training": {"xla bf16": 2.0, ROW: 1.0}}
    entries = {table_key(site.spec): Entry(times, {"N(0, 1)": {}}) for site in sites}
    return Table(Header("cpu", "1", "1", "", "x"), entries)


def test_a_table_takes_the_errors_of_the_model():
    site = _site()
    found = live.with_live(_table(site), [site], {site.path: _errors(0.03)}, "model")
    (entry,) = found.sites.values()
    assert entry.errors == {"model top/dense_0": _errors(0.03)}
    assert not entry.times
