import copy
import re
import sys

import pytest

from loka_jax.report import charts
from loka_jax.report.run_files import RunFiles
from loka_jax.report.run_page import gap_closed, write_run_page
from tests.support.report import (
    EVALUATION,
    HOSTILE,
    RUN,
    SITES,
    SUMMARY,
    Page,
    assert_self_contained,
    eval_line,
    hostile,
    record_charts,
    train_line,
    with_leaves,
)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of `RUN`, with its drawings."""
    return Page(write_run_page(tmp_path_factory.mktemp("run") / "report.html", RUN))


@pytest.fixture
def page_of(tmp_path, monkeypatch):
    """Returns a function from a run's files to its page, without drawings."""
    monkeypatch.setattr(charts, "_draw", lambda *_, **__: "")  # drawing is slow
    return lambda run: Page(write_run_page(tmp_path / "report.html", run))


def test_the_page_tells_the_headline_numbers(page):
    assert page.tiles == {
        "AUC, test": ("0.75123", "step 10, the best by NE"),
        "Log loss, test": ("0.45000", "step 10, the best by NE"),
        "NE, test": ("0.85000", "normalized entropy; best possible 0.80000"),
        "NE gap closed, test": ("75.0 %", "(1 − NE) / (1 − best)"),
        "NE of a logistic regression": ("0.87654", "on the same rows and columns"),
        "Calibration, test": ("1.0100", "mean p / mean label"),
        "Examples/s": ("12,345,679", "training, without steps that compile"),
        "FP8 sites": ("1 of 3", "fp8_ rowwise"),
    }
    assert page.bars() == ["75.0%", "33.3%"]
    facts = "finished recipe fp8_rowwise on cpu mesh 2 x 4 gradients summed in bf16: "
    facts += "it is faster seed 3 steps 20 examples 2,000 2 min 05 s compiled for "
    assert f"{facts}12.2 s evaluated at step 10, the best by NE" in page.text
    assert "1 step was skipped" in page.text and "valid: the whole split" in page.text


def test_each_curve_has_its_own_values(page_of, monkeypatch):
    drawn, options = record_charts(monkeypatch)
    page_of(RUN)

    def of(name, lines=RUN.train):
        return [(line["examples"], line[name]) for line in lines]

    valid = [RUN.evals[0], RUN.evals[2]]
    expected = {
        "Log loss": {"train": of("loss"), "valid": of("logloss", valid)},
        "Normalized entropy": {"train": of("ne"), "valid": of("ne", valid)},
        "Learning rate": {"train": of("lr")},
        "Gradient norm": {"train": of("grad_norm")},
        "Examples per second": {"train": of("examples_per_second")},
    }
    assert {title: drawn[title] for title in expected} == expected
    assert drawn["AUC"]["valid"] == of("auc", valid)
    assert drawn["Memory in bytes"]["host"] == of("host_bytes")
    assert options["Normalized entropy"]["floor"] == 0.8
    marks = {t: [*x["marks"]] for t, x in options.items() if "marks" in x}
    assert marks == {"Log loss": [700.0], "Gradient norm": [700.0]}
    (points,) = drawn["Calibration by prediction"].values()
    assert points[0] == (0.25, 0.2, 0.15, 0.3) and points[1][0] == 0.5
    lines = [train_line(step, skipped_steps=step) for step in range(1, 2001)]
    page_of(RUN._replace(train=lines))  # all of them are skipped
    marks = options["Log loss"]["marks"]
    assert 100 <= len(marks) < 200 and marks[-1] == 200_000


def test_the_page_tells_sites_plan_data_and_command(page):
    assert page.rows("What ran at each site")[1:] == [
        ["bottom_mlp/dense_0", "64 × 13 × 32", *["bf16 (xla)"] * 3]
        + ["k = 13 is no multiple of 16"],
        ["top_mlp/dense_0", "64 × 32 × 48", "e4m3 x e4m3 (xla)", "e5m2 x e4m3 (xla)"]
        + ["bf16 (xla)", "FP8 not fused: no Hopper GPU"],
        ["head", "64 × 48 × 1", *["f32 (xla)"] * 3, "the recipe is f32"],
    ]
    assert "1 of 3 sites run in FP8. Recipes: fp8_rowwise, f32." in page.text
    row = ["top_mlp/dense_0", "pallas fp8_rowwise", "1.25", "0.037"]
    assert page.rows("Dispatch")[1:] == [[*row, "the fastest", "xla bf16"]]
    (_, scales) = page.rows("Scales over time")
    assert scales[1].endswith("2 −8 → 2 −1")
    assert page.rows("Data") == [
        ["column", "values", "table rows", "parameters", "most frequent values"],
        ["C1", "90", "100", "800", "a (30), b (2)"],  # its own 8 columns
        ["C2", "70", "50", "800", ""],
        ["C3", "11", "100", "n/a", ""],  # the table is that of C1
        ["column", "missing", "not in the vocabulary"],
        *[["I1", "7", "0"], ["C1", "0", "4,321"]],
        *[["column", "nan"], ["I1", "2"]],
        *[["file", "row", "reason"], ["a.tsv", "9", "short"]],
    ]
    for said in (
        "7 missing, 4,321 not in the vocabulary",
        "Split rule: by hash. Weighted by <w>.",
        "train examples 2,000 test examples 300",
        "C2 has few rows",
        "1 bad row was left out",
        SUMMARY["command"],
        "model.hidden 32 32",
        "top_mlp/dense_1 did not compile",
        "Went back to step 8, learning rates halved.",
        "top_mlp/dense_0/lhs was clipped at 1/50,000 of its amax.",
    ):
        assert said in page.text


def test_the_page_tells_calibration_and_quality_by_column(page):
    rows = page.rows("Calibration and columns, test")
    rates = ["150", "0.2500", "0.2000", "1.250", "0.800 … 1.600"]
    assert rows[1] == rates and ["C1", "17", "0.70000", "87.5 %"] in rows
    assert ["C1", "missing or unknown", "0.65000", *rates] in rows
    assert ["", "<b> & co", "n/a", *rates] in rows
    assert ["", "id 9", "0.50000", *rates] in rows
    assert "Of 1,234 examples of the final evaluation" in page.text


def test_days_and_labels_have_their_own_numbers(page_of):
    numbers = {"auc": 0.7, "logloss": 0.5, "ne": 0.9, "calibration": 1.1}
    day = {"data": "monday.csv", "examples": 900} | numbers
    days = [day, day | {"data": "<b>.csv", "ne": 0.875}]
    own = {"buy": {"auc": 0.6, "logloss": 0.3, "ne": 0.9}, "click": {}}
    final = SUMMARY["final_eval"] | {"tasks": own}
    tasks = {"click": EVALUATION, "<b>uy": EVALUATION | {"examples": 77}}
    summary = SUMMARY | {"days": days, "final_eval": final}
    evaluation = {"split": "test", "tasks": tasks}
    page = page_of(RUN._replace(summary=summary, evaluation=evaluation))
    row = ["900", "0.70000", "0.50000", "0.90000", "1.1000"]
    assert page.rows("Quality by day")[1:] == [
        ["1", "monday.csv", *row],
        ["2", "<b>.csv", *row[:3], "0.87500", row[4]],
    ]
    assert len(page.rows("Calibration and columns, test, <b>uy")) > 3
    assert "Of 77 examples of the final evaluation" in page.text
    note = "log loss 0.30000, NE 0.90000, calibration n/a"
    assert page.tiles["AUC, buy"] == ("0.60000", note)
    assert "Calibration, test" not in page.tiles  # each label has its own


def test_days_are_whole():
    (one,) = charts.curves("NE", [charts.Series("a", [(1, 0.9)], "second")], x="day")
    assert re.findall(r"<text[^>]*>([^<]*)", one.svg)[0] == "1"


def test_own_metrics_importance_and_a_calibration_are_shown(page_of):
    before = {"ne": 0.86, "calibration": 1.47}
    final = SUMMARY["final_eval"] | {"uncalibrated": before, "metrics": {"brier": 0.25}}
    page = page_of(RUN._replace(summary=SUMMARY | {"final_eval": final}))
    shown = ("0.86000", "calibration 1.4700")
    assert page.tiles["NE before its calibration"] == shown
    assert page.tiles["brier, test"] == ("0.25000", "a metric of your own")
    assert page.rows("Importance of columns")[1:] == [["C1", "+0.12500", "0.01000"]]
    numbers = {"ne": 0.86, "calibration": None, "metrics": {"brier": 0.5}}
    before = {"tasks": {"click": numbers | {"calibration": 1.5}}}
    final = {"uncalibrated": before, "tasks": {"click": numbers}}
    page = page_of(RUN._replace(summary=SUMMARY | {"final_eval": final}))
    note = page.tiles["NE before its calibration"][1]
    assert note == "calibration click 1.5000"
    assert page.tiles["brier, click, test"][0] == "0.50000"


def test_the_page_asks_nothing_from_anywhere(page):
    assert_self_contained(page)
    assert page.tags().count("figure") == 8
    ids = [e.get("id") for e in page.root.iter() if e.get("id")]
    assert len(set(ids)) == len(ids)
    for name in re.findall(r'(?:url\(#|href="#)([^)"]+)', page.html):
        assert name in ids


def test_names_of_a_run_are_no_html(page_of):
    summary = hostile(SUMMARY)
    summary["config"][HOSTILE] = summary["versions"][HOSTILE] = "x"
    summary["data"] |= {HOSTILE: "x", "examples": {HOSTILE: 1}}
    summary["data"]["splits"] = {HOSTILE: {"columns": {HOSTILE: {"missing": 1}}}}
    summary["data"]["bad_rows"]["samples"] = [{HOSTILE: "x"}]
    run = RUN._replace(
        **{"summary": summary, "config": summary["config"], "notes": [HOSTILE]},
        **{"evals": [eval_line(20, split=HOSTILE)], "sites": hostile(SITES)},
        scales=[{"step": 1, f"{HOSTILE}/lhs": 1.0, HOSTILE: 2.0}],
        evaluation=hostile(EVALUATION),
    )
    page = page_of(run)
    assert not {"script", "alert"} & {*page.tags()} and "<script" not in page.html
    assert HOSTILE in page.text


def test_an_interrupted_run_says_so_and_shows_its_last_evaluation(page_of):
    page = page_of(RUN._replace(summary={}, notes=["sites.json is broken."]))
    for said in ("sites.json is broken.", "not finished", "The run has not ended"):
        assert said in page.text
    assert page.tiles["AUC, valid"] == ("0.75000", "step 20")
    assert page.tiles["FP8 sites"][0] == "1 of 3"
    assert page.tiles["Examples/s"][0] == "1,020"
    assert "steps 20 examples 2,000 2.0 s" in page.text
    stopped = page_of(RUN._replace(summary=SUMMARY | {"finished": False}))
    assert "not finished" in stopped.text and "The run has not ended" in stopped.text


def _with_one_replaced(value, new):
    """Yields copies of a value, in each of which one list or dict below is `new`."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in pairs:
        if isinstance(item, dict | list):
            for other in (new, *_with_one_replaced(item, new)):
                whole = copy.copy(value)
                whole[key] = other
                yield whole


_STRANGE = [None, "\ud800", float("nan"), 10**400, [[]], {"": {"a": None}}]


@pytest.mark.parametrize("value", _STRANGE, ids=type)
def test_a_strange_value_in_any_field_does_no_harm(value, page_of, monkeypatch):
    monkeypatch.setattr(charts, "can_draw", lambda: False)
    leaves = with_leaves(RUN._asdict(), lambda _: value)
    pages = [page_of(RunFiles(**leaves))]
    for file in ("summary", "evaluation"):
        others = _with_one_replaced(getattr(RUN, file), value)
        pages += [page_of(RUN._replace(**{file: other})) for other in others]
    for page in pages:
        assert page.tags().count("h1") == 1 and "script" not in page.tags()


def test_a_gap_that_cannot_be_closed_has_no_share():
    assert [gap_closed(0.9, x) for x in (1.0, 1 - 1e-12, 2.0, None, "x")] == [None] * 5
    assert gap_closed(1.1, 0.8) < 0 < gap_closed(0.9, 0.8)


def test_without_matplotlib_the_page_says_so_and_shows_tables(page_of, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = page_of(RUN)
    assert "install loka-jax[report]" in page.text and "figure" not in page.tags()
    row = ["20", "2,000", "valid", "0.75000", "0.45000", "0.85000", "1.0100"]
    assert row in page.rows("Learning curves")
    row = ["20", "2,000", "0.55000", "0.85000", "0.02", "0.125", "1,020", "2,560"]
    assert [*row, "n/a", "1"] in page.rows("Learning curves")
