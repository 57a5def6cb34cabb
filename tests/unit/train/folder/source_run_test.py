"""A run's folder as the source of a trained model, and the encoding that it keeps."""

import dataclasses
import types
from typing import Any
from unittest import mock

import numpy as np
import pytest

from loka_jax.train.checkpoints.checkpoint import Checkpoints
from loka_jax.train.checkpoints.manifest import Saved
from loka_jax.train.folder import run_encoding
from loka_jax.train.folder.record import RunRecord
from loka_jax.train.folder.silent_record import SilentRecord
from loka_jax.train.folder.source_run import open_run
from loka_jax.train.folder.workdir import choose_workdir
from tests.support import train as support


@pytest.fixture
def workdir(tmp_path):
    """A folder with a run whose best step is older than its newest."""
    config = support.config(tmp_path)
    with RunRecord(tmp_path, config=config.identity()) as record:
        record.start(0)
    for folder, step in (("checkpoints", 4), ("best", 2)):
        with Checkpoints(tmp_path / folder) as checkpoints:
            checkpoints.save(step, {"x": np.ones(1)}, {})
    return tmp_path


def test_a_run_is_opened_at_its_newest_or_best_step(workdir):
    newest, best = (open_run(workdir, best=x) for x in (False, True))
    assert (newest.saved.step, best.saved.step) == (4, 2)
    assert newest.config.identity() == support.config().identity()
    assert newest.workdir == workdir
    with pytest.raises(ValueError, match="generated clicks, which have no vocabulary"):
        newest.encoding()
    with Checkpoints(workdir / "best") as checkpoints:
        checkpoints.drop_after(0)
    assert open_run(workdir, best=True).saved.step == 4


def test_an_encoding_is_written_unless_it_is_there(tmp_path, monkeypatch):
    splits: Any = types.SimpleNamespace(folder="learned", encoding_digest="digest")
    save = mock.Mock(side_effect=lambda _, where: (where / "x").mkdir(parents=True))
    opened = mock.Mock(side_effect=["found", ValueError("damaged"), "found"])
    monkeypatch.setattr(run_encoding, "save_encoding", save)
    monkeypatch.setattr(run_encoding, "open_encoding", opened)
    for count in (1, 1, 2):  # written, whole, damaged
        run_encoding.keep(splits, tmp_path)
        assert [call.args[0] for call in save.mock_calls] == ["learned"] * count
    saved = Saved(1, {"encoding": "digest"}, {})
    assert run_encoding.read(saved, tmp_path) == "found"
    assert opened.mock_calls == [mock.call(tmp_path / "encoding", "digest")] * 3
    generated: Any = types.SimpleNamespace(folder=None, encoding_digest=None)
    run_encoding.keep(generated, tmp_path)
    assert run_encoding.read(Saved(1, {}, {}), tmp_path) is None


def test_a_process_beside_the_first_writes_nothing(tmp_path):
    with SilentRecord(tmp_path / "run") as record:
        record.start(0)
        record.log({"step": 1, "kind": "train"})
        record.write_summary({})
    assert not list(tmp_path.iterdir())


def test_a_run_without_a_workdir_gets_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = support.MODEL.clone(recipe="fp8_rowwise/bf16/fp8_rowwise")
    config, resumed = (
        dataclasses.replace(support.config(resume=resume), model=model)
        for resume in (False, True)
    )
    with pytest.raises(ValueError, match="there is no run runs/.* to resume"):
        choose_workdir(resumed)
    folders = []
    for _ in range(3):
        folders.append(choose_workdir(config))
        folders[-1].mkdir(parents=True)
        assert choose_workdir(resumed) == folders[-1]  # the newest
    assert {str(path.parent) for path in folders} == {"runs"} and len(set(folders)) == 3
