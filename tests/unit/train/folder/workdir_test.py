"""The folder of a run is new, and named after the run."""

import dataclasses

import pytest

from loka_jax.train.folder.workdir import choose_workdir
from tests.support import train as support


@pytest.mark.parametrize("recipe", ["bf16", "fp8_rowwise/bf16/fp8_rowwise"])
def test_a_run_without_a_workdir_gets_a_new_folder(tmp_path, monkeypatch, recipe):
    monkeypatch.chdir(tmp_path)
    config = support.config()
    model = config.model.clone(recipe=recipe)
    run = dataclasses.replace(config.run, workdir=None)
    config = dataclasses.replace(config, model=model, run=run)
    first = choose_workdir(config)
    assert str(first.parent) == "runs"
    first.mkdir(parents=True)
    second = choose_workdir(config)
    assert second.parent == first.parent and second != first
    resumed = dataclasses.replace(run, resume=True)
    assert choose_workdir(dataclasses.replace(config, run=resumed)) == first


def test_without_a_run_there_is_none_to_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = dataclasses.replace(support.config().run, workdir=None, resume=True)
    with pytest.raises(ValueError, match="there is no run runs/.* to resume"):
        choose_workdir(dataclasses.replace(support.config(), run=run))
