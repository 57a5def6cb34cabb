import json
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from loka_jax.train.folder import record
from loka_jax.train.folder.record import RunRecord, saved_config

CONFIG = {"name": "fp8_dlrm", "steps": 10, "optim": {"lr": 0.1}}


def read(path):
    """Returns the lines of a JSON-lines file, read strictly."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return [
        json.loads(line, parse_constant=refuse)
        for line in path.read_text().split("\n")[:-1]
    ]


def run(workdir, steps, *, start=0, resume=False, **kwargs):
    """Logs the steps after `start` as a training loop would."""
    with RunRecord(workdir, config=CONFIG, resume=resume, **kwargs) as run_record:
        run_record.start(start)
        for step in range(start + 1, steps + 1):
            run_record.log({"step": step, "kind": "train", "loss": 1 / step})
            run_record.log_scales(step, {"bottom/0/lhs": 2.0**-step})
            if step % 3 == 0:
                run_record.log({"step": step, "kind": "eval", "auc": None})


def test_lines_are_on_disk_at_once(tmp_path):
    with RunRecord(tmp_path, config=CONFIG) as run_record:
        run_record.log({"step": 1, "kind": "train", "loss": np.float32(0.5)})
        assert read(tmp_path / "metrics.jsonl") == [
            {"step": 1, "kind": "train", "loss": 0.5}
        ]


def test_a_non_finite_number_is_written_as_null(tmp_path):
    with RunRecord(tmp_path, config=CONFIG) as run_record:
        run_record.log({"step": 1, "kind": "train", "loss": float("nan")})
    assert read(tmp_path / "metrics.jsonl")[0]["loss"] is None


def test_a_resumed_run_leaves_the_files_of_one_never_stopped(tmp_path):
    run(tmp_path / "whole", 10)
    run(tmp_path / "stopped", 8)
    with open(tmp_path / "stopped" / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "ki')  # killed while writing
    run(tmp_path / "stopped", 10, start=6, resume=True)
    for name in ("metrics.jsonl", "scales.jsonl", "config.json"):
        whole = (tmp_path / "whole" / name).read_bytes()
        assert (tmp_path / "stopped" / name).read_bytes() == whole, name


def test_json_files_are_written(tmp_path):
    with RunRecord(tmp_path, config=CONFIG) as run_record:
        run_record.start(0)
        run_record.write_sites([{"path": "top_mlp/0", "why_not": None}])
        run_record.write_summary({"steps": 10})
    assert saved_config(tmp_path) == CONFIG
    assert json.loads((tmp_path / "sites.json").read_text())[0]["path"] == "top_mlp/0"
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 10}


def test_a_run_that_starts_has_no_summary_of_an_earlier_end(tmp_path):
    run(tmp_path, 2)
    with RunRecord(tmp_path, config=CONFIG, resume=True) as run_record:
        run_record.start(2)
        run_record.write_summary({"finished": True})
    with RunRecord(tmp_path, config=CONFIG, resume=True) as run_record:
        run_record.start(2)
        assert not (tmp_path / "summary.json").exists()


def test_a_run_that_never_starts_leaves_no_folder(tmp_path):
    with RunRecord(tmp_path / "runs" / "a", config=CONFIG) as run_record:
        (run_record.workdir / "checkpoints").mkdir()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    RunRecord(tmp_path / "mine", config=CONFIG).close()
    with RunRecord(tmp_path / "b", config=CONFIG) as run_record:
        (run_record.workdir / "notes.txt").write_text("mine")
    assert {path.name for path in tmp_path.iterdir()} == {"b", "mine"}


def test_lines_after_a_step_are_dropped_while_the_run_goes_on(tmp_path):
    with RunRecord(tmp_path, config=CONFIG) as run_record:
        run_record.start(0)
        for step in (1, 2, 3):
            run_record.log({"step": step, "kind": "train"})
        run_record.truncate(1)
        run_record.log({"step": 2, "kind": "train"})
        assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1, 2]


def test_two_runs_cannot_share_a_workdir(tmp_path):
    with RunRecord(tmp_path, config=CONFIG):
        with pytest.raises(ValueError, match=rf"in use.*process {os.getpid()}\)"):
            RunRecord(tmp_path, config=CONFIG, resume=True)
    RunRecord(tmp_path, config=CONFIG, resume=True).close()


@pytest.mark.slow
def test_a_killed_run_gives_its_workdir_free(tmp_path):
    code = """
        import os, signal, sys
        from loka_jax.train.folder.record import RunRecord
        run_record = RunRecord(sys.argv[1], config={"a": 1})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    RunRecord(tmp_path, config={"a": 1}, resume=True).close()


def test_a_refused_run_does_not_keep_the_lock(tmp_path):
    run(tmp_path, 1)
    for _ in range(2):
        with pytest.raises(ValueError, match="holds a run already: .*--resume"):
            RunRecord(tmp_path, config=CONFIG)


def test_another_config_is_refused_and_explained(tmp_path):
    run(tmp_path, 1)
    other = CONFIG | {"optim": {"lr": 0.3}}
    with pytest.raises(ValueError, match=r"other options \(--optim.lr: saved 0.1, now"):
        RunRecord(tmp_path, config=other, resume=True)
    assert saved_config(tmp_path) == CONFIG


@pytest.mark.parametrize("may_change", [("steps", "optim.lr"), ("steps", "optim")])
def test_fields_that_may_change_are_let_through(may_change, tmp_path):
    run(tmp_path, 1)
    other = CONFIG | {"steps": 20, "optim": {"lr": 0.3}}
    with RunRecord(
        tmp_path, config=other, resume=True, may_change=may_change
    ) as run_record:
        run_record.start(1)
    assert saved_config(tmp_path) == other


@pytest.mark.parametrize("left", ["metrics.jsonl", "checkpoints/40", "best/40"])
def test_a_run_without_its_config_is_not_taken_over(left, tmp_path):
    (tmp_path / left).mkdir(parents=True)
    name = left.partition("/")[0]
    with pytest.raises(ValueError, match=f"{name} without config.json"):
        RunRecord(tmp_path, config=CONFIG)


def test_a_workdir_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write to .*file/run .*--workdir"):
        RunRecord(tmp_path / "file" / "run", config=CONFIG)


def test_tensorboard_events_are_written(tmp_path):
    pytest.importorskip("tensorboardX", reason="needs the extra report")
    run(tmp_path, 3, tensorboard=True)
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"train/loss" in events.read_bytes()


def test_tensorboard_without_its_package_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(record.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"install loka-jax\[report\]"):
        RunRecord(tmp_path / "run", config=CONFIG, tensorboard=True)
    assert not (tmp_path / "run").exists()


def test_versions_name_packages_and_device():
    found = record.versions()
    assert {"loka_jax", "python", "jax", "flax", "device_kind"} <= found.keys()
    json.dumps(found)


def test_a_run_is_read_back_but_for_its_broken_files(tmp_path):
    run(tmp_path, 3)
    (tmp_path / "sites.json").write_text('[{"path"')
    (tmp_path / "summary.json").write_text("[]")
    files = record.read_run(tmp_path)
    assert files.config == CONFIG and len(files.train) == 3
    assert files.summary == {} and files.sites == []
    assert files.notes == [
        "summary.json is broken and was left out.",
        "sites.json is broken and was left out.",
    ]


def test_damaged_lines_are_noted_and_cost_no_other(tmp_path):
    run(tmp_path, 3)
    path = tmp_path / "metrics.jsonl"
    first, *others = path.read_text().splitlines(keepends=True)
    path.write_text(first + "{broken\n" + '{"step": "x"}\n' + "".join(others))
    files = record.read_run(tmp_path)
    assert len(files.train) == 3
    assert files.notes == [f"{path}: 1 damaged line is left out."]
    with record.RunRecord(tmp_path, config=CONFIG, resume=True) as resumed:
        resumed.truncate(2)
    assert [line["step"] for line in record.read_run(tmp_path).train] == [1, 2]


def test_a_folder_without_a_run_is_one_sentence(tmp_path):
    for workdir in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ValueError, match="holds no run .*--workdir"):
            record.read_run(workdir)
    assert list(tmp_path.iterdir()) == []
