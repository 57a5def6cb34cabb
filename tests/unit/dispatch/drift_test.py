"""When a site has left what it was, and when it is back, by measures of looks."""

import dataclasses
import functools
import json

import numpy as np
import pytest

from loka_jax import jsonfile
from loka_jax.dispatch.drift import (
    HOME_LOOKS,
    LONG,
    LOOKS,
    RULES,
    SETTLING,
    SiteDrift,
    after_change,
)

MEASURES = list(RULES)
# By product or operand and measure, all different; the sizes are logarithms.
USUAL = np.array(
    [[0.0, 0.01, -3.0, -1.0], [0.2, 0.03, -6.0, -5.0], [0.1, 0.0, 4.0, 5.0]]
)


def changed(**changes):
    """Returns measures: by how much, and of which place, each of some has changed."""
    measures = USUAL.copy()
    for name, (place, change) in changes.items():
        measures[place, MEASURES.index(name)] += change
    return measures


BAD = changed(level=(1, 7.0))


def fed(looks, site=None, steps=0):
    """Returns what a site knows after looks, the first of which are usual."""
    if site is None:
        site = fed([USUAL] * SETTLING, SiteDrift(), steps)
    return functools.reduce(lambda x, look: x.after(look, steps), looks, site)


@pytest.mark.parametrize(
    "name, tolerance, change, why",
    [
        ("error", 1.0, 1.01, "the error of its dlhs is 2.31 times its limit"),
        ("flushed", 0.1, 0.101, "rows or columns of rhs lose 13% to zeros"),
        ("level", 2.7, 6.01, "rhs is 64.4 times its usual size"),
        ("peak", 2.7, 6.01, "the largest column of rhs is 64.4 times its usual size"),
        (
            "peak",
            -6.0,
            -6.01,
            "the largest column of rhs is 0.0155 times its usual size",
        ),
    ],
)
def test_a_measure_beyond_its_tolerance_is_off_and_named(name, tolerance, change, why):
    site = fed([changed(**{name: (1, change)})] * LOOKS)
    assert site.has_drifted and site.why == why and site.off == LOOKS
    # Three quarters of it are home; between is neither.
    home = fed([changed(**{name: (1, 0.74 * tolerance)})])
    assert (home.off, home.home, home.why) == (0, SETTLING + 1, "")
    between = fed([changed(**{name: (1, 0.99 * tolerance)})])
    assert (between.off, between.home, between.why) == (0, 0, "")


@pytest.mark.parametrize("steps", [1, 64])
def test_sizes_are_followed_by_their_pace_and_harm_is_not(steps):
    grown = changed(level=(1, 2.0), peak=(0, -2.0), error=(2, 0.5), flushed=(1, 0.05))
    site = fed([grown], steps=steps)
    pace = min(0.01 * steps, 2.0)
    expected = changed(level=(1, pace), peak=(0, -pace))
    np.testing.assert_allclose(site.usual, expected)
    # Growth of 1.05 a step is off in time, whatever the cadence of the looks.
    site, rate, count = fed([]), np.log2(1.05), 0
    while not site.off:
        count += 1
        site = site.after(changed(level=(1, rate * steps * count)), steps)
    # What is not followed of it in a step is 0.060, but for the first jump.
    assert count == int(np.ceil(2.7 / (rate - 0.01) / steps)) + (steps == 64)
    # Of healthy training it never is: 74 times in 770 steps.
    site = fed([])
    for step in range(0, 770, steps):
        site = site.after(changed(peak=(0, np.log2(74) * step / 770)), steps)
        assert not site.off


def test_the_first_looks_are_what_is_usual_and_a_batch_or_two_prove_nothing():
    site = SiteDrift()
    for i in range(SETTLING):
        assert (site.looks, site.off) == (i, 0)
        site = site.after(changed(level=(0, 10.0 * i)), 1)
    np.testing.assert_allclose(site.usual, changed(level=(0, 10.0 * (SETTLING - 1))))
    assert site.after(USUAL, 1).off == 1
    site = fed([*[BAD] * (LOOKS - 1), USUAL] * 5)
    assert not site.has_drifted and site.off == 0 and "rhs" in site.why
    assert fed([BAD] * LOOKS).has_drifted


@pytest.mark.parametrize("steps", [1, 64])
@pytest.mark.parametrize(
    "times, drifts", [(7, 0), (40, 0), (64, 0), (1 / 64, 0), (65, 1)]
)
def test_a_jump_to_where_a_size_stays_is_no_drift_and_two_in_a_row_are(
    steps, times, drifts
):
    size = np.log2(times) - 1e-9 * np.sign(np.log2(times))
    there = changed(level=(1, size), peak=(2, size))
    assert fed([there] * LOOKS, steps=steps).has_drifted == bool(drifts)
    # There and back, on each day; and with errors, which are harm.
    assert not fed([*[there] * 9, *[USUAL] * 9] * 3, steps=steps).has_drifted or drifts
    there[1, MEASURES.index("error")] += 1.1
    assert fed([there] * LOOKS, steps=steps).has_drifted
    growing = [changed(level=(1, 3.0 * i)) for i in range(1, LOOKS + 2)]
    assert fed(growing[:-1]).off == LOOKS - 1 and fed(growing).has_drifted


def test_an_error_long_above_its_limit_is_told_of_once():
    within, above = changed(error=(slice(None), -0.3)), changed(error=(1, 0.3))
    within = np.maximum(within, np.where(np.isin(MEASURES, "error"), 0.0, -np.inf))
    site, told = SiteDrift(), []
    for found in [*[within, above] * 20, *[above, above, within] * 20]:
        site = site.after(found, 64)
        told.append(site.is_long_above)
    first = told.index(True)  # and it stays
    assert not site.has_drifted and first >= 40 + LONG and all(told[first:])
    assert not fed([within] * 99, SiteDrift()).is_long_above
    assert not after_change({"a": site}, {"a": {}}, ())["a"].is_long_above


def test_what_is_not_measured_changes_nothing():
    site = fed([])
    assert site.after(np.full_like(USUAL, np.nan), 1) == site
    zeros = USUAL.copy()
    zeros[2, 2:] = np.nan  # a gradient of zeros has no size
    seen = fed([zeros] * LOOKS, site)
    assert seen.off == 0 and seen.usual == site.usual
    # One that is measured later is usual from then on.
    late = fed([zeros] * (SETTLING + 1), SiteDrift())
    assert late.usual[2][2] is None
    assert fed([USUAL] * LOOKS, late).off == 0
    np.testing.assert_allclose(fed([USUAL], late).usual, USUAL)


def test_a_site_returns_when_its_operands_do_and_waits_longer_each_time():
    sites = {"a": fed([]), "b": fed([])}
    drifted = lambda: {p: x.why for p, x in sites.items() if x.has_drifted}  # noqa: E731
    for time in range(3):
        for _ in range(LOOKS):
            assert not drifted()
            sites = {"a": fed([BAD], sites["a"]), "b": fed([USUAL], sites["b"])}
        assert list(drifted()) == ["a"] and "rhs" in drifted()["a"]
        sites, waited = after_change(sites, {"a": {"choice": "x"}}, ()), 0
        assert sites["a"].left == {"choice": "x"} and not drifted()
        while not sites["a"].is_back:
            sites["a"], waited = fed([USUAL], sites["a"]), waited + 1
        assert waited == HOME_LOOKS * 2**time
        sites = after_change(sites, {}, ["a"])
        assert sites["a"].left is None and sites["a"].off == 0
    assert sites["b"].looks == SETTLING + 3 * LOOKS
    # The wait has an end, however often a site leaves.
    site = dataclasses.replace(sites["a"], left={}, demotions=99)
    homes = (HOME_LOOKS * 2**8 + i for i in (-1, 0))
    returns = [dataclasses.replace(site, home=home).is_back for home in homes]
    assert returns == [False, True]


def test_a_site_goes_on_from_json():
    looks = [
        USUAL,
        changed(peak=(2, np.nan)),
        *[USUAL] * (SETTLING - 2),
        *[BAD] * LOOKS,
    ]
    whole = cut = SiteDrift()
    for found in looks:
        whole = whole.after(found, 1)
        saved = json.loads(json.dumps(dataclasses.asdict(cut)))
        cut = jsonfile.typed(saved, SiteDrift).after(found, 1)
    assert whole == cut and whole.has_drifted
