"""Whole runs: what they leave behind, and that a stopped one leaves the same."""

import dataclasses

import chex
import pytest

from loka_jax.train.build import Run
from tests.support.recorded import NAMES, STOPPED_IN
from tests.support.train import lines, summary, train, without

# Of a summary: what depends on the machine, or on the folder of the run.
MEASURED = ("seconds", "compile_seconds", "examples_per_second", "command")


@pytest.mark.parametrize("name", NAMES)
def test_a_run_ends_with_its_files(recorded, name):
    run = recorded(name)
    found, steps = summary(run.workdir), 6 if name == "bf16" else 20
    ended = [found[name] for name in ("finished", "steps", "skipped_steps")]
    assert ended == [True, steps, 0]
    files = {path.name for path in run.workdir.iterdir()}
    assert files >= {
        *("config.json", "plan.json", "metrics.jsonl", "sites.json", "summary.json"),
        *("evaluation.json", "scores.npy", "checkpoints", "report.html"),
    }
    assert ("scales.jsonl" in files) == (name != "bf16")
    assert f"Report: {run.workdir}" in run.printed
    assert int(run.arrays()["step"]) == steps


def test_a_stopped_run_resumes_bit_for_bit(recorded):
    whole, cut = recorded("fp8"), recorded("resumed")
    for step in STOPPED_IN:
        assert f"Stopped at step {step + 1}, and saved" in cut.printed
        assert f"Resuming at step {step + 1}." in cut.printed
    for name in ("metrics.jsonl", "scales.jsonl"):
        assert lines(cut.workdir, name) == lines(whole.workdir, name)
    summaries = (without(MEASURED, summary(run.workdir)) for run in (cut, whole))
    chex.assert_trees_all_equal(*summaries)
    for folder in ("checkpoints", "best"):
        chex.assert_trees_all_equal(cut.arrays(folder), whole.arrays(folder))


def test_a_run_over_eight_devices_says_so_and_learns_in_fp8(recorded):
    alone, spread = (summary(recorded(name).workdir) for name in ("fp8", "mesh"))
    assert spread["mesh"] == "2 x 4" and "mesh" not in alone
    assert spread["sites"] == alone["sites"] == {"total": 4, "fp8": 2}
    for run in (recorded("fp8"), recorded("mesh")):
        nes = [x["ne"] for x in lines(run.workdir) if x["kind"] == "eval"]
        assert summary(run.workdir)["final_eval"]["ne"] < 1
        assert nes[-1] < nes[0] - 0.1


@pytest.mark.parametrize("name", ["fp8", "mesh"])
@pytest.mark.parametrize("steps, look_every", [(2, 64), (None, 3)])
def test_steps_by_one_call_and_looks_change_no_bit(
    recorded, tmp_path, monkeypatch, name, steps, look_every
):
    whole, taken, plain = recorded(name), [], Run.train_step

    def spy(self, *, steps=1, **how):
        taken.append(steps)
        return plain(self, steps=steps, **how)

    monkeypatch.setattr(Run, "train_step", spy)
    monkeypatch.setattr("loka_jax.train.loop_options.LOOK_EVERY", look_every)
    monkeypatch.setattr("loka_jax.train.loop_options.FIRST_LOOK", 1)
    config = whole.config
    run = dataclasses.replace(config.run, workdir=tmp_path)
    count = steps or config.loop.steps_per_call
    loop = dataclasses.replace(config.loop, steps_per_call=count)
    config = dataclasses.replace(config, loop=loop, run=run)
    assert train(config)[0] == 0
    most = config.loop.steps_per_call
    assert taken.count(most) >= 5 and set(taken) == {1, most}
    assert lines(tmp_path) == lines(whole.workdir)
    both = whole._replace(config=config).arrays(), whole.arrays()
    chex.assert_trees_all_equal(*both)
