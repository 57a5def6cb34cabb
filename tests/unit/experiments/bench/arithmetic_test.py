"""What benchmarks make of times that are given: ratios, shares, rates, costs."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from experiments.bench import (
    dense_norm,
    embedding_update,
    fm_lcb,
    input_pipeline,
    looks,
    paired_seeds,
    probe_cost,
    step_split,
    steps,
    table_storage,
    tasks,
    wide_tail,
)
from loka_jax.measure.timing import Timing
from tests.support.stand_ins import ROOFLINE


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


def nothing(*_, **__):
    """Stands in for what a benchmark does before it computes."""


def test_step_split_divides_the_first_arms_time_by_each(timed, tmp_path):
    record, asked = {"memory_bytes": 1, "kernels_us": {}}, []
    timed(
        step_split,
        {"a": 300.0, "b": 100.0},
        run_of=lambda *of: asked.append(of) or SimpleNamespace(plan="plan"),
        _measured=lambda run: (None, record),
        plan_rows=lambda plan: [plan],
    )
    options = {"arms": ("a", "b"), "batch_size": 64, "mods": ("block",), "plan": "off"}
    out = tmp_path / "out.json"
    step_split.main(step_split.Arguments(out=out, config="x", **options))
    found = json.loads(out.read_text())["arms"]
    assert {k: v["speedup"] for k, v in found.items()} == {"a": 1.0, "b": 3.0}
    assert asked == [("x", arm, 64, ("block",), "off") for arm in "ab"]


def test_looks_and_probe_cost_what_they_add_to_the_steps_between(timed):
    state = dataclasses.make_dataclass("State", ["probe", "step"])(1, 2)
    config = SimpleNamespace(loop=SimpleNamespace(look_every=20))
    run = SimpleNamespace(step=None, train_step=nothing, config=config)
    timed(
        looks,
        {"step": 50.0, "look": 400.0},
        run_of=lambda *_: run,
        warm_up=lambda run: (state, [1]),
        look_step=lambda *_: lambda state, batch: 0,
        watched=nothing,
        profile_kernels=nothing,
    )
    assert looks.measure(looks.Arguments(), 64)["cost"] == 400 / (20 * 50)
    times = {"plain": 100.0, "rows": 130.0, "whole": 250.0}
    more = {"make_run": lambda *_: run, "warm_up": lambda run: (None, [1])}
    timed(probe_cost, times, **more)
    found = probe_cost.measure("m", 64, probe_cost.Arguments(every=50))
    share = 1 / probe_cost.ProbeOptions(every=50).covariances_every
    observed = (1 - share) * 130 + share * 250
    assert found["cost"] == pytest.approx((observed - 100) / (50 * 100))


def test_ratios_are_to_the_best_of_xlas_forms():
    def form(name, is_ours=False, transposed=False):
        return SimpleNamespace(name=name, is_ours=is_ours, transposed=transposed)

    forms = [form("a"), form("b"), form("c", True), form("d", transposed=True)]
    us = {"a": 30.0, "b": 20.0, "c": 5.0, "d": 1.0}
    records = {name: {"us": x} for name, x in us.items()}
    fm_lcb._compare(forms, records)
    ratios = {name: record["vs_xla"] for name, record in records.items()}
    assert ratios == {"a": 20 / 30, "b": 1.5, "c": 4.0, "d": 20.0}
    us = {"xla_bf16": 30.0, "xla_bf16_f32_gemm": 28.0, "xla_fp8_to_fp8": 20.0}
    us |= {"fp8_to_fp8_tensor": 7.0, "xla_bwd_of_z": 50.0, "bwd_bf16_of_fp8": 25.0}
    records = {name: {"us": x} for name, x in us.items()}
    dense_norm.compare(records)
    assert records["fp8_to_fp8_tensor"]["vs_xla"] == 4.0
    assert records["fp8_to_fp8_tensor"]["vs_best_xla"] == pytest.approx(20 / 7)
    assert records["bwd_bf16_of_fp8"]["vs_xla"] == 2.0


def test_rates_shares_and_growth():
    record = {"us": 10.0, "num_bytes": 8e6}
    wide_tail._add_floor(record, ROOFLINE, 2e9)
    assert record["floor_us"] == ROOFLINE.floor_us(8e6, 2e9, "fp8")
    assert record["of_floor"] == record["floor_us"] / 10
    assert (record["tb_per_s"], record["tflop_per_s"]) == (0.8, 200.0)
    rates = {"median": 3, "min": 1, "max": 9}
    assert input_pipeline._rates([3.2, 1.1, 9.4]) == rates
    cases = [{"us": {"a": {"median": us}}} for us in (20.0, 10.0, 35.0)]
    assert embedding_update._growth(cases) == {"a": 3.5}
    sizes = {"argument": 100, "output": 50, "alias": 30, "temp": 7}
    memory = SimpleNamespace(**{f"{k}_size_in_bytes": v for k, v in sizes.items()})
    compiled = SimpleNamespace(memory_analysis=lambda: memory)
    assert steps.memory_bytes(compiled) == 127  # without what is aliased


def test_pairs_differ_by_the_second_from_the_first():
    found = paired_seeds.paired([3.0, 5.0, 4.0], [1.0, 2.0, 3.0])
    assert found["mean"] == 2 and found["std"] == 1
    assert found["half_interval_95"] == pytest.approx(4.302653 / 3**0.5)
    assert paired_seeds.paired([3.0], [1.0])["half_interval_95"] is None
    runs = {"f32": [0.8, 0.5], "bf16": [0.88, 0.6]}
    runs = {k: [{"ne": x, "auc": 1 - x} for x in v] for k, v in runs.items()}
    found = table_storage.summary(runs)
    assert found["bf16"]["relative_difference"]["mean"] == pytest.approx(0.15)
    assert found["f32"]["ne"]["mean"] == 0.65
    pairs = (0.5, 0.6), (1, 1.3)
    seeds = [{"alone": {"like": a}, "mmoe": {"like": b}} for a, b in pairs]
    found = tasks.described(seeds, "mmoe", "like")
    assert found["minus_alone"]["mean"] == pytest.approx(0.2)
