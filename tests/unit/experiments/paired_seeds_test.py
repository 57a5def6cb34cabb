"""Paired runs: each is kept, and pairs are those of the seeds that all arms have."""

import concurrent.futures
import json
import sys
import threading

import pytest

from experiments.bench import paired_seeds


@pytest.fixture
def trained(monkeypatch):
    """Lists the runs that are trained; those in `fails` fail."""
    made, fails = [], set()

    def train_once(config, arm, seed, extra, gpu=None):
        made.append((arm, seed))
        if (arm, seed) in fails:
            raise RuntimeError("no space left")
        ne = 0.8 + 0.001 * seed + (0.01 if arm != "bf16" else 0.0) * (1 + seed)
        return {
            "final_eval": dict.fromkeys(paired_seeds.METRICS, ne),
            **{"steps": 10, "seconds": 1.5, "skipped_steps": 0, "best_valid": {}},
            **{"compile_seconds": 0.5, "examples_per_second": 100.0},
            **{"sites": {"total": 3, "fp8": 2}, "config": {}, "versions": {}},
            **{"final_split": "test", "best_possible_ne": None, "valid_ne": {5: ne}},
        }

    monkeypatch.setattr(paired_seeds, "train_once", train_once)
    return made, fails


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """Runs the command; returns what it has written."""

    def run(*options, recipes=("bf16", "fp8_rowwise")):
        command = ["--config", "x", "--recipes", *recipes, "--out"]
        command += [str(tmp_path / "out.json"), *options]
        monkeypatch.setattr(sys, "argv", ["paired_seeds.py", *command])
        paired_seeds.main()
        return json.loads((tmp_path / "out.json").read_text())

    return run


def test_seeds_are_added_to_those_that_are_there(trained, compare, capsys):
    made, _ = trained
    first = compare("--seeds", "2")
    assert first["seeds"] == [0, 1] and len(made) == 4
    made.clear()
    result = compare("--seeds", "3", "--jobs", "2")
    assert sorted(made) == [("bf16", 2), ("fp8_rowwise", 2)]
    assert result["seeds"] == [0, 1, 2]
    ne = result["arms"]["fp8_rowwise"]["ne"]
    assert ne["minus_first"]["mean"] == pytest.approx(0.02)
    assert ne["values"] == pytest.approx([0.81, 0.821, 0.832])
    assert result["runs"]["bf16"]["2"]["valid_ne"] == {"5": pytest.approx(0.802)}
    assert "delta +0.02000" in capsys.readouterr().out
    made.clear()
    assert compare("--seeds", "3") == result and not made


@pytest.mark.parametrize("seed", [0, 1])
def test_a_failure_loses_no_other_run(seed, trained, compare, tmp_path):
    made, fails = trained
    fails.add(("fp8_rowwise", seed))
    with pytest.raises(RuntimeError, match="no space left"):
        compare("--seeds", "2")
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["seeds"] == [1 - seed]
    assert set(result["runs"]["bf16"]) == {"0", "1"}
    fails.clear()
    made.clear()
    assert compare("--seeds", "2")["seeds"] == [0, 1]
    assert made == [("fp8_rowwise", seed)]


def test_ctrl_c_begins_no_other_run(trained, compare, monkeypatch):
    made, _ = trained

    def interrupt(jobs):
        raise KeyboardInterrupt

    monkeypatch.setattr(concurrent.futures, "as_completed", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compare("--seeds", "500")
    assert len(made) < 1000


def test_runs_are_dealt_to_the_gpus_that_are_free(monkeypatch):
    running, most, lock = [], [], threading.Lock()
    both_run = threading.Barrier(2)

    def train_once(config, arm, seed, extra, gpu=None):
        with lock:
            running.append(gpu)
            most.append(running.count(gpu))
        if seed < 2:
            both_run.wait(10)
        with lock:
            running.remove(gpu)
        return {"gpu": gpu}

    monkeypatch.setattr(paired_seeds, "train_once", train_once)
    dealer = paired_seeds.Dealer(jobs=2, gpus=2)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(dealer.train_once, "x", "bf16", s, []) for s in range(6)]
        gpus = [run.result()["gpu"] for run in runs]
    assert set(gpus[:2]) == {0, 1} and max(most) == 1
    alone = paired_seeds.Dealer(jobs=1, gpus=None)
    assert alone.train_once("x", "bf16", 9, []) == {"gpu": None}


def test_runs_of_other_options_are_not_mixed(trained, compare, capsys):
    compare("--seeds", "1")
    for other in ({"recipes": ("bf16", "fp8_tensorwise")}, {}):
        extra = () if other else ("--", "--optim.lr", "1")
        with pytest.raises(SystemExit) as exit_code:
            compare("--seeds", "1", *extra, **other)
        assert exit_code.value.code == 2
        assert "name another" in capsys.readouterr().err


@pytest.mark.parametrize("arm", ["fp8_rowise", "--optim.lr 1", ""])
def test_an_arm_without_a_recipe_is_refused_before_any_run(
    trained, compare, capsys, arm
):
    made, _ = trained
    with pytest.raises(SystemExit) as exit_code:
        compare("--seeds", "1", recipes=("bf16", arm))
    assert exit_code.value.code == 2 and not made
    assert "unknown recipe" in capsys.readouterr().err
