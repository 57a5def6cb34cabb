"""What benchmarks make of times that are given: ratios, shares, rates, costs."""

import json
from types import SimpleNamespace

import pytest

from experiments.bench import paired_seeds, step_split
from loka_jax.measure.timing import Timing


@pytest.fixture
def timed(monkeypatch):
    """Gives a benchmark the medians of its chains, in place of a clock."""

    def timed(module, medians, **stand_ins):
        def time_chains(chains, **_):
            of = {k: (medians[k], medians[k] / 2, 3 * medians[k]) for k in chains}
            return {k: Timing(*times) for k, times in of.items()}

        monkeypatch.setattr(module, "time_chains", time_chains)
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(module, name, stand_in)

    return timed


def test_step_split_divides_the_first_arms_time_by_each(timed, tmp_path):
    record, asked = {"memory_bytes": 1, "kernels_us": {}}, []
    timed(
        step_split,
        {"a": 300.0, "b": 100.0},
        run_of=lambda *of: asked.append(of) or SimpleNamespace(plan="plan"),
        _lowered=lambda run: SimpleNamespace(jobs=[]),
        _measured=lambda run, lowered: (None, record),
        plan_rows=lambda plan: [plan],
    )
    options = {"arms": ("a", "b"), "batch_size": 64, "mods": ("block",), "plan": "off"}
    out = tmp_path / "out.json"
    step_split.main(step_split.Arguments(out=out, config="x", **options))
    found = json.loads(out.read_text())["arms"]
    assert {k: v["speedup"] for k, v in found.items()} == {"a": 1.0, "b": 3.0}
    assert asked == [("x", arm, 64, ("block",), "off") for arm in "ab"]


def test_pairs_differ_by_the_second_from_the_first():
    found = paired_seeds.paired([3.0, 5.0, 4.0], [1.0, 2.0, 3.0])
    assert found["mean"] == 2 and found["std"] == 1
    assert found["half_interval_95"] == pytest.approx(4.302653 / 3**0.5)
    assert paired_seeds.paired([3.0], [1.0])["half_interval_95"] is None
