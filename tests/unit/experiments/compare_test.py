import pathlib

import numpy as np
import pytest

from experiments.compare import main
from loka_jax import commands, jsonfile
from loka_jax.train.folder import scores_file
from loka_jax.train.folder.record import EVALUATION, SUMMARY, RunRecord
from loka_jax.train.logs.breakdown import Scores

CONFIG = {"name": "small", "seed": 0, "data": {"kind": "table", "label": "click"}}


def leave_run(workdir, *, ne, label="click", seed=0):
    """Leaves the files of a run that ended."""
    rng = np.random.default_rng(0)
    labels = (rng.random(50) < 0.3).astype(np.float32)
    logits = (labels + rng.normal(0, ne, 50)).astype(np.float32)
    ids = np.zeros((50, 1), np.int32)
    config = CONFIG | {"seed": seed, "data": CONFIG["data"] | {"label": label}}
    final = {"ne": ne, "auc": 0.7, "logloss": 0.5, "calibration": 1.0}
    with RunRecord(workdir, config=config) as record:
        record.start(0)
        record.log(
            {"step": 5, "kind": "eval", "split": "valid", "examples": 50} | final
        )
        scores = Scores(logits, labels, np.ones(50, np.float32), ids)
        record.write_scores({label: scores}, "test", ["C1"])
        summary = {"config": config, "final_eval": final, "final_split": "test"}
        record.write_summary(summary | {"examples_per_second": 1000.0})
    return str(workdir)


def test_runs_are_compared_by_their_folders(tmp_path, capsys):
    runs = [leave_run(tmp_path / f"run-{i}", ne=0.8 + i / 10) for i in range(2)]
    out = tmp_path / "page.html"
    assert main([*runs, "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"Comparison: {out}\n"
    page = out.read_text()
    assert "<code>run-1</code>" in page and "experiments/compare.py" in page
    assert page.count("±") >= 3  # log loss, NE and AUC of the same examples


def test_a_bad_command_line_is_one_sentence(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(commands, "_IN_WHEEL", tmp_path)
    for arguments, sentence in (
        ([], "the number of runs is 0: name 2 to 16 of them."),
        (["a", "b", "--ot", "c"], "loka compare --help lists the options."),
    ):
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.endswith(f"{sentence}\n")
        assert said.count("\n") == 1


def test_a_file_that_is_no_page_is_not_replaced(tmp_path, capsys):
    runs = [leave_run(tmp_path / f"run-{i}", ne=0.8) for i in range(2)]
    summary = pathlib.Path(runs[0]) / SUMMARY
    before = summary.read_text()
    assert main([*runs, "--out", str(summary)]) == 2
    assert "must end in .html: rename it." in capsys.readouterr().err
    assert summary.read_text() == before


def test_folders_of_one_name_are_told_apart(tmp_path):
    runs = [leave_run(tmp_path / f"{i}" / "run", ne=0.8) for i in range(2)]
    assert main([*runs, "--out", str(tmp_path / "page.html")]) == 0
    assert "<code>1/run</code>" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    "second, sentence",
    [
        ("nothing", "nothing holds no run"),
        ("first", "first is named twice: name each run once."),
        ("buy", "buy has nothing in common with first (data.label is click and buy)"),
        ("broken", "scores.npy is broken: delete it, to do without it."),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(tmp_path, capsys, second, sentence):
    first = leave_run(tmp_path / "first", ne=0.8)
    leave_run(tmp_path / "buy", ne=0.8, label="buy")
    leave_run(tmp_path / "broken", ne=0.9)
    (tmp_path / "broken" / scores_file.NAME).write_bytes(b"\x93NUMPY")
    out = tmp_path / "page.html"
    assert main([first, str(tmp_path / second), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert not out.exists()


def test_a_single_run_and_a_missing_folder_are_refused(tmp_path, capsys):
    first = leave_run(tmp_path / "first", ne=0.8)
    assert main([first, "--out", str(tmp_path / "page.html")]) == 2
    assert "the number of runs is 1" in capsys.readouterr().err
    assert main([first, str(tmp_path), "--out", str(tmp_path / "no" / "x.html")]) == 2
    assert "create that first" in capsys.readouterr().err


def test_a_resumed_run_drops_its_evaluation(tmp_path):
    leave_run(tmp_path / "run", ne=0.8)
    assert jsonfile.read(tmp_path / "run" / EVALUATION)
    with RunRecord(tmp_path / "run", config=CONFIG, resume=True) as record:
        record.start(0)
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left.isdisjoint({EVALUATION, scores_file.NAME, SUMMARY})
