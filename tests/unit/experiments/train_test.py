"""`python experiments/train.py` as a user runs it, in processes of its own."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.permissions import modes

ROOT = pathlib.Path(__file__).parents[3]
TRAIN = [sys.executable, "-u", "experiments/train.py"]
SUMMARY = {
    *("config", "seed", "recipe", "device", "versions", "steps", "examples", "seconds"),
    *("examples_per_second", "skipped_steps", "final_eval", "best_possible_ne"),
    *("compile_seconds", "sites", "data"),
}


def run(*command, **environment):
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        umask=0o027,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole run: Parquet, spaces in paths, an output that knows ASCII only."""
    folder = tmp_path_factory.mktemp("a run")
    rng = np.random.default_rng(0)
    user = rng.integers(0, 8, 1200)
    table = {
        "click": (rng.random(1200) < 0.1 + 0.1 * user).astype(np.int64),
        "user": [f"u{i}" for i in user],
        "age": np.where(np.arange(1200) % 100, rng.random(1200), np.nan),
    }
    pq.write_table(pa.table(table), folder / "my clicks.parquet")
    options = ["--data.label", "click", "--data.categorical", "user", "--data.dense"]
    options += ["age", "--data.path", folder / "my clicks.parquet", "--seed", "3"]
    options += ["--workdir", folder / "work dir", "--data.cache", folder / "cache"]
    options += ["--profile", "2:3", "--tensorboard", "--optim.rows-lr", "0.03"]
    done = run(
        *(*TRAIN, "--config", "csv_dlrm_tiny", *options),
        LC_ALL="C",
        PYTHONIOENCODING="ascii",
    )
    assert done.returncode == 0, done.stderr
    return folder / "work dir", done


def test_a_run_prints_device_data_sites_and_result_once(finished):
    workdir, done = finished
    assert done.stdout.count("No GPU found: running on the CPU") == 1
    assert done.stdout.count("Examples: ") == 1
    rule = json.loads((workdir / "summary.json").read_text())["data"]["split_rule"]
    assert rule in done.stdout
    assert "12 nan" in done.stdout
    assert "of 5 sites in FP8." in done.stdout
    assert "valid: AUC 0." in done.stdout.splitlines()[-2]
    assert done.stdout.splitlines()[-1] == f"Report: {workdir / 'report.html'}"


def test_a_run_warns_of_nothing(finished):
    assert finished[1].stderr == ""


def test_a_run_leaves_every_file(finished):
    workdir, _ = finished
    for name in ("config.json", "sites.json", "metrics.jsonl", "scales.jsonl"):
        assert (workdir / name).stat().st_size, name
    assert (workdir / "report.html").read_text().startswith("<!doctype html>")
    assert [path.name for path in (workdir / "checkpoints").iterdir()] == ["8"]
    assert list((workdir / "profile").rglob("*.xplane.pb"))
    assert list((workdir / "tensorboard").glob("events*"))


def test_who_may_read_a_run_follows_the_umask(finished):
    assert modes(finished[0]) == {0o640, 0o750}


def test_the_summary_has_every_key(finished):
    summary = json.loads((finished[0] / "summary.json").read_text())
    assert summary.keys() >= SUMMARY
    assert summary["final_eval"].keys() == {"auc", "logloss", "ne", "calibration"}
    assert (summary["seed"], summary["steps"], summary["finished"]) == (3, 8, True)
    assert summary["best_possible_ne"] is None
    assert summary["sites"]["total"] == 5
    assert summary["command"].startswith("python experiments/train.py --config csv_dl")


@pytest.mark.slow
def test_a_finished_run_is_not_overwritten(finished):
    workdir, _ = finished
    before = (workdir / "metrics.jsonl").read_bytes()
    done = run(*TRAIN, "--config", "fp8_dlrm_tiny", "--workdir", workdir)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "holds a run already" in done.stderr
    assert (workdir / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_dry_run_compiles_a_step_and_writes_nothing(tmp_path):
    workdir = tmp_path / "run"
    arguments = ["--config", "fp8_dlrm_tiny", "--dry-run", "--workdir", workdir]
    done = run(*TRAIN, *arguments, "--bottom-mlp", "8", "--top-mlp", "16")
    assert (done.returncode, done.stderr) == (0, "")
    assert "One step compiles; it holds " in done.stdout
    assert done.stdout.endswith(" steps would be taken.\n")
    assert not workdir.exists()


WAITS_FOR_DATA = """
import runpy, sys, time
from loka_jax.train import session

def build(*_):
    print("reading data", flush=True)
    time.sleep(3600)

session.build = build
sys.argv = ["experiments/train.py", *sys.argv[1:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_sigterm_before_training_ends_at_once_and_leaves_nothing(tmp_path):
    workdir = tmp_path / "run"
    arguments = ["--config", "fp8_dlrm_tiny", "--workdir", str(workdir)]
    with subprocess.Popen(
        [sys.executable, "-c", WAITS_FOR_DATA, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout and "reading data\n" in process.stdout
        assert workdir.exists()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert (process.returncode, err) == (143, "")
    assert not workdir.exists()


@pytest.mark.slow
def test_a_missing_platform_is_one_sentence():
    done = run(*TRAIN, "--config", "fp8_dlrm_tiny", JAX_PLATFORMS="nonesuch")
    assert done.returncode == 2
    assert done.stderr.startswith("error: JAX cannot run on JAX_PLATFORMS=nonesuch")


IMPORTS = """
import sys, loka_jax, loka_jax.nn
heavy = {"triton", "matplotlib", "sklearn", "orbax", "jax_triton", "pyarrow"}
print(*sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
"""


@pytest.mark.slow
def test_importing_the_library_pulls_in_nothing_heavy():
    done = run(sys.executable, "-W", "error", "-c", IMPORTS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")
