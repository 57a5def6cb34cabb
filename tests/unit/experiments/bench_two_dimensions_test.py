"""The benchmark of groups that update alone: its arms, its bytes, what it keeps."""

import json

import jax
import pytest

from experiments.bench import two_dimensions as bench
from loka_jax.data import Position
from loka_jax.train.build import build
from tests.whole.train.mesh.mesh_step_test import collectives

DTYPE_BYTES = {"f32": 4, "s32": 4}


def arguments(folder, **options):
    small = dict(seeds=1, groups=(2,), batch_size=64, steps=18, eval_examples=256)
    return bench.Arguments(folder=folder, **small | options)


def test_arms_are_those_of_the_paper_and_of_rates(tmp_path):
    arms = bench.arms_of(bench.Arguments(folder=tmp_path))
    assert next(iter(arms)) == bench.FIRST
    assert len(arms) == 4 + 3 * 9  # no two have one name
    assert arms["weights 4 c=2 lagged"] == bench.Arm(
        groups=4, sync="weights", c=2.0, lagged=True
    )


@pytest.mark.parametrize("sync", ["gradients", "weights"])
def test_bytes_are_those_of_the_compiled_program(tmp_path, sync):
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    arm = bench.Arm(groups=8, sync=sync)
    options = arguments(tmp_path)
    run = build(bench.config_of(arm, options), None, lambda line: None)
    batch = run.splits.train.batch(Position(0, 0, 0), options.batch_size, shuffle=True)
    text = run.first_step.lower(run.init(), batch).compile().as_text()
    gathered = sum(
        size * DTYPE_BYTES[dtype]
        for kind, dtype, size, _ in collectives(text)
        if kind == "all-gather"
    )
    # A device has its own part already.
    assert bench.sync_bytes(run, arm) == gathered * 7 / 8


def test_runs_are_kept_and_not_done_again(tmp_path, monkeypatch):
    options = arguments(tmp_path / "runs", out=tmp_path / "out.json")
    arms = {"1D": bench.Arm(), "1D lagged": bench.Arm(lagged=True)}
    monkeypatch.setattr(bench, "arms_of", lambda _: arms)
    bench.main(options)
    first = json.loads(options.out.read_text())["arms"]
    assert first["1D"]["relative_difference"]["mean"] == 0
    assert first["1D lagged"]["relative_difference"]["mean"] != 0
    monkeypatch.setattr(bench, "train_once", None)
    bench.main(options)
    assert json.loads(options.out.read_text())["arms"] == first
