"""What decides how a run goes on is in its checkpoints, and what differs is refused."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from loka_jax.data import DataConfig
from loka_jax.data.saved_encoding import digest_of
from loka_jax.data.shards import open_shards
from loka_jax.train import loop as loop_lib
from loka_jax.train.config import DispatchOptions
from loka_jax.train.loop import Loop
from tests.support import train as support
from tests.support.train import config, digest, lines, summary, train

RULES = DispatchOptions(rules=("*_mlp/dense_[01]=fp8_tensorwise_delayed",))


@pytest.fixture
def quick(monkeypatch):
    support.share_steps(monkeypatch)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def checkpoint(workdir, step):
    return workdir / "checkpoints" / str(step)


def table(path, *, flipped=False, sort=False, extra=0):
    """Writes a table of 200 rows whose label depends on its columns."""
    draw = np.random.default_rng(0)
    rows = 200 + extra
    x, c = draw.normal(size=rows), draw.integers(0, 9, rows)
    y = (x + c / 3 > 1.3) != flipped
    data = [f"{int(y[i])},{x[i]:.4f},{c[i]}" for i in range(rows)]
    data = sorted(data) if sort else data
    path.write_text("label,x,c\n" + "\n".join(data) + "\n")


def on_table(tmp_path, **loop):
    data = DataConfig(
        kind="table",
        path=str(tmp_path / "table.csv"),
        dense=("x",),
        categorical=("c",),
        cache=str(tmp_path / "cache"),
    )
    return config(tmp_path / "run", data=data, **loop)


@pytest.mark.parametrize(
    "change, part",
    [
        ({"flipped": True}, "train"),
        ({"sort": True}, "train"),
        ({"extra": 1}, "train.rows: saved"),
    ],
    ids=["labels", "order", "rows"],
)
def test_other_data_are_refused(tmp_path, monkeypatch, change, part):
    support.share_programs(monkeypatch)
    table(tmp_path / "table.csv")
    train(on_table(tmp_path, max_steps=2))
    before = lines(tmp_path / "run")
    table(tmp_path / "table.csv", **change)
    with pytest.raises(ValueError, match=f"data differ .*{part}.* --workdir"):
        train(on_table(tmp_path, max_steps=4, resume=True))
    assert lines(tmp_path / "run") == before
    table(tmp_path / "table.csv")
    assert train(on_table(tmp_path, max_steps=4, resume=True))[0] == 0


def test_a_run_goes_on_with_the_encoding_it_keeps(tmp_path, monkeypatch):
    support.share_programs(monkeypatch)
    table(tmp_path / "table.csv")
    train(on_table(tmp_path, max_steps=2))
    shutil.rmtree(tmp_path / "cache")
    assert train(on_table(tmp_path, max_steps=4, resume=True))[0] == 0
    # Not learned anew: the folder in the cache says which encoding it came from.
    kept = open_shards(tmp_path / "run" / "encoding")
    (folder,) = (tmp_path / "cache").iterdir()
    assert folder.name.endswith(f"-{digest_of(kept)[:16]}")
    flip(tmp_path / "run" / "encoding" / "vocabulary-00.parquet")
    with pytest.raises(ValueError, match="encoding of the run, cannot be used"):
        train(on_table(tmp_path, max_steps=6, resume=True))


def test_only_damaged_checkpoints_never_start_the_run_anew(tmp_path, quick):
    train(config(tmp_path, max_steps=10))
    before = lines(tmp_path)
    for path in (tmp_path / "checkpoints").iterdir():
        flip(path / "default" / "_METADATA")
    for _ in range(2):
        with pytest.raises(ValueError, match="no whole checkpoint .*another --workdir"):
            train(config(tmp_path, max_steps=10, resume=True))
        assert lines(tmp_path) == before


def test_leftovers_of_a_killed_save_are_removed(tmp_path, quick):
    train(config(tmp_path, max_steps=2))
    for name in ("checkpoints", "best"):
        (tmp_path / name / ".unfinished" / "3").mkdir(parents=True)
    train(config(tmp_path, max_steps=4, resume=True))
    assert not list(tmp_path.glob("*/.unfinished"))


def planned(workdir, **options):
    return dataclasses.replace(config(workdir, **options), dispatch=RULES)


def stop_at(monkeypatch, step):
    """Interrupts a run like a kill, before a step."""
    plain = Loop.step

    def spy(self, taken):
        if self.progress.step == step:
            raise KeyboardInterrupt
        plain(self, taken)

    monkeypatch.setattr(Loop, "step", spy)


DRIFT = dict(look_every=1, eval_every=4)


@pytest.mark.slow
def test_a_watch_goes_on_where_it_was(tmp_path, monkeypatch, quick):
    # Off at looks 7 to 11, demoted at step 12; home from 12 on, back at 16.
    support.plant_drift(monkeypatch, "top_mlp/dense_0", since=7, until=12)
    options = {"log_every": 3, "max_steps": 22, "epochs": 3, **DRIFT}
    ends, plain = [], Loop.train

    def spy(self, stop):
        plain(self, stop)
        ends.append(digest(self.state))

    monkeypatch.setattr(Loop, "train", spy)
    train(planned(tmp_path / "whole", **options))
    for number, step in enumerate((11, 15, 19)):
        with monkeypatch.context() as patch:
            stop_at(patch, step)
            with pytest.raises(KeyboardInterrupt):
                train(planned(tmp_path / "cut", resume=number > 0, **options))
    train(planned(tmp_path / "cut", resume=True, **options))
    whole, cut = summary(tmp_path / "whole"), summary(tmp_path / "cut")
    left, back = whole["changes"]
    assert left.startswith("step 12: top_mlp/dense_0 runs in bfloat16 now: lhs is ")
    assert back.startswith("step 16: top_mlp/dense_0 runs by xla fp8_tensorwise_del")
    assert cut["changes"] == whole["changes"]
    assert ends[0] == ends[1]
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    plan = json.loads((tmp_path / "cut" / "plan.json").read_text())["top_mlp/dense_0"]
    assert plan["choice"] == "xla fp8_tensorwise_delayed"
    assert plan["reason"] == "its operands are back at step 16"


@pytest.fixture(scope="module")
def demoted(tmp_path_factory):
    """A finished run whose best checkpoint, 4, is older than a demotion at step 12."""
    workdir = tmp_path_factory.mktemp("demoted")
    with pytest.MonkeyPatch.context() as patch:
        support.share_steps(patch)
        support.plant_drift(patch, "top_mlp/dense_0", since=7)
        nes = iter([0.8, 0.9, 0.9, 0.9])
        patch.setattr(loop_lib, "quality", lambda *_: _quality(next(nes)))
        code, _ = train(planned(workdir, **DEMOTED))
    assert code == 0
    return workdir


DEMOTED = dict(patience=50, log_every=3, max_steps=16, **DRIFT)


def _quality(ne):
    return {"auc": 0.7, "logloss": 0.5, "ne": ne, "calibration": 1.0}


@pytest.mark.slow
def test_a_best_state_from_before_a_demotion_is_judged(demoted):
    found = summary(demoted)
    assert (found["final_step"], len(found["changes"])) == (4, 1)
    assert found["final_eval"]["auc"] is not None
    plan = json.loads((demoted / "plan.json").read_text())
    assert plan["top_mlp/dense_0"]["choice"] == "xla bf16"


@pytest.mark.slow
def test_a_checkpoint_from_before_a_demotion_is_resumed_with_its_plan(
    demoted, tmp_path, quick
):
    workdir = shutil.copytree(demoted, tmp_path / "run")
    steps = sorted(int(p.name) for p in (workdir / "checkpoints").glob("[0-9]*"))
    assert steps == [12, 16]
    flip(checkpoint(workdir, 16) / "default" / "_METADATA")
    code, said = train(planned(workdir, resume=True, **DEMOTED))
    assert code == 0 and "Resuming at step 12" in said
    again = shutil.copytree(demoted, tmp_path / "again")
    for step in steps:
        shutil.rmtree(checkpoint(again, step))
    shutil.copytree(demoted / "best" / "4", checkpoint(again, 4))
    code, said = train(planned(again, resume=True, **DEMOTED))
    assert code == 0 and "Resuming at step 4" in said
