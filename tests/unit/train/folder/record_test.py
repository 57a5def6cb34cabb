import json
import os

import numpy as np
import pytest

from loka_jax.train.folder import record
from loka_jax.train.folder.record import RunRecord, saved_config
from loka_jax.train.scores import Scores, read_scores, write_scores

CONFIG = {"name": "fp8_dlrm", "steps": 10, "optim": {"lr": 0.1}}
SCORES = Scores(
    logits=np.float32([-1, 2, 3]),
    labels=np.float32([0, 1, 1]),
    weights=np.float32([1, 0.5, 2]),
    ids=np.int32([[0], [1], [1]]),
)


def run(workdir, steps, *, start=0, resume=False, **kwargs):
    """Logs the steps after `start` as a training loop would."""
    with RunRecord(workdir, config=CONFIG, resume=resume, **kwargs) as run_record:
        run_record.start(start)
        for step in range(start + 1, steps + 1):
            run_record.log({"step": step, "kind": "train", "loss": 1 / step})
            run_record.log({"step": step, "bottom/0/lhs": 2.0**-step}, record.SCALES)
            run_record.log({"step": step, "bottom/0/lhs": 2.0**step}, record.AMAXES)
            if step % 3 == 0:
                run_record.log({"step": step, "kind": "eval", "auc": None})


def test_lines_are_on_disk_at_once(tmp_path):
    with RunRecord(tmp_path, config=CONFIG) as run_record:
        for step, loss in ((1, np.float32(0.5)), (2, float("nan"))):
            run_record.log({"step": step, "kind": "train", "loss": loss})
        lines = (tmp_path / "metrics.jsonl").read_text().split("\n")[:-1]
        assert [json.loads(line)["loss"] for line in lines] == [0.5, None]


def test_a_resumed_run_leaves_the_files_of_one_never_stopped(tmp_path):
    run(tmp_path / "whole", 10)
    run(tmp_path / "stopped", 8)
    with open(tmp_path / "stopped" / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "ki')  # killed while writing
    run(tmp_path / "stopped", 10, start=6, resume=True)
    for name in ("metrics.jsonl", "scales.jsonl", "amaxes.jsonl", "config.json"):
        whole = (tmp_path / "whole" / name).read_bytes()
        assert (tmp_path / "stopped" / name).read_bytes() == whole, name


def test_a_run_that_starts_has_its_config_and_no_summary_of_an_earlier_end(tmp_path):
    run(tmp_path, 2)
    assert saved_config(tmp_path) == CONFIG
    names = ("sites.json", "summary.json", "evaluation.json", "scores.npy")
    with RunRecord(tmp_path, config=CONFIG, resume=True) as run_record:
        run_record.start(2)
        run_record.write(names[0], [{"path": "top_mlp/0"}])
        run_record.write_scores({"label": SCORES}, "test", ("a",))
        run_record.write(names[1], {"finished": True})
    sites, end, found = (json.loads((tmp_path / x).read_text()) for x in names[:3])
    assert (sites, end) == ([{"path": "top_mlp/0"}], {"finished": True})
    assert (found["split"], found["examples"]) == ("test", 3)
    with RunRecord(tmp_path, config=CONFIG, resume=True) as run_record:
        run_record.start(2)
        assert not any((tmp_path / name).exists() for name in names[1:])


def test_scores_are_read_back_and_those_that_no_run_writes_refused(tmp_path):
    missing = SCORES._replace(labels=np.float32([0, np.nan, 1]))
    write_scores(tmp_path, {"a": SCORES, "b": missing})
    found = read_scores(tmp_path)
    assert [x.tolist() for x in found["a"]] == [x.tolist() for x in SCORES[:3]]
    assert found["b"].logits.tolist() == [-1, 3]
    for field, value in (("logits", np.inf), ("labels", 0.5), ("weights", 0.0)):
        values = getattr(SCORES, field).copy()
        values[1] = value
        write_scores(tmp_path, {"a": SCORES._replace(**{field: values})})
        with pytest.raises(ValueError, match="scores.npy is broken: delete it"):
            read_scores(tmp_path)


def test_a_run_that_never_starts_leaves_no_folder(tmp_path):
    with RunRecord(tmp_path / "runs" / "a", config=CONFIG) as run_record:
        (run_record.workdir / "checkpoints").mkdir()
    assert list(tmp_path.iterdir()) == []
    with RunRecord(tmp_path / "b", config=CONFIG) as run_record:
        (run_record.workdir / "notes.txt").write_text("mine")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_a_folder_has_one_run_and_one_writer(tmp_path):
    run(tmp_path, 1)
    with RunRecord(tmp_path, config=CONFIG, resume=True):
        with pytest.raises(ValueError, match=rf"in use.*process {os.getpid()}\)"):
            RunRecord(tmp_path, config=CONFIG, resume=True)
    for _ in range(2):  # a run that is refused does not keep the lock
        with pytest.raises(ValueError, match="holds a run already: .*--resume"):
            RunRecord(tmp_path, config=CONFIG)


def test_a_run_resumes_with_options_that_may_change_and_no_others(tmp_path):
    run(tmp_path, 1)
    other = CONFIG | {"steps": 20, "optim": {"lr": 0.3}}
    for may_change in (("steps",), ("steps", "optim.l")):
        options = dict(config=other, resume=True, may_change=may_change)
        with pytest.raises(ValueError, match=r"options \(--optim.lr: saved 0.1, now"):
            RunRecord(tmp_path, **options)
    assert saved_config(tmp_path) == CONFIG
    options["may_change"] = ("steps", "optim")
    with RunRecord(tmp_path, **options) as run_record:
        run_record.start(1)
    assert saved_config(tmp_path) == other


@pytest.mark.parametrize("left", ["metrics.jsonl", "best/40"])
def test_a_run_without_its_config_is_not_taken_over(left, tmp_path):
    (tmp_path / left).mkdir(parents=True)
    with pytest.raises(ValueError, match=f"{left[:4]}.* without config.json"):
        RunRecord(tmp_path, config=CONFIG)


def test_damaged_lines_are_noted_and_cost_no_other(tmp_path):
    run(tmp_path, 3)
    path = tmp_path / "metrics.jsonl"
    first, *others = path.read_text().splitlines(keepends=True)
    path.write_text(first + "{broken\n" + '{"step": "x"}\n' + "".join(others))
    files = record.read_run(tmp_path)
    assert len(files.train) == 3
    assert files.damage == [f"{path}: 1 damaged line is left out."]
    with record.RunRecord(tmp_path, config=CONFIG, resume=True) as resumed:
        resumed.truncate(2)
    assert [line["step"] for line in record.read_run(tmp_path).train] == [1, 2]
