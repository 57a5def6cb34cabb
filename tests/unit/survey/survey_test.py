"""A survey of a small trained model, from statistics to verdicts."""

import json

import numpy as np
import pytest

from loka_jax import jsonfile
from loka_jax.data import Position
from loka_jax.measure.intervals import Interval
from loka_jax.measure.site_errors import role_candidates
from loka_jax.recipe import ROLES
from loka_jax.report import write_survey_page
from loka_jax.site import BF16, SiteSpec
from loka_jax.survey import Limits, SurveyConfig, survey
from loka_jax.survey.sensitivity import ALL
from loka_jax.survey.survey import prediction, rank_correlation
from loka_jax.survey.verdict import judge
from loka_jax.train.config import ProbeOptions
from tests.support import train as support
from tests.support.report import Page

OPTIONS = SurveyConfig(
    pairs=6,
    rows=32,
    captured_batches=2,
    held_out_batches=2,
    recipes=("fp8_tensorwise_delayed",),
)


def _run(**kwargs):
    config = support.config(**kwargs)
    probe = ProbeOptions(every=1)
    return support.build_lib.build(type(config)(**(vars(config) | {"probe": probe})))


@pytest.fixture(scope="module")
def surveyed():
    run = _run()
    state = run.init()
    for i in range(3):
        batch = run.splits.train.batch(Position(0, i, 0), 32, shuffle=True)
        probe = run.config.probe.config_at(i)
        state = run.train_step(scales_initialized=False, probe=probe)(state, batch)
    lines = []
    return run, state, survey(run, state, OPTIONS, lines.append), lines


@pytest.mark.slow
def test_every_role_of_every_site_that_fp8_takes_is_measured(surveyed):
    run, _, found, lines = surveyed
    paths = [site["path"] for site in found["sites"]]
    others = [site["path"] for site in found["not_surveyed"]]
    assert set(paths) | set(others) == {site.path for site in run.sites}
    assert "head" in others and all(one["why"] for one in found["not_surveyed"])
    assert len(lines) == len(paths) + 1
    for site in found["sites"]:
        assert set(site["roles"]) == set(ROLES)
        for role, measured in site["roles"].items():
            assert (
                measured[BF16.name]["errors"]["learned"]["relative_l2"]["mean"] < 0.005
            )
            assert len(measured) == 2, role
            for name, one in measured.items():
                for errors in one["errors"].values():
                    for estimate in errors.values():
                        assert estimate["low"] <= estimate["mean"] <= estimate["high"]
                if name != BF16.name:
                    error = one["errors"]["learned"]["relative_l2"]["mean"]
                    assert 0.005 < error < 0.15
                    assert one["us"] is None and one["is_fast"] is None


@pytest.mark.slow
def test_real_operands_are_those_of_the_model(surveyed):
    _, _, found, _ = surveyed
    known = found["prediction"]
    assert set(known) == {"learned", "normal"}
    assert known["learned"]["count"] == known["normal"]["count"] == 6
    assert known["learned"]["mean_deviation"] < 0.3
    assert -1 <= known["learned"]["rank_correlation"] <= 1


@pytest.mark.slow
def test_one_site_at_a_time_moves_the_loss(surveyed):
    run, _, found, _ = surveyed
    effects = found["sensitivity"]
    *paths, last = effects
    assert last == ALL and set(paths) == {site["path"] for site in found["sites"]}
    moved = [effects[path]["moved"] for path in paths]
    assert moved == sorted(moved, reverse=True) and moved[-1] > 0
    assert effects[ALL]["moved"] < sum(moved)
    for effect in effects.values():
        assert effect["low"] <= effect["change"] <= effect["high"]
        assert abs(effect["change"]) <= effect["moved"]


@pytest.mark.slow
def test_few_statistics_are_warned_of(surveyed):
    _, _, found, _ = surveyed
    assert any("rows are too few" in warning for warning in found["warnings"])
    assert any("the weight was observed 3 times" in line for line in found["warnings"])


@pytest.mark.slow
def test_the_survey_is_json_and_has_a_page(surveyed, tmp_path):
    _, _, found, _ = surveyed
    jsonfile.write(tmp_path / "probe.json", found)
    read = json.loads((tmp_path / "probe.json").read_text())
    page = Page(write_survey_page(tmp_path / "probe.html", read, []))
    assert page.tiles["Sites"][0] == str(len(found["sites"]))


@pytest.mark.slow
def test_a_run_without_statistics_is_refused():
    run = support.build_lib.build(support.config())
    with pytest.raises(ValueError, match="no statistics: train it with --probe.every"):
        survey(run, run.init(), OPTIONS, print)


def _errors(relative_l2, worst_row=0.1, mere=0.4):
    values = {"relative_l2": relative_l2, "worst_row": worst_row, "mere": mere}
    return {name: Interval(value, value, value) for name, value in values.items()}


@pytest.mark.parametrize(
    "errors, speedup, limits, expected, reason",
    [
        (_errors(0.04), 1.5, Limits(), (True, True), "1.50 times bfloat16, relative"),
        (_errors(0.04), 1.0, Limits(), (True, False), "1.00 times bfloat16"),
        (_errors(0.04), None, Limits(), (True, None), "relative L2 0.040"),
        (
            _errors(0.08),
            2.0,
            Limits(),
            (False, True),
            "relative l2 0.08 is above 0.0555",
        ),
        (_errors(float("nan")), 2.0, Limits(), (False, True), "relative l2 nan"),
        (_errors(0.04, 0.9), 2.0, Limits(), (False, True), "worst row 0.9 is above"),
        (_errors(0.04), 2.0, Limits(mere=0.2), (False, True), "mere 0.4 is above 0.2"),
    ],
)
def test_verdicts(errors, speedup, limits, expected, reason):
    verdict = judge(errors, speedup, limits)
    assert (verdict.is_safe, verdict.is_fast) == expected
    assert verdict.reason.startswith(reason) or reason in verdict.reason


def test_equal_casts_are_one_candidate():
    recipes = ("fp8_rowwise", "fp8_rowwise_bf16_drhs")
    spec = SiteSpec(64, 32, 48)
    names = {
        role: [choice.name for choice in role_candidates(spec, role, recipes)]
        for role in ROLES
    }
    assert names["fwd"] == [BF16.name, "xla fp8_rowwise"]
    assert names["dlhs"] == [BF16.name, "xla fp8_rowwise", "xla fp8_rowwise_bf16_drhs"]
    assert names["drhs"] == [BF16.name, "xla fp8_rowwise"]


def test_rank_correlation():
    a = np.asarray([1.0, 2.0, 3.0, 4.0])
    assert rank_correlation(a, np.exp(a)) == pytest.approx(1.0)
    assert rank_correlation(a, -a) == pytest.approx(-1.0)
    # Of equal values none comes first: by hand, ranks (1.5, 1.5, 3) and (1, 2, 3).
    tied = rank_correlation(np.asarray([1.0, 1.0, 2.0]), a[:3])
    assert tied == pytest.approx(0.75**0.5)
    assert rank_correlation(a[:2], a[:2]) is None
    assert rank_correlation(a, np.ones(4)) is None
    assert prediction([]) == {}


@pytest.mark.parametrize(
    "options, match",
    [
        ({"pairs": 1}, "--survey.pairs 1 must be at least 2"),
        ({"recipes": ("fp8_rows",)}, "did you mean 'fp8_rowwise'"),
        ({"loss_recipe": "fp8_tensorwise_delayed"}, "one with current scales"),
    ],
)
def test_options_out_of_range_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        SurveyConfig(**options)


def test_limits_out_of_range_are_refused():
    with pytest.raises(ValueError, match="limits.worst-row 0"):
        Limits(worst_row=0.0)
