"""A space is measured point by point, goes on where it ended, and keeps failures."""

import pytest

from experiments.bench import measure_space
from loka_jax.search.history import Outcome, read_trials
from tests.support.configs import tiny_config


def test_a_space_grows_until_all_points_are_in_it(tmp_path, monkeypatch):
    asked, interrupted = [], []

    def measured(configs, seconds, together, environment):
        for config in configs:
            if len(asked) == 2 and not interrupted:
                interrupted.append(True)
                raise KeyboardInterrupt
            asked.append((together, environment.get("CUDA_VISIBLE_DEVICES")))
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
