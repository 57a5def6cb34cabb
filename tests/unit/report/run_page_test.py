import copy
import re
import subprocess
import sys

import pytest

from loka_jax.report import RunFiles, charts, gap_closed, write_run_page
from tests.support.report import (
    HOSTILE,
    Page,
    assert_cards_are_labelled,
    assert_escaped,
    assert_self_contained,
    hostile,
    text,
)


def train_line(step, **more):
    return {
        "step": step,
        "kind": "train",
        "examples": step * 100,
        "seconds": step / 10,
        "loss": 0.5 + 1 / step,
        "ne": 0.8 + 1 / step,
        "examples_per_second": 1000.0,
        "lr": 1e-3,
        "grad_norm": 2.5 / step,
        "host_bytes": step << 27,
        "device_peak_bytes": None,
        "skipped_steps": int(step >= 7),
    } | more


def eval_line(step, **more):
    return {
        "step": step,
        "kind": "eval",
        "split": "valid",
        "examples": step * 100,
        "auc": 0.75,
        "logloss": 0.45,
        "ne": 0.85,
        "calibration": 1.01,
    } | more


SITES = [
    {"path": "bottom_mlp/dense_0", "m": 64, "k": 13, "n": 32, "recipe": "fp8_rowwise"}
    | dict.fromkeys(("fwd", "dlhs", "drhs"), "bf16 (xla)")
    | {"why_not": "k = 13 is no multiple of 16"},
    {"path": "top_mlp/dense_0", "m": 64, "k": 32, "n": 32, "recipe": "fp8_rowwise"}
    | {"fwd": "e4m3 x e4m3 (xla)", "dlhs": "e5m2 x e4m3 (xla)", "drhs": "bf16 (xla)"}
    | {"why_not": None, "why_not_fused": "no Hopper GPU"},
]

SUMMARY = {
    "config": {"name": "fp8_dlrm", "model": {"hidden": [32, 32]}},
    "seed": 3,
    "recipe": "fp8_rowwise",
    "versions": {"jax": "0.11.2", "device_kind": "cpu"},
    "steps": 20,
    "examples": 2000,
    "seconds": 125.0,
    "examples_per_second": 12_345_678.9,
    "skipped_steps": 1,
    "final_eval": {"auc": 0.75123, "logloss": 0.45, "ne": 0.85, "calibration": 1.01},
    "final_split": "test",
    "final_state": "step 10, the best by NE",
    "best_possible_ne": 0.8,
    "sites": {"total": 2, "fp8": 1},
    "plan": [
        {"path": "top_mlp/dense_0", "choice": "pallas fp8_rowwise", "speedup": 1.25}
        | {"error": 0.0371, "reason": "the fastest", "runner_up": "xla bf16"}
    ],
    "changes": ["top_mlp/dense_1 did not compile"],
    "returns": ["Went back to step 8, learning rates halved."],
    "warnings": ["step 12: top_mlp/dense_0/lhs was clipped at 1/50,000 of its amax."],
    "command": "uv run python experiments/train.py --config fp8_dlrm --seed 3",
    "data": {
        "split_rule": "by hash",
        "notes": ["Weighted by <w>."],
        "examples": {"train": 2000},
        "splits": {"train": {"columns": {"I1": {"missing": 7}, "C1": {"oov": 4321}}}},
        "bad_rows": {
            "count": 1,
            "samples": [{"file": "a.tsv", "row": 9, "reason": "short"}],
        },
        "format": "tsv",
    },
}

RATES = {"count": 150, "mean_prediction": 0.25, "mean_label": 0.2}
RATES |= {"mean_label_low": 0.15, "mean_label_high": 0.3, "calibration": 1.25}
RATES |= {"calibration_low": 0.8, "calibration_high": 1.6}
EVALUATION = {
    "split": "test",
    "examples": 1234,
    "calibration_curve": [RATES, RATES | {"mean_prediction": 0.5}],
    "columns": [
        {"column": "C1", "num_values": 17, "auc_within": 0.7, "covered": 0.875}
        | {
            "values": [
                {"id": 0, "auc": 0.65} | RATES,
                {"id": 3, "name": "<b> & co", "auc": None} | RATES,
                {"id": 9, "auc": 0.5} | RATES,
            ]
        }
    ],
}

DAY = {"data": "monday.csv", "examples": 900, "auc": 0.7, "logloss": 0.5, "ne": 0.9}
DAY |= {"calibration": 1.1}

RUN = RunFiles(
    summary=SUMMARY,
    config=SUMMARY["config"],
    train=[train_line(step) for step in range(1, 21)],
    evals=[eval_line(10), eval_line(20)],
    sites=SITES,
    scales=[{"step": s, "top_mlp/dense_0/lhs": 2.0 ** (s - 9)} for s in range(1, 9)],
    evaluation=EVALUATION,
    notes=[],
)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of `RUN`."""
    return Page(write_run_page(tmp_path_factory.mktemp("run") / "report.html", RUN))


@pytest.fixture
def page_of(tmp_path):
    """Returns a function from a run's files to its page."""
    return lambda run: Page(write_run_page(tmp_path / "report.html", run))


def test_the_page_tells_the_headline_numbers(page):
    assert page.tiles["AUC, test"] == ("0.75123", "step 10, the best by NE")
    bound = "normalized entropy; best possible 0.80000"
    assert page.tiles["NE, test"] == ("0.85000", bound)
    assert page.tiles["NE gap closed, test"][0] == "75.0 %"  # (1 - 0.85) / (1 - 0.8)
    speed = page.tiles["Examples/s"]
    assert speed == ("12.3 M", "training, without steps that compile")
    assert page.tiles["FP8 sites"][0] == "1 of 2"
    assert "finished recipe fp8_rowwise on cpu seed 3 steps 20" in page.text
    assert "evaluated at step 10, the best by NE" in page.text
    assert "2 min 05 s" in page.text and "1 step was skipped" in page.text


def test_cards_and_curves_name_their_split(page):
    quality = ("AUC", "Log loss", "NE", "NE gap closed", "Calibration")
    assert {f"{name}, test" for name in quality} <= set(page.tiles)
    loss, *_ = page.root.iter("figcaption")
    assert text(loss) == "Log loss train valid skipped step"
    assert "valid: the whole split" in page.text


def test_the_page_tells_sites_plan_data_and_command(page):
    assert page.rows("What ran at each site")[1:] == [
        ["bottom_mlp/dense_0", "64 × 13 × 32", *["bf16 (xla)"] * 3]
        + ["k = 13 is no multiple of 16"],
        ["top_mlp/dense_0", "64 × 32 × 32", "e4m3 x e4m3 (xla)", "e5m2 x e4m3 (xla)"]
        + ["bf16 (xla)", "FP8 not fused: no Hopper GPU"],
    ]
    row = ["top_mlp/dense_0", "pallas fp8_rowwise", "1.25", "0.037"]
    assert page.rows("Dispatch")[1:] == [[*row, "the fastest", "xla bf16"]]
    assert "top_mlp/dense_1 did not compile" in page.text
    assert "Went back to step 8, learning rates halved." in page.text
    assert "top_mlp/dense_0/lhs was clipped at 1/50,000 of its amax." in page.text
    (_, scales) = page.rows("Scales over time")
    assert scales[1].endswith("2 −8 → 2 −1")
    assert "7 missing, 4,321 oov" in page.text
    assert "Split rule: by hash. Weighted by <w>." in page.text
    counts, bad = page.rows("Data")[:3], page.rows("Data")[3:]
    assert counts == [["column", "missing", "oov"], ["I1", "7", "0"]] + [
        ["C1", "0", "4,321"]
    ]
    assert "1 bad row was left out" in page.text
    assert bad == [["file", "row", "reason"], ["a.tsv", "9", "short"]]
    assert SUMMARY["command"] in page.text
    assert "model.hidden 32 32" in page.text and "format tsv" in page.text


def test_a_narrow_page_labels_cells_like_their_columns(page):
    assert_cards_are_labelled(page)


def test_the_page_tells_calibration_and_quality_by_column(page):
    rows = page.rows("Calibration and columns, test")
    rates = ["150", "0.2500", "0.2000", "1.250", "0.800 … 1.600"]
    assert rows[1] == rates and ["C1", "17", "0.70000", "87.5 %"] in rows
    assert ["C1", "missing or unknown", "0.65000", *rates] in rows
    assert ["", "<b> & co", "n/a", *rates] in rows
    assert ["", "id 9", "0.50000", *rates] in rows
    assert "Of 1,234 examples of the final evaluation" in page.text


def test_each_label_has_its_calibration_and_columns(page_of):
    tasks = {"click": EVALUATION, "<b>uy": EVALUATION | {"examples": 77}}
    page = page_of(RUN._replace(evaluation={"split": "test", "tasks": tasks}))
    first, second = (f"Calibration and columns, test, {name}" for name in tasks)
    assert page.rows(first) == page.rows(second) and len(page.rows(first)) > 3
    assert "Of 77 examples of the final evaluation" in page.text


def test_days_stand_in_a_table_and_a_chart(page, page_of):
    days = [DAY, DAY | {"data": "<b>.csv", "ne": 0.875}]
    whole = page_of(RUN._replace(summary=SUMMARY | {"days": days}))
    quality = ["900", "0.70000", "0.50000", "0.90000", "1.1000"]
    rows = whole.rows("Quality by day")
    assert rows[1] == ["1", "monday.csv", *quality]
    assert rows[2][:2] == ["2", "<b>.csv"] and rows[2][5] == "0.87500"
    title = "Normalized entropy by day before training on the day"
    assert title in [text(caption) for caption in whole.root.iter("figcaption")]
    assert "Quality by day" not in page.text
    one = page_of(RUN._replace(summary=SUMMARY | {"days": days[:1]}))
    assert title not in one.text and len(one.rows("Quality by day")) == 2


def test_the_page_asks_nothing_from_anywhere(page):
    assert_self_contained(page)


def test_ids_are_unique_over_all_drawings(page):
    assert page.tags().count("figure") == 8
    ids = [e.get("id") for e in page.root.iter() if e.get("id")]
    assert len(set(ids)) == len(ids)
    for name in re.findall(r'(?:url\(#|href="#)([^)"]+)', page.html):
        assert name in ids


def test_drawings_take_their_colors_and_fonts_from_the_page(page):
    body = page.html.partition("<body>")[2]
    assert "var(--accent)" in body and "var(--good)" in body
    assert "#0102" not in body and "font-family" not in body


def test_names_of_a_run_are_no_html(page_of):
    summary = hostile(SUMMARY)
    summary["config"][HOSTILE] = summary["versions"][HOSTILE] = "x"
    summary["data"] |= {HOSTILE: "x", "examples": {HOSTILE: 1}}
    summary["data"]["splits"] = {HOSTILE: {"columns": {HOSTILE: {"missing": 1}}}}
    summary["data"]["bad_rows"]["samples"] = [{HOSTILE: "x"}]
    run = RunFiles(
        summary=summary,
        config=summary["config"],
        train=[train_line(1, examples=100)],
        evals=[eval_line(20, split=HOSTILE)],
        sites=hostile(SITES),
        scales=[{"step": 1, f"{HOSTILE}/lhs": 1.0, HOSTILE: 2.0}],
        evaluation=hostile(EVALUATION),
        notes=[HOSTILE],
    )
    assert_escaped(page_of(run))


@pytest.mark.parametrize(
    "missing",
    [
        ("summary",),
        ("train", "evals"),
        ("sites", "scales", "evaluation"),
        ("summary", "sites", "scales", "config"),
        ("summary", "sites", "scales", "train", "evals", "evaluation"),
    ],
)
def test_any_file_may_be_missing(missing, page_of):
    empty = {name: type(getattr(RUN, name))() for name in missing}
    assert page_of(RUN._replace(**empty)).tags().count("h1") == 1


def test_an_interrupted_run_says_so_and_shows_its_last_evaluation(page_of):
    page = page_of(RUN._replace(summary={}))
    assert "not finished" in page.text and "The run has not ended" in page.text
    assert page.tiles["AUC, valid"] == ("0.75000", "step 20")
    assert page.tiles["FP8 sites"][0] == "1 of 2"
    assert "--config fp8_dlrm with the overrides" in page.text


def test_broken_files_are_named(page_of):
    notes = ["sites.json is broken and was left out."]
    assert notes[0] in page_of(RUN._replace(notes=notes)).text


def test_values_that_do_not_exist_read_na(page_of):
    final = {"auc": None, "ne": None, "logloss": 0.4, "calibration": float("nan")}
    tiles = page_of(RUN._replace(summary=SUMMARY | {"final_eval": final})).tiles
    for label in ("AUC", "NE", "NE gap closed", "Calibration"):
        assert tiles[f"{label}, test"][0] == "n/a"


def test_values_of_a_wrong_kind_do_no_harm(page_of):
    line = {"step": "x", "loss": "y", "examples": None, "ne": True}
    run = RunFiles(
        summary=dict.fromkeys(SUMMARY, "text") | {"sites": 3, "data": {"splits": [1]}},
        config={"model": 1},
        train=[line],
        evals=[line],
        sites=[{}, {"m": "x"}],
        scales=[{"step": 1, "a/lhs": "x", "b/g": -1}],
        evaluation={"columns": [1], "calibration_curve": [{"mean_label": "x"}]},
        notes=[],
    )
    page = page_of(run)
    assert page.rows("What ran at each site")[1][1] == "n/a × n/a × n/a"


_STRANGE = {
    "null": None,
    "boolean": True,
    "markup": "[/b]",
    "HTML": HOSTILE,
    "half a character": "\ud800",
    "NaN": float("nan"),
    "infinity": float("inf"),
    "400 digits": 10**400,
    "negative": -1,
    "zero": 0,
    "list": [[]],
    "object": {"": {"a": None}},
}


def _with_leaves(value, leaf):
    if isinstance(value, dict):
        return {key: _with_leaves(item, leaf) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_leaves(item, leaf) for item in value]
    return leaf


def _containers(value, path=()):
    """Yields the places of all lists and dicts in a value, but for the value itself."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in pairs:
        if isinstance(item, dict | list):
            yield (*path, key)
            yield from _containers(item, (*path, key))


def _replaced(file, path, value):
    """Returns a file of `RUN` with another value at a place."""
    whole = at = copy.deepcopy(getattr(RUN, file))
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    return whole


@pytest.mark.parametrize("value", _STRANGE.values(), ids=_STRANGE)
def test_a_strange_value_in_any_field_does_no_harm(value, page_of, monkeypatch):
    monkeypatch.setattr(charts, "can_draw", lambda: False)  # drawing is slow
    leaves = {k: _with_leaves(v, value) for k, v in RUN._asdict().items()}
    page = page_of(RunFiles(**leaves))
    assert page.tags().count("h1") == 1 and "script" not in page.tags()
    for file in ("summary", "evaluation"):
        for path in _containers(getattr(RUN, file)):
            page = page_of(RUN._replace(**{file: _replaced(file, path, value)}))
            assert page.tags().count("h1") == 1 and "script" not in page.tags()


def test_huge_numbers_are_not_drawn(page_of):
    lines = [train_line(s, loss=(-1) ** s * 1.7e308, ne=1e99) for s in range(1, 9)]
    page = page_of(RUN._replace(train=lines, evals=[]))
    titles = [next(x.itertext()) for x in page.root.iter("figcaption")]
    assert "Log loss" not in titles and "Normalized entropy" in titles


def test_a_run_of_skipped_steps_has_a_page(page_of):
    lines = [train_line(step, skipped_steps=step) for step in range(1, 2001)]
    html = page_of(RUN._replace(train=lines)).html
    charts_with_marks = 2
    assert 50 < html.count("stroke: var(--bad)") / charts_with_marks < 200


@pytest.mark.parametrize("best", [1.0, 1 - 1e-12, 1 + 1e-12, 2.0, None, "x"])
def test_where_nothing_can_be_learned_there_is_no_gap_to_close(best, page_of):
    assert gap_closed(0.9, best) is None
    page = page_of(RUN._replace(summary=SUMMARY | {"best_possible_ne": best}))
    assert page.tiles.get("NE gap closed, test", ("n/a",))[0] == "n/a"


def test_a_stopped_run_is_not_finished(page_of):
    page = page_of(RUN._replace(summary=SUMMARY | {"finished": False}))
    assert "not finished" in page.text and "The run has not ended" in page.text


def test_a_run_worse_than_the_mean_has_an_empty_bar(page_of):
    summary = SUMMARY | {"final_eval": {"ne": 1.1}}
    page = page_of(RUN._replace(summary=summary))
    assert page.tiles["NE gap closed, test"][0] == "-50.0 %"
    assert "width:0.0%" in page.html


def test_without_matplotlib_the_page_says_so_and_shows_tables(page_of, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = page_of(RUN)
    assert "install loka-jax[report]" in page.text and "figure" not in page.tags()
    row = ["20", "2,000", "valid", "0.75000", "0.45000", "0.85000", "1.0100"]
    assert row in page.rows("Learning curves")
    row = ["20", "2,000", "0.55000", "0.85000", "0.001", "0.125", "1,000", "2,560"]
    assert [*row, "n/a", "1"] in page.rows("Learning curves")


def test_the_same_run_gives_the_same_page(page, page_of):
    strip = "loka_jax run report of"  # the folder's name follows
    assert page_of(RUN).html.partition(strip)[0] == page.html.partition(strip)[0]


@pytest.mark.slow
def test_importing_the_report_imports_no_matplotlib():
    code = "import sys, loka_jax.report; print('matplotlib' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.strip() == "False", out.stderr
