"""A run's folder as the source of a trained model, and the encoding that it keeps."""

import numpy as np
import pytest

from loka_jax.train.checkpoints.checkpoint import Checkpoints
from loka_jax.train.folder.record import RunRecord
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


def test_a_run_without_a_workdir_gets_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, resumed = support.config(), support.config(resume=True)
    with pytest.raises(ValueError, match="there is no run runs/.* to resume"):
        choose_workdir(resumed)
    folders = []
    for _ in range(3):
        folders.append(choose_workdir(config))
        folders[-1].mkdir(parents=True)
        assert choose_workdir(resumed) == folders[-1]  # the newest
    assert {str(path.parent) for path in folders} == {"runs"} and len(set(folders)) == 3
