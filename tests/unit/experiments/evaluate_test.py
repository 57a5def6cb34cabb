"""The page of `loka evaluate`."""

from types import SimpleNamespace

import pytest

from experiments import evaluate, options
from loka_jax import predict as predictions
from loka_jax.predict.importance import Importance
from loka_jax.report import run_page
from loka_jax.train.folder import record
from tests.support.commands import assert_refused
from tests.support.report import HOSTILE, Page

NUMBERS = {"rows": 1200, "clicks": 300, "auc": 0.75123, "auc_half": 0.01}
NUMBERS |= {"logloss": 0.45, "logloss_half": 0.02, "ne": 0.85, "ne_half": 0.03}
NUMBERS |= {"calibration": 1.01, "calibration_half": 0.04}
NONE = {"rows": 3, "clicks": 0} | dict.fromkeys(("auc", "logloss", "ne", "calibration"))
RANKED = {"gauc": 0.7, "ndcg": 0.6, "k": 5}


@pytest.fixture
def page_of(run, monkeypatch, tmp_path):
    """Returns a function from numbers and options to the page that is written."""

    def page_of(overall, groups, *line):
        found = predictions.Evaluated(overall, groups, {})
        loaded = SimpleNamespace(step=1234, calibration=None)
        monkeypatch.setattr(predictions, "load", lambda _: loaded)
        monkeypatch.setattr(predictions, "evaluate_files", lambda *_, **__: found)
        ranked = [Importance("user", 0.05, 0.001)]
        monkeypatch.setattr(predictions, "importance_of", lambda *_, **__: ranked)
        monkeypatch.setattr(record, "read_run", lambda _: None)
        monkeypatch.setattr(run_page, "write_run_page", lambda path, _: path)
        monkeypatch.setattr(options, "unwind_on_sigterm", lambda: None)
        page = tmp_path / "page.html"
        workdir = tmp_path / "mine"
        workdir.mkdir()
        rows = ["--workdir", workdir, "--data.path", "day.csv"]
        code, said, _ = run(evaluate, *rows, *line, "--page", page)
        assert code == 0 and said.endswith(f"Page: {page}\n")
        return Page(page)

    return page_of


def test_a_page_shows_all_rows_groups_and_importance(page_of):
    overall = {"click": NUMBERS | RANKED}
    groups = {HOSTILE: {"click": NONE | RANKED}}
    page = page_of(overall, groups, "--by", "country", "--importance")
    assert "1,200 rows" in page.text and "weights of step 1,234" in page.text
    assert "evaluate.py --workdir /" in page.text and "mine on" in page.text
    assert page.tiles["AUC"] == ("0.75123", "± 0.01000")
    assert page.tiles["NDCG@5"] == ("0.60000", "")
    _, every, row = page.rows("By country")
    _, important = page.rows("Importance of columns")
    assert every[:4] == ["all", "1,200", "300", "0.75123 ± 0.01000"]
    assert row[:4] == [HOSTILE, "3", "0", "n/a"] and row[-2] == "0.70000"
    assert important == ["user", "+0.05000 ± 0.00100"]


def test_labels_are_named_if_there_are_several_and_nothing_else_is_shown(page_of):
    page = page_of({"click": NUMBERS, "buy": NONE}, {})
    assert page.tiles["AUC of click"][0] == "0.75123"
    assert page.rows("All rows")[2][:2] == ["all of buy", "3"]
    assert "300 of label 1 (click) 0 of label 1 (buy)" in page.text
    assert "By " not in page.text and "Importance" not in page.text


def test_a_page_is_html(run):
    line = ["--workdir", "run", "--data.path", "a.csv", "--page", "summary.json"]
    assert_refused(run(evaluate, *line), "--page summary.json must end in .html")
