"""`loka search` with real trials, whose winner trains; a trial on a mesh."""

import pytest

from experiments import search, train
from loka_jax.fitting import changed
from loka_jax.search import trial
from loka_jax.search.history import read_trials
from tests.support.configs import tiny, tiny_config


def test_a_search_ends_with_a_configuration_that_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", ".")
    folder = tmp_path / "search"
    line = ["--config", tiny_config("bf16_dlrm"), "--workdir", str(folder)]
    space = ["--space", "mesh=1x1", "steps-per-call=1,4", "--minutes", "5"]
    assert search.main([*line, *space]) == 0
    trials = read_trials(folder / "trials.json")
    assert [one.choices["steps-per-call"] for one in trials] == ["1", "4"]
    for one in trials:
        assert one.is_ok and len(one.rates) >= 5 and min(one.rates) > 0
    assert "Best: " in capsys.readouterr().out
    run = tmp_path / "run"
    winner = ["--config", str(folder / "best.json"), "--loop.max-steps", "4"]
    assert train.main([*winner, "--workdir", str(run)]) == 0


@pytest.mark.parametrize("sync", ["gradients", "weights"])
def test_a_trial_runs_on_a_mesh(sync):
    settings = {"mesh.replicas": 2, "mesh.shards": 2, "mesh.sync": sync}
    outcome = trial.outcome_of(changed(tiny("bf16_dlrm"), settings))
    assert outcome.status == "ok", outcome.why
    assert min(outcome.rates) > 0
