"""Scaling over devices: what is started, what is measured, how it is compared."""

import dataclasses

import jax
import pytest

from experiments.bench import scaling, scaling_job, step_parts
from experiments.bench.scaling import Options
from experiments.bench.scaling_job import Point
from experiments.configs import get_config
from loka_jax.train.planner.mesh_plan import Rates
from loka_jax.train.processes.group import ALONE

CONFIG = get_config("fp8_dlrm_tiny")
CONFIG = dataclasses.replace(
    CONFIG, loop=dataclasses.replace(CONFIG.loop, batch_size=64)
)


def record(point, us):
    times = {"median_us": us}
    return point._asdict() | {"step": times, "with_input": times}


def test_a_launch_has_one_number_of_gpus():
    options = Options(gpus=(1, 2, 4))
    assert list(scaling._jobs(options)) == [
        ("one", (1, 2, 4)),
        ("each", (2,)),
        ("each", (4,)),
    ]
    options = dataclasses.replace(options, modes=("each",))
    assert list(scaling._jobs(options)) == [
        ("one", (1,)),
        ("each", (2,)),
        ("each", (4,)),
    ]


def test_weak_scaling_keeps_the_examples_of_a_gpu_and_strong_those_of_all():
    options = Options(kinds=("weak", "strong"))
    points = scaling.points_of(options, 64, 4)
    assert points == {"weak": Point(4, 64), "strong": Point(4, 16)}
    with pytest.raises(ValueError, match="batch-size 64 must be a multiple of 3"):
        scaling.points_of(options, 64, 3)


def test_points_are_texts():
    assert Point.parse(str(Point(2, 65536))) == Point(2, 65536)
    for text in ("2", "0x8", "2x", "ax8"):
        with pytest.raises(ValueError, match=f"--job.points {text} must be GPUSxEXAM"):
            Point.parse(text)


def test_rows_compare_with_one_gpu_and_with_the_planner():
    rates = Rates(launch_us=1.0, call_us=1.0)  # the host is not the limit
    options = Options(gpus=(1, 2), kinds=("weak", "strong"), rates=rates)
    jobs = [
        {"mode": "one", "points": [record(Point(1, 64), 1000.0)]},
        {"mode": "each", "points": [record(Point(2, 64), 1250.0)]},
        {"mode": "each", "points": [record(Point(2, 32), 800.0)], "failed": "late"},
    ]
    rows = scaling.compared(CONFIG, options, jobs)
    found = [(r["kind"], r["gpus"], r["mode"], r["of_linear"]) for r in rows]
    assert found == [
        ("weak", 1, "one", 1.0),
        ("weak", 2, "each", 0.8),
        ("strong", 1, "one", 1.0),
        ("strong", 2, "each", 0.625),
    ]
    # One GPU is what the model was fitted to.
    assert rows[0]["error"] == pytest.approx(0, abs=1e-9)
    assert rows[1]["predicted_us"] > rows[3]["predicted_us"] > 1000 / 2
    assert rows[1]["error"] == pytest.approx(rows[1]["predicted_us"] / 1250 - 1)
    assert list(scaling._failures(jobs)) == ["late"]


def test_without_one_gpu_the_planner_stands_alone():
    # A table that one GPU does not hold.
    jobs = [{"mode": "one", "points": [{"gpus": 1, "batch": 64, "failed": "memory"}]}]
    jobs[0]["points"].append(record(Point(2, 64), 1250.0))
    (row,) = scaling.compared(CONFIG, Options(), jobs)
    own = scaling.predict(CONFIG, Point(2, 64), None, Rates())
    assert (row["of_linear"], row["predicted_us"]) == (None, own.step_us)
    assert list(scaling._failures(jobs)) == ["one, 1 GPUs: memory"]


def test_notes_on_plans_are_told_once():
    two = [{"plan_notes": ["FP8 was not checked."]}] * 2
    jobs = [{"points": two}, {"points": [{"failed": "memory"}]}, {"failed": "late"}]
    assert list(scaling._plan_notes(jobs)) == ["FP8 was not checked."]


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_steps_are_timed_and_split(tmp_path, monkeypatch, steps_per_call):
    if jax.device_count() < 2:
        pytest.skip("needs two devices")

    def profile_ops(chain):
        jax.block_until_ready(chain(10))  # some batches twice
        return {"one": 3.0, "another": 5.0}

    monkeypatch.setattr(step_parts, "profile_ops", profile_ops)
    options = scaling_job.Options(steps=7, plans=str(tmp_path))
    loop = dataclasses.replace(CONFIG.loop, steps_per_call=steps_per_call)
    config = dataclasses.replace(CONFIG, loop=loop)
    found = scaling_job.measure(config, Point(2, 32), options, ALONE)
    assert found["step"]["median_us"] > 0 and found["with_input"]["median_us"] > 0
    assert found["queue_us"] > 0
    (note,) = found["plan_notes"]
    assert "summed in f32: not measured on 2 x cpu" in note
    assert found["skipped"] == 0 and (tmp_path / "plan-32.json").exists()
    assert found["parts"]["other"] == 8.0 / 2
    assert found["mesh"] == "1 x 2"
