"""Predicted times: of synthetic kernels, whose times are known everywhere."""

import dataclasses
import math

import numpy as np
import pytest
from scipy.optimize import nnls

from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.regression import Points, fit
from loka_jax.dispatch.table import Entry, Table
from loka_jax.dispatch.work import is_fused, work
from loka_jax.measure.intervals import Interval
from loka_jax.site import BF16, Choice, SiteSpec
from tests.support.dispatch import COPIER, HEADER, copies, copy_sites, copy_us
from tests.support.stand_ins import ROOFLINE

KERNEL = Choice.parse("pallas bf16")
SITES = copy_sites()
SPEC = SiteSpec(20_000, 384, 256, "layer", "swish")  # of which nothing was measured


def _predicted(model, spec=SPEC, choice=BF16, pass_name="training"):
    return model.predictions(spec, [choice], pass_name).get(choice.name)


def test_a_measurement_goes_before_a_prediction():
    table = copies(SITES)
    table.sites[SITES[0]].times["training"][BF16.name] = 123.0
    estimates = PerformanceModel.of(table).estimates(SITES[0])
    assert estimates.entry.times["training"][BF16.name] == 123.0
    assert estimates.spread("training", BF16) is None
    assert PerformanceModel.of(table).estimates(SPEC).spread("training", BF16) > 0
    # What failed is not predicted.
    table.sites[SPEC] = Entry(failures={BF16.name: "y is off"})
    assert "training" not in PerformanceModel.of(table).estimates(SPEC).entry.times


def test_a_hopeful_model_has_the_ends_of_intervals_and_what_was_measured():
    table = copies(SITES)
    for spec in SITES:
        table.sites[spec].times["training"][KERNEL.name] = copy_us(spec)
    model = PerformanceModel.of(table)
    own, hopeful = (x.estimates(SPEC) for x in (model, model.hopeful(2.0)))
    for choice, sign in ((BF16, 1), (KERNEL, -1)):
        times = (x.entry.times["training"][choice.name] for x in (hopeful, own))
        ratio = math.exp(sign * 2.0 * own.spread("training", choice))
        assert next(times) / next(times) == pytest.approx(ratio)
    times = model.hopeful(2.0).estimates(SITES[0]).entry.times["training"]
    assert times[BF16.name] == times[KERNEL.name] == copy_us(SITES[0])


def test_no_prediction_is_less_than_the_products_at_full_rate():
    slow = dataclasses.replace(COPIER, bf16_flops_per_us=1e6)
    spec = SITES[-1]
    model = PerformanceModel.of(Table(HEADER), fitted=copies(SITES), roofline=slow)
    least = 0.9 * 3 * 2 * spec.m * spec.k * spec.n / 1e6
    assert _predicted(model, spec).us == pytest.approx(least)


def test_a_chain_is_predicted_for_recipes_that_were_timed_in_one():
    # In a chain, a drhs in FP8 reads another layout than lhs is handed on in.
    timed = "pallas fp8_tensorwise_delayed_bf16_drhs"
    other = "pallas fp8_tensorwise_delayed"

    def saved(spec):  # a byte of lhs, and half a launch
        return spec.m * spec.k / COPIER.bytes_per_us + 0.5

    table = copies(SITES)
    for spec, entry in table.sites.items():
        us = copy_us(spec)
        entry.times["training"] = {timed: us, other: us}
        entry.times["training in"] = {timed: us - saved(spec)}
    model = PerformanceModel.of(table)
    times = model.estimates(SPEC).entry.times
    assert {timed, other} <= set(times["training"])
    assert set(times["training in"]) == {timed}
    difference = times["training"][timed] - times["training in"][timed]
    assert difference == pytest.approx(saved(SPEC), rel=1e-3)
    # Of a time that was measured alone, the chain alone is predicted.
    known = Table(HEADER, {SPEC: Entry({"training": {timed: 50.0}})}, COPIER)
    found = model.with_table(known).estimates(SPEC).entry.times["training in"][timed]
    assert found == pytest.approx(50.0 - saved(SPEC), rel=1e-3)


def test_another_device_is_scaled_by_its_roofline_and_less_certain():
    rates = COPIER.bytes_per_us / 2, COPIER.bf16_flops_per_us / 2
    half = dict(zip(("bytes_per_us", "bf16_flops_per_us"), rates, strict=True))
    half = dataclasses.replace(COPIER, launch_us=2 * COPIER.launch_us, **half)
    fit, spec = copies(SITES), SITES[-1]
    us, spread = _predicted(PerformanceModel.of(Table(HEADER), fitted=fit), spec)
    there = PerformanceModel.of(Table(HEADER), fitted=fit, roofline=half)
    slower, wider = _predicted(there, spec)
    assert slower == pytest.approx(2 * us, rel=0.01) and wider > spread


def test_work_predicts_sites_and_what_was_measured_here_corrects_it_near_by():
    model = PerformanceModel.of(copies(SITES))
    near, spec = (SiteSpec(m, 512, 256, "layer", "swish") for m in (5000, 4500))
    before = _predicted(model, spec)
    # The noise that the process allows for is 6 %.
    assert before.us == pytest.approx(copy_us(spec), rel=0.05)
    slow = Table(HEADER, {near: Entry({"training": {BF16.name: 1.5 * copy_us(near)}})})
    after = _predicted(model.with_table(slow), spec)
    assert after.us > 1.1 * before.us and 0.06 < after.spread < before.spread < 0.3


def test_errors_and_effects_are_those_of_the_nearest_rows():
    def entry(value, *sources):
        effects = dict.fromkeys(sources, Interval(value, value, value))
        return Entry(effects=effects, refused=dict.fromkeys(sources, f"{value}"))

    far, near = (dataclasses.replace(SPEC, m=m) for m in (1000, 30_000))
    other = dataclasses.replace(SPEC, n=512)
    known = {far: entry(1, "a", "b"), near: entry(2, "a"), other: entry(3, "c")}
    found = PerformanceModel.of(Table(HEADER, known)).estimates(SPEC).entry
    assert {source: x.mean for source, x in found.effects.items()} == {"a": 2, "b": 1}
    assert found.refused == {"a": "2", "b": "1"} and not found.times


BLOCK = Choice.parse("xla fp8_blockwise")
BYTES, LAUNCH = ROOFLINE.bytes_per_us, ROOFLINE.launch_us


def test_the_parts_of_a_small_site_are_those_by_hand():
    m, k, n = 1000, 96, 320
    parts = work(SiteSpec(m, k, n, "layer", "none", True), BF16, "inference", ROOFLINE)
    lhs, y, rhs = (x / BYTES for x in (m * k, m * n, k * n))
    moved, flops = 2 * (lhs + rhs + y), 2 * m * k * n / ROOFLINE.bf16_flops_per_us
    # 8 x 3 tiles on 132 multiprocessors.
    tiles = max(flops * 132 * 128 * 128 / (m * n), moved)
    expected = [LAUNCH, lhs, y, rhs, y, 0, y, LAUNCH, 32 * m / BYTES]
    expected += [max(flops, moved)] * 2 + [tiles, k / 1000 * LAUNCH]
    np.testing.assert_allclose(parts[: len(expected)], expected)
    assert not parts[len(expected) :].any()  # sizes are even, and multiples of 8
    for n, count in ((322, 5), (323, 9)):
        odd = work(SiteSpec(m, k, n), BF16, "inference", ROOFLINE)[13:]
        assert odd[:count].all() and not odd[count:].any()


def test_training_has_the_products_of_all_roles():
    spec = SiteSpec(65_536, 1024, 2048)
    flops = 2 * spec.m * spec.k * spec.n / ROOFLINE.bf16_flops_per_us
    for choice, pass_name, count in (
        (BF16, "inference", 1),
        (BF16, "training", 3),
        # A site in FP8 in part has both rates; blockwise is multiplied in bfloat16.
        (Choice.parse("xla fp8_rowwise/bf16/bf16"), "training", 2.5),
        (BLOCK, "training", 3),
    ):
        parts = work(spec, choice, pass_name, ROOFLINE)
        np.testing.assert_allclose(parts[9], count * flops)


def test_kernels_take_partial_rows_and_tiles():
    full, partial = (SiteSpec(m, 256, 256, "layer", "relu") for m in (64_000, 63_992))
    parts = [work(spec, KERNEL, "inference", ROOFLINE) for spec in (full, partial)]
    np.testing.assert_allclose(parts[1], parts[0], rtol=2e-4)
    # Parts of fused kernels are apart from those of others.
    wide = SiteSpec(64_000, 256, 4096, "layer", "relu")
    assert is_fused(full, KERNEL) and not is_fused(wide, KERNEL)
    parts = [work(x, KERNEL, "inference", ROOFLINE)[-10:] != 0 for x in (full, wide)]
    assert [*map(list, parts)] == [[1] * 6 + [0] * 4, [0] * 6 + [1] * 4]


ALIKE = np.array([[1.0, 0.3], [0.3, 1.0]])


def _points(rng, count):
    """Returns problems of two candidates, some on another device, and their times."""
    works, places = rng.random((count, 3)), 3 * rng.random((count, 2))
    kinds, is_other = np.arange(count) % 2, np.arange(count) % 3 == 0
    us = works @ [3.0, 0.0, 5.0] * np.where(kinds, 1.3, 1.0) + 1
    noise = np.exp(rng.normal(0, 0.1, count))
    return Points(works, places, kinds, is_other), us * noise


def _expected_factors(points, us):
    """Returns the factors: least squares, drawn to those of all by 30 measurements."""
    relative = points.works / us[:, None]
    of_all, _ = nnls(relative, np.ones(len(us)))
    sizes = np.sqrt(30 * np.mean(relative**2, axis=0))
    factors = []
    for kind in (0, 1):
        own = relative[points.kinds == kind]
        rows = np.concatenate([own, np.diag(sizes)])
        targets = np.concatenate([np.ones(len(own)), sizes * of_all])
        factors.append(nnls(rows, targets)[0])
    return np.stack(factors)


def _covariance(a, b):
    distance = np.linalg.norm(a.places[:, None] - b.places[None], axis=2)
    scaled = np.sqrt(3) * distance / 1.5
    near = (1 + scaled) * np.exp(-scaled)
    alike = ALIKE[a.kinds][:, b.kinds]
    of_device = np.outer(a.is_other, b.is_other) * (0.02 + 0.0025 * alike)
    return near * (0.06 + 0.04 * alike) + of_device


@pytest.mark.parametrize("later", [(), (5,), (5, 4)], ids=["once", "later", "twice"])
def test_predictions_are_those_of_the_process(later):
    rng = np.random.default_rng(0)
    first = known, us = _points(rng, 30)
    regression = fit(*first, ALIKE)
    for count in later:
        points, more = _points(rng, count)
        regression = regression.given(points, more)
        known = Points(*map(np.concatenate, zip(known, points, strict=True)))
        us = np.concatenate([us, more])
    asked, _ = _points(rng, 6)
    factors = _expected_factors(*first)  # of the first fit, whatever comes after
    assert (factors >= 0).all()

    def log_us(points):
        return np.log(np.sum(points.works * factors[points.kinds], axis=1))

    inverse = np.linalg.inv(_covariance(known, known) + 0.004 * np.eye(len(us)))
    near = _covariance(asked, known)
    mean = log_us(asked) + near @ inverse @ (np.log(us) - log_us(known))
    variance = np.diag(_covariance(asked, asked) - near @ inverse @ near.T) + 0.004
    expected = np.stack([np.exp(mean), np.sqrt(variance)], axis=1)
    np.testing.assert_allclose(regression.predict(asked), expected, rtol=1e-6)
