"""Predicted times: of synthetic kernels, and of the shipped measurements."""

import dataclasses
import math

import numpy as np
import pytest

from loka_jax.dispatch import local
from loka_jax.dispatch.header import Header
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.policy import Limits, Terms, decide
from loka_jax.dispatch.regression import LEAST_POINTS, Points, Regression
from loka_jax.dispatch.table import Entry, Table
from loka_jax.dispatch.work import place, work
from loka_jax.site import BF16, Choice, SiteSpec
from tests.support import stand_ins

# Products take next to no time: the synthetic kernels only copy.
ROOFLINE = dataclasses.replace(
    stand_ins.ROOFLINE, bf16_flops_per_us=1e12, fp8_flops_per_us=2e12
)
H200 = "NVIDIA H200"
HEADER = Header(H200, "1", "1", "", "x")
KERNEL = Choice.parse("pallas bf16")


def _sites():
    sizes = [(m, k) for m in (1024, 4096, 65536) for k in (64, 256, 512, 1024)]
    return [SiteSpec(m, k, n, "layer", "swish") for m, k in sizes for n in (128, 512)]


def _copies(spec):
    """Returns the time of a kernel that moves lhs and y in bfloat16, and launches."""
    return 3.0 + 2 * spec.m * (spec.k + spec.n) / ROOFLINE.bytes_per_us


def _table(sites, time=_copies):
    entries = {s: Entry({"training": {BF16.name: time(s)}}) for s in sites}
    return Table(HEADER, entries, ROOFLINE)


def _predicted(model, spec, pass_name="training"):
    return model.predictions(spec, [BF16], pass_name).get(BF16.name)


def test_times_that_are_sums_of_work_are_predicted_where_nothing_was_measured():
    model = PerformanceModel(_table(_sites()))
    for spec in (
        SiteSpec(20_000, 384, 256, "layer", "swish"),
        SiteSpec(16384, 704, 320, "layer", "swish"),
    ):
        predicted = _predicted(model, spec)
        # The noise that the process allows for is 4.5 %.
        assert predicted.us == pytest.approx(_copies(spec), rel=0.05)
        assert 0.04 < predicted.spread < 0.3


def test_a_measurement_goes_before_a_prediction():
    sites = _sites()
    table = _table(sites)
    table.sites[sites[0]].times["training"][BF16.name] = 123.0
    estimates = PerformanceModel(table).estimates(sites[0])
    assert estimates.entry.times["training"][BF16.name] == 123.0
    assert estimates.spread("training", BF16) is None
    other = dataclasses.replace(sites[0], m=5000)
    assert PerformanceModel(table).estimates(other).spread("training", BF16) > 0


def test_a_hopeful_model_has_the_ends_of_intervals_and_what_was_measured():
    table = _table(_sites())
    for spec in _sites():
        table.sites[spec].times["training"][KERNEL.name] = _copies(spec)
    model, spec = PerformanceModel(table), SiteSpec(20_000, 384, 256, "layer", "swish")
    hopeful = model.hopeful(2.0)
    for choice, sign in ((BF16, 1), (KERNEL, -1)):
        off = sign * 2.0 * model.estimates(spec).spread("training", choice)
        time = model.estimates(spec).entry.times["training"][choice.name]
        found = hopeful.estimates(spec).entry.times["training"][choice.name]
        assert found == pytest.approx(time * math.exp(off))
    measured = _sites()[0]
    times = hopeful.estimates(measured).entry.times["training"]
    assert times[BF16.name] == times[KERNEL.name] == _copies(measured)


def test_inference_knows_recipes_that_differ_in_gradients_only_as_one():
    # Twelve sites of one recipe, all of the other, which is twice as slow as work says
    # at a width: in inference they are one program.
    some, other = (Choice.parse(f"xla fp8_rowwise{x}") for x in ("", "/bf16/bf16"))

    def time(spec):
        return _copies(spec) * (2 if spec.k == 512 else 1)

    table = _table(_sites(), time)
    for spec in _sites():
        times = {other.name: time(spec)} | (
            {some.name: time(spec)} if spec.k < 512 else {}
        )
        for pass_name in ("training", "inference"):
            table.sites[spec].times[pass_name] = dict(times)
    model, spec = PerformanceModel(table), SiteSpec(4096, 512, 256, "layer", "swish")
    off = {
        name: abs(
            math.log(model.predictions(spec, [some], name)[some.name].us / time(spec))
        )
        for name in ("training", "inference")
    }
    assert off["inference"] < 0.6 * off["training"]


def test_neighbours_correct_what_the_factors_get_wrong():
    # Sites of 4,096 rows take twice their work: no sum of work says so.
    def time(spec):
        return _copies(spec) * (2 if spec.m == 4096 else 1)

    left_out = SiteSpec(4096, 512, 128, "layer", "swish")
    known = [site for site in _sites() if site != left_out]
    near = _predicted(PerformanceModel(_table(known, time)), left_out)
    others = _table([s for s in known if s.m != 4096], time)
    far = _predicted(PerformanceModel(others), left_out)
    off_near, off_far = (abs(math.log(p.us / time(left_out))) for p in (near, far))
    assert off_near < 0.6 * off_far and near.spread < far.spread


def test_no_prediction_is_less_than_the_products_at_full_rate():
    table = _table(_sites())
    slow = dataclasses.replace(ROOFLINE, bf16_flops_per_us=1e6)
    spec = _sites()[-1]
    least = 0.9 * 3 * 2 * spec.m * spec.k * spec.n / 1e6
    model = PerformanceModel(Table(HEADER), fitted=table, roofline=slow)
    assert _predicted(model, spec).us >= least


def test_few_measurements_predict_nothing():
    table = _table(_sites()[: LEAST_POINTS - 1])
    assert _predicted(PerformanceModel(table), _sites()[-1]) is None
    without = dataclasses.replace(_table(_sites()), roofline=None)
    assert _predicted(PerformanceModel(without), _sites()[-1]) is None


def test_a_chain_is_predicted_for_recipes_that_were_timed_in_one():
    # In a chain, a drhs in FP8 reads another layout than lhs is handed on in.
    timed = Choice.parse("pallas fp8_tensorwise_delayed_bf16_drhs")
    other = Choice.parse("pallas fp8_tensorwise_delayed")
    entries = {
        spec: Entry(
            {
                "training": {timed.name: _copies(spec), other.name: _copies(spec)},
                "training in": {timed.name: 0.8 * _copies(spec)},
            }
        )
        for spec in _sites()
    }
    model = PerformanceModel(Table(HEADER, entries, ROOFLINE))
    times = model.estimates(SiteSpec(20_000, 384, 256, "layer", "swish")).entry.times
    assert {timed.name, other.name} <= set(times["training"])
    assert set(times["training in"]) == {timed.name}


def test_another_device_is_scaled_by_its_roofline_and_less_certain():
    half = dataclasses.replace(
        ROOFLINE,
        bytes_per_us=ROOFLINE.bytes_per_us / 2,
        bf16_flops_per_us=ROOFLINE.bf16_flops_per_us / 2,
        launch_us=2 * ROOFLINE.launch_us,
    )
    fitted, spec = _table(_sites()), _sites()[-1]
    here = PerformanceModel(Table(HEADER), fitted=fitted)
    there = PerformanceModel(Table(HEADER), fitted=fitted, roofline=half)
    us, spread = _predicted(here, spec)
    slower, wider = _predicted(there, spec)
    assert slower == pytest.approx(2 * us, rel=0.01) and wider > spread


def test_what_was_measured_here_corrects_predictions_near_it():
    model = PerformanceModel(_table(_sites()))
    near, spec = (SiteSpec(m, 512, 256, "layer", "swish") for m in (5000, 4500))
    slow = Table(HEADER, {near: Entry({"training": {BF16.name: 1.5 * _copies(near)}})})
    before, after = (_predicted(x, spec) for x in (model, model.with_table(slow)))
    assert after.us > 1.1 * before.us and after.spread < before.spread
    far = SiteSpec(65536, 64, 128, "layer", "swish")
    unmoved, also = (_predicted(x, far) for x in (model, model.with_table(slow)))
    assert also.us == pytest.approx(unmoved.us, rel=0.03)


def test_another_device_is_known_better_after_some_measurements():
    # A quarter slower than its roofline says, at all shapes.
    half = dataclasses.replace(ROOFLINE, bytes_per_us=ROOFLINE.bytes_per_us / 2)

    def time(spec):
        return 1.25 * (2 * _copies(spec) - 3.0)

    fitted, spec = _table(_sites()), _sites()[-1]
    unknown = PerformanceModel(Table(HEADER), fitted=fitted, roofline=half)
    others = [s for s in _sites() if s.k != spec.k]
    known = unknown.with_table(Table(HEADER, _table(others, time).sites))
    before, after = (_predicted(x, spec) for x in (unknown, known))
    off_before, off_after = (abs(math.log(x.us / time(spec))) for x in (before, after))
    assert off_after < 0.3 * off_before and after.spread < before.spread


def test_the_same_is_known_whatever_comes_first():
    rng = np.random.default_rng(0)

    def draw(count):
        parts = rng.random((count, 3)), rng.random((count, 2))
        points = Points(*parts, np.arange(count) % 2, np.arange(count) % 3 == 0)
        return points, 1 + rng.random(count)

    (first, second), (asked, _) = (draw(4), draw(5)), draw(6)
    alike = np.array([[1.0, 0.5], [0.5, 1.0]])
    fit = Regression(*draw(30), alike)
    one_by_one = fit.given(*first).given(*second)
    points = Points(*map(np.concatenate, zip(second[0], first[0], strict=True)))
    at_once = fit.given(points, np.concatenate([second[1], first[1]]))
    for some in (one_by_one, at_once):
        np.testing.assert_allclose(
            some.predict(asked), one_by_one.predict(asked), rtol=1e-9
        )
    # Where it was measured, twice the noise is left, at most.
    assert all(x.spread < 0.09 for x in at_once.predict(first[0]))


def test_work_counts_partial_rows_and_tiles():
    full, partial = (SiteSpec(m, 256, 256, "layer", "relu") for m in (64_000, 63_992))
    parts = [work(spec, KERNEL, "inference", ROOFLINE) for spec in (full, partial)]
    # Kernels take any rows: no copies, and the same tiles.
    np.testing.assert_allclose(parts[1], parts[0], rtol=2e-4)
    assert place(full, KERNEL).shape == place(partial, BF16).shape


def test_work_counts_the_copies_of_fp8_at_rows_that_are_padded():
    even, odd = (SiteSpec(m, 512, 1024, "block", "relu") for m in (50_000, 49_999))
    for choice, copies in ((BF16, 0), (Choice.parse("pallas fp8_rowwise"), 1)):
        parts = [work(spec, choice, "inference", ROOFLINE) for spec in (even, odd)]
        # Lhs of one byte and y of two, read and written.
        us = 2 * odd.m * (odd.k + 2 * odd.n) / ROOFLINE.bytes_per_us
        assert np.max(parts[1] - parts[0]) == pytest.approx(copies * us, abs=0.02 * us)


def test_factors_are_not_negative():
    rng = np.random.default_rng(0)
    works, places = rng.random((40, 3)), rng.random((40, 2))
    points = Points(works, places, np.arange(40) % 2, np.zeros(40, bool))
    regression = Regression(points, 1 + works[:, 0], np.eye(2))
    assert (regression._factors >= 0).all()


def test_a_candidate_of_few_measurements_is_predicted_by_what_others_cost():
    # Small sites alone do not tell a launch from the work: those of another do.
    fp8 = Choice.parse("xla fp8_tensorwise_delayed")
    table = _table(_sites())
    for spec in [s for s in _sites() if s.k == 64 or s.m == 1024][:LEAST_POINTS]:
        table.sites[spec].times["training"][fp8.name] = 1.1 * _copies(spec)
    spec = SiteSpec(65536, 1024, 512, "layer", "swish")
    (predicted,) = PerformanceModel(table).predictions(spec, [fp8], "training").values()
    assert predicted.us == pytest.approx(1.1 * _copies(spec), rel=0.15)


# Bounds of what experiments/bench/predictions.py measures at shapes left out of a fit.
def test_the_shipped_fit_predicts_shapes_that_are_left_out():
    table = local.fitted_table(H200)
    shapes = sorted({(s.k, s.n) for s in table.sites})[::10]
    left_out = [s for s in table.sites if (s.k, s.n) in shapes]
    kept = {s: e for s, e in table.sites.items() if s not in left_out}
    model = PerformanceModel(dataclasses.replace(table, sites=kept))
    errors = [
        abs(
            _predicted(model, spec, name).us / table.sites[spec].times[name]["xla bf16"]
            - 1
        )
        for spec in left_out
        for name in ("training", "inference")
        if name in table.sites[spec].times  # some random sites have inference alone
    ]
    assert len(errors) > 20 and np.median(errors) < 0.2


def test_a_plan_by_predictions_takes_kernels_at_a_shape_that_nobody_measured():
    model = PerformanceModel(Table(HEADER), fitted=local.fitted_table(H200))
    spec = SiteSpec(29_952, 448, 384, "layer", "swish")
    assert spec not in local.fitted_table(H200).sites
    entry = model.estimates(spec).entry
    bf16_only = Terms(why_not_fp8="its errors are unknown")
    assert decide(entry, Limits(), bf16_only).choice == KERNEL
