"""What decides how a run goes on is in its checkpoints, and what differs is refused."""

import dataclasses
import json
import pathlib
import shutil
import signal
import subprocess
import sys

import chex
import pytest

from loka_jax.data.saved_encoding import digest_of
from loka_jax.data.shards import open_shards
from loka_jax.train.config import DispatchOptions
from loka_jax.train.loop import Loop
from tests.support import train as support
from tests.support.recorded import newest
from tests.support.train import config, lines, summary, train

RULES = DispatchOptions(rules=("*_mlp/dense_[01]=fp8_tensorwise_delayed",))


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def checkpoint(workdir, step):
    return workdir / "checkpoints" / str(step)


def test_other_data_are_refused_and_the_run_keeps_its_encoding(recorded, tmp_path):
    run = recorded("bf16")
    resumed = run.copy(tmp_path, resume=True)
    workdir, path = resumed.run.workdir, tmp_path / "train.csv"
    loop = dataclasses.replace(resumed.loop, epochs=2)
    data = dataclasses.replace(
        resumed.data, path=str(path), cache=str(tmp_path / "cache")
    )
    resumed = dataclasses.replace(resumed, data=data, loop=loop)
    header, *rows = (run.data / "train.csv").read_text().splitlines(keepends=True)
    before = lines(workdir)
    flipped = [str(1 - int(row[0])) + row[1:] for row in rows]
    for part, changed in (("train", flipped), ("train.rows: saved", rows + rows[:1])):
        path.write_text("".join([header, *changed]))
        with pytest.raises(ValueError, match=f"data differ .*{part}.* --workdir"):
            train(resumed)
        assert lines(workdir) == before
    path.write_text("".join([header, *rows]))
    shutil.rmtree(tmp_path / "cache")
    assert train(resumed)[0] == 0 and summary(workdir)["steps"] == 12
    # Not learned anew: a folder in the cache says which encoding it came from.
    kept = digest_of(open_shards(workdir / "encoding"))
    (folder,) = (tmp_path / "cache").iterdir()
    assert folder.name.endswith(f"-{kept[:16]}")
    flip(workdir / "encoding" / "vocabulary-00.parquet")
    with pytest.raises(ValueError, match="encoding of the run, cannot be used"):
        train(resumed)


def test_a_damaged_checkpoint_and_what_a_killed_save_left_are_put_aside(
    recorded, tmp_path
):
    whole = recorded("fp8")
    resumed = whole.copy(tmp_path, resume=True)
    workdir = resumed.run.workdir
    flip(checkpoint(workdir, 20) / "default" / "_METADATA")
    for name in ("checkpoints", "best"):
        (workdir / name / ".unfinished" / "3").mkdir(parents=True)
    code, said = train(resumed)
    assert code == 0 and "Resuming at step 15." in said
    assert not list(workdir.glob("*/.unfinished"))
    assert checkpoint(workdir, "20.damaged-1").is_dir()
    assert lines(workdir) == lines(whole.workdir)
    for path in (workdir / "checkpoints").glob("[0-9]*/default/_METADATA"):
        flip(path)
    for _ in range(2):  # never starts the run anew
        with pytest.raises(ValueError, match="no whole checkpoint .*another --workdir"):
            train(resumed)
        assert lines(workdir) == lines(whole.workdir)


def stop_at(monkeypatch, step):
    """Interrupts a run like a kill, before a step."""
    plain = Loop.step

    def spy(self, taken):
        if self.progress.step == step:
            raise KeyboardInterrupt
        plain(self, taken)

    monkeypatch.setattr(Loop, "step", spy)


def test_a_watch_goes_on_where_it_was(tmp_path, monkeypatch):
    support.share_steps(monkeypatch)
    monkeypatch.setattr("loka_jax.train.loop_options.LOOK_EVERY", 1)
    monkeypatch.setattr("loka_jax.train.loop_options.FIRST_LOOK", 1)
    # Off at looks 7 to 11, demoted at step 12; home from 12 on, back at 16.
    support.plant_drift(monkeypatch, "top_mlp/dense_0", since=7, until=12)
    options = dict(log_every=3, max_steps=22, epochs=3, eval_every=4)

    def planned(name, **more):
        made = config(tmp_path / name, **options, **more)
        return dataclasses.replace(made, dispatch=RULES)

    train(planned("whole"))
    for number, step in enumerate((11, 15, 19)):
        with monkeypatch.context() as patch:
            stop_at(patch, step)
            with pytest.raises(KeyboardInterrupt):
                train(planned("cut", resume=number > 0))
    train(planned("cut", resume=True))
    whole, cut = summary(tmp_path / "whole"), summary(tmp_path / "cut")
    left, back = whole["changes"]
    assert left.startswith("step 12: top_mlp/dense_0 runs in bfloat16 now: lhs is ")
    assert back.startswith("step 16: top_mlp/dense_0 runs by xla fp8_tensorwise_del")
    assert cut["changes"] == whole["changes"]
    ends = [newest(tmp_path / name / "checkpoints")[1] for name in ("whole", "cut")]
    chex.assert_trees_all_equal(*ends)
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    plan = json.loads((tmp_path / "cut" / "plan.json").read_text())["top_mlp/dense_0"]
    assert plan["choice"] == "xla fp8_tensorwise_delayed"
    assert plan["reason"] == "its operands are back"


ROOT = pathlib.Path(__file__).parents[4]
KILLED = """
import os, pathlib, sys
from loka_jax.train.loop import Loop
from tests.support import train as support
plain = Loop.step
def step(self, taken):
    if self.progress.step == 13:
        os.kill(os.getpid(), 9)
    plain(self, taken)
Loop.step = step
support.train(support.config(pathlib.Path(sys.argv[1]), patience=50))
"""


def test_a_killed_run_resumes_bit_for_bit(recorded, tmp_path, monkeypatch):
    whole = recorded("fp8")
    support.share_steps(monkeypatch)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    resumed = config(tmp_path, patience=50, resume=True)
    train(resumed)
    for name in ("metrics.jsonl", "scales.jsonl"):
        assert lines(tmp_path, name) == lines(whole.workdir, name)
    cut = whole._replace(config=resumed)
    chex.assert_trees_all_equal(cut.arrays(), whole.arrays())
