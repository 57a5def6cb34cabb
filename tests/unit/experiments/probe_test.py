"""`python experiments/probe.py` as a user runs it."""

import json
import sys
from types import SimpleNamespace

import pytest

from experiments.cli import parse
from experiments.probe import main, observed
from loka_jax import saved_format
from loka_jax.train.checkpoints.manifest import Saved
from tests.unit.experiments.train_test import run

PROBE = [sys.executable, "-u", "experiments/probe.py"]
FEW = ["--survey.pairs", "2", "--survey.rows", "32", "--survey.captured-batches", "1"]
FEW += ["--survey.recipes", "fp8_tensorwise", "--survey.held-out-batches", "1"]
FEW += ["--bottom-mlp", "8", "--top-mlp", "16", "16"]  # FP8 fits the last two layers


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """A run of eight steps, surveyed."""
    workdir = tmp_path_factory.mktemp("probed") / "run"
    arguments = ["--config", "fp8_dlrm_tiny", "--workdir", workdir]
    arguments += ["--loop.max-steps", "8", *FEW, "--probe.every", "3"]
    return workdir, arguments, run(*PROBE, *arguments)


@pytest.mark.slow
def test_it_trains_surveys_and_writes_both_files(probed):
    workdir, _, done = probed
    assert done.returncode == 0, done.stderr
    assert "site 2 of 2: top_mlp/dense_1" in done.stdout
    assert "Too few statistics: " in done.stdout
    assert str(workdir / "probe.html") in done.stdout
    found = json.loads((workdir / "probe.json").read_text())
    assert found["steps"] == 8 and len(found["sites"]) == 2
    assert found["command"].startswith("python experiments/probe.py --config fp8_dlrm")
    assert "where FP8 is safe and fast" in (workdir / "probe.html").read_text()
    assert (workdir / "amaxes.jsonl").exists()


@pytest.mark.slow
def test_again_it_goes_on_with_what_is_there(probed, monkeypatch):
    workdir, arguments, _ = probed
    before = (workdir / "metrics.jsonl").read_text()
    found = json.loads((workdir / "probe.json").read_text())
    steps = []
    # It was begun with another setting than the default.
    assert json.loads((workdir / "config.json").read_text())["probe"]["every"] == 3

    def survey(run, state, options, say):
        steps.append(int(state.step))
        return found

    monkeypatch.setattr("experiments.probe.survey", survey)
    arguments = [str(argument) for argument in arguments]
    assert main(arguments[:-2]) == 0
    assert steps == [8] and (workdir / "metrics.jsonl").read_text() == before


def _plant_checkpoint(monkeypatch, leaf):
    """Lets every run have a checkpoint of one leaf."""
    saved = Saved(3, {}, {leaf: {"shape": [], "dtype": "float32"}})
    run = SimpleNamespace(saved=saved)
    monkeypatch.setattr("experiments.probe.open_run", lambda workdir, best: run)


def test_a_run_that_its_plan_lets_probe_observe_goes_on(tmp_path, monkeypatch):
    _plant_checkpoint(monkeypatch, "probe/head/stats")
    start = f'{{"{saved_format.KEY}": {saved_format.RUN}'
    (tmp_path / "config.json").write_text(f'{start}, "probe": {{"every": null}}}}')
    config = parse(["--config", "fp8_dlrm_tiny", "--workdir", str(tmp_path)])
    begun = observed(config)
    assert begun.probe.every is None and begun.run.resume


@pytest.mark.parametrize("every", ["null", "0", '"x"', "[3]", "true"])
def test_a_run_that_probe_did_not_observe_is_refused(
    every, tmp_path, capsys, monkeypatch
):
    _plant_checkpoint(monkeypatch, "params/kernel")
    start = f'{{"{saved_format.KEY}": {saved_format.RUN}'
    (tmp_path / "config.json").write_text(f'{start}, "probe": {{"every": {every}}}}}')
    assert main(["--config", "fp8_dlrm_tiny", "--workdir", str(tmp_path)]) == 2
    assert "holds a run that Probe did not observe" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, match",
    [
        ([], "--config NAME is missing"),
        (["--config", "fp8_dlm"], "did you mean 'fp8_dlrm'"),
        (
            ["--config", "frappe_dlrm", "--data.path", "nowhere"],
            "nowhere does not exist",
        ),
    ],
)
def test_what_a_user_can_mend_is_one_sentence(arguments, match, capsys, monkeypatch):
    monkeypatch.chdir("/")
    assert main(arguments) == 2
    assert match in capsys.readouterr().err


def test_help_and_bad_options(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--config", "fp8_dlrm_tiny", "--help"])
    assert done.value.code == 0
    assert "--survey.limits.speedup" in capsys.readouterr().out
    assert main(["--config", "fp8_dlrm_tiny", "--survey.pairs", "1"]) == 2
    assert "--survey.pairs" in capsys.readouterr().err
