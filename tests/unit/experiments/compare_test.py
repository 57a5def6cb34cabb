import json
import pathlib
import re

import numpy as np
import pyarrow as pa
import pytest

from experiments import compare
from loka_jax import commands, predict
from loka_jax.predict.evaluate import Judged
from loka_jax.report import charts
from loka_jax.train import scores as scores_file
from loka_jax.train.folder.record import METRICS, SUMMARY, RunRecord
from loka_jax.train.scores import Scores
from tests.support.commands import assert_refused
from tests.support.report import Page, eval_line


@pytest.fixture(autouse=True)
def no_drawings(monkeypatch):
    monkeypatch.setattr(charts, "can_draw", lambda: False)


def leave_run(workdir, *, ne, label="click"):
    """Leaves the files of a run that ended."""
    rng = np.random.default_rng(0)
    labels = (rng.random(50) < 0.3).astype(np.float32)
    logits = (labels + rng.normal(0, ne, 50)).astype(np.float32)
    config = {"name": "small", "seed": 0, "data": {"kind": "table", "label": label}}
    summary = {"config": config, "final_eval": {"ne": ne}, "final_split": "test"}
    ids = np.zeros((50, 1), np.int32)
    scores = Scores(logits, labels, np.ones(50, np.float32), ids)
    with RunRecord(workdir, config=config) as record:
        record.start(0)
        record.log(eval_line(5, ne=ne))
        record.write_scores({label: scores}, "test", ["C1"])
        record.write(SUMMARY, summary)
    return str(workdir)


def test_runs_are_compared_by_their_folders_with_the_first(tmp_path, run):
    runs = [leave_run(tmp_path / f"run-{i}", ne=0.8 + i / 10) for i in (1, 0)]
    out = tmp_path / "page.html"
    code, said, error = run(compare, *runs, "--out", out)
    first, last = said.splitlines()
    assert (code, last, error) == (0, f"Comparison: {out}", "")
    page = Page(out)
    number = r"[+-]\d\.\d{5} ± \d\.\d{5}"
    assert re.fullmatch(
        rf"run-0 minus run-1, over 50 examples: log loss {number}, "
        rf"NE % [+-][\d.]+ ± [\d.]+, AUC {number}",
        first,
    )
    assert f"experiments/compare.py {runs[0]} {runs[1]} --out" in page.text
    rows = page.rows("Paired differences")
    assert rows[1][0] == "run-0" and all("±" in cell for cell in rows[1][1:4])
    assert rows[1][4] == "50"


def test_runs_on_other_rows_are_scored_again_on_the_same(tmp_path, run, monkeypatch):
    runs = [leave_run(tmp_path / name, ne=1.0) for name in ("one", "two")]
    for workdir, split in zip(runs, ("valid", "test"), strict=True):
        path = pathlib.Path(workdir) / SUMMARY
        path.write_text(path.read_text().replace('"test"', f'"{split}"'))
    out = tmp_path / "page.html"
    assert_refused(run(compare, *runs, "--out", out), "score both on the same file")

    labels = np.arange(60.0)[:, None] % 2
    weights, keys = np.ones(60), pa.chunked_array([pa.nulls(60)])

    def judged(workdir, path, where):
        assert (path, where) == ("day.csv", "dt=1")
        logits = np.full((60, 1), 0.5 if workdir.name == "one" else 0.0)
        return Judged(("click",), logits, labels, weights, keys, None)

    monkeypatch.setattr(predict, "load", lambda path: path)
    monkeypatch.setattr(predict, "judged_rows", judged)
    rows = ("--data.path", "day.csv", "--data.where", "dt=1")
    file = tmp_path / "numbers.json"
    code, said, _ = run(compare, *runs, *rows, "--out", out, "--json", file)
    assert code == 0 and said.startswith("Both scored again on day.csv, dt=1.")
    assert "seeds: " not in said
    found = json.loads(file.read_text())
    minus = np.log(2) - np.logaddexp(0, [0.5, -0.5]).mean()
    loss = found["by_examples"]["two"]["examples"][""]["logloss"]
    assert loss["mean"] == pytest.approx(minus) and loss["count"] == 60


def test_what_cannot_be_compared_is_one_sentence(tmp_path, run, monkeypatch):
    monkeypatch.setattr(commands, "_IN_WHEEL", tmp_path)
    first, other = (leave_run(tmp_path / name, ne=0.8) for name in ("first", "other"))
    buy = leave_run(tmp_path / "buy", ne=0.8, label="buy")
    broken = leave_run(tmp_path / "broken", ne=0.9)
    (tmp_path / "broken" / scores_file.SCORES).write_bytes(b"\x93NUMPY")
    cut, lost = (leave_run(tmp_path / name, ne=0.9) for name in ("cut", "lost"))
    (tmp_path / "cut" / SUMMARY).write_text("{")
    (tmp_path / "lost" / METRICS).write_text("{}x\n{}\n")
    page, summary = tmp_path / "page.html", tmp_path / "first" / SUMMARY
    before = summary.read_text()
    for runs, out, sentence in (
        ([], page, "the number of runs is 0: name 2 to 16 of them."),
        ([first, str(tmp_path / "nothing")], page, "nothing holds no run"),
        ([first, first], page, "first is named twice: name each run once."),
        ([first, buy], page, "in common with first (data.label is click and buy)"),
        ([first, broken], page, "scores.npy is broken: delete it, to do without it."),
        ([first, cut], page, "cut is damaged (summary.json is broken): restore"),
        ([lost, other], page, "metrics.jsonl: 1 damaged line is left out): restore"),
        ([first, other], summary, "must end in .html: rename it."),
    ):
        assert_refused(run(compare, *runs, "--out", out), sentence)
    assert not page.exists() and summary.read_text() == before


def test_folders_of_one_name_are_told_apart():
    paths = [pathlib.Path(name) for name in ("/a/1/run", "/b/1/run", "/b/2/other")]
    assert compare._names(paths) == ["a/1/run", "b/1/run", "b/2/other"]
    assert compare._names(paths[1:]) == ["run", "other"]
