"""A space is measured point by point, goes on where it ended, and keeps failures."""

import os

import pytest

from experiments.bench import measure_space
from loka_jax.search.history import Outcome, read_trials
from tests.support.configs import tiny_config


def test_a_space_grows_until_all_points_are_in_it(tmp_path, monkeypatch):
    asked, interrupted = [], []

    def measured(configs, seconds, together, environment, turns):
        for config in configs:
            if len(asked) == 2 and not interrupted:
                interrupted.append(True)
                raise KeyboardInterrupt
            asked.append((together, environment.get("CUDA_VISIBLE_DEVICES")))
            assert not turns
            assert (config.mesh.replicas, config.mesh.shards) == (1, 1)
            steps = config.loop.steps_per_call
            if steps == 8:
                yield Outcome(status="killed", why="the system killed it")
            else:
                yield Outcome(status="ok", rates=(100.0 * steps,))

    monkeypatch.setattr(measure_space, "measured", measured)
    out = tmp_path / "space.json"
    line = ["--config", tiny_config("fp8_dlrm"), "--out", str(out), "--gpus", "1"]
    line += ["--space", "table-dtype", "--together", "3"]
    with pytest.raises(KeyboardInterrupt):
        measure_space.measure_line(line)
    assert len(read_trials(out)) == 2
    assert measure_space.measure_line(line) == 0
    trials = read_trials(out)
    assert len(trials) == len({trial.key for trial in trials}) == 8
    assert {x.choices["steps-per-call"] for x in trials if not x.is_ok} == {"8"}
    assert all(gpu == "0" for _, gpu in asked) and {n for n, _ in asked} <= {3, 2}
    assert measure_space.measure_line(line) == 0 and len(asked) == 8


def test_processes_of_a_gpu_share_their_turns(tmp_path, monkeypatch):
    asked, cores = [], {}
    every = os.sched_getaffinity(0)

    def measured(configs, seconds, together, environment, turns):
        for _ in configs:
            own = environment["CUDA_VISIBLE_DEVICES"], turns, os.path.isdir(turns)
            cores.setdefault(own[0], os.sched_getaffinity(0))
            asked.append((*own, environment["XLA_PYTHON_CLIENT_PREALLOCATE"]))
            yield Outcome(status="ok", rates=(100.0,))

    monkeypatch.setattr(measure_space, "measured", measured)
    out = tmp_path / "space.json"
    line = ["--config", tiny_config("fp8_dlrm"), "--out", str(out), "--gpus", "2"]
    line += ["--space", "table-dtype", "--together", "1", "--jobs", "2"]
    assert measure_space.measure_line(line) == 0
    folders = {(gpu, folder) for gpu, folder, *_ in asked}
    assert len(asked) == 8 and len(folders) == len({x for _, x in folders}) <= 2
    assert {rest for *_, rest in asked} == {"false"} and all(x for _, _, x, _ in asked)
    assert os.sched_getaffinity(0) == every
    if len(every) > 1 and len(cores) > 1:
        assert not set.intersection(*cores.values())


@pytest.mark.parametrize(("jobs", "kept"), [("1", 4), ("2", 0)])
@pytest.mark.parametrize("status", ["memory", "crash"])
def test_what_others_may_have_caused_is_no_failure(
    tmp_path, monkeypatch, jobs, kept, status
):
    def measured(configs, *_):
        for _ in configs:
            yield Outcome(status=status, why="a GPU without memory")

    monkeypatch.setattr(measure_space, "measured", measured)
    out = tmp_path / "space.json"
    line = ["--config", tiny_config("fp8_dlrm"), "--out", str(out), "--gpus", "1"]
    assert measure_space.measure_line([*line, "--jobs", jobs]) == 0
    assert (len(read_trials(out)) if out.exists() else 0) == kept
