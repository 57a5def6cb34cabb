"""`python experiments/train.py` as a user runs it, in processes of its own."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.configs import tiny_config
from tests.support.permissions import modes

ROOT = pathlib.Path(__file__).parents[3]
TRAIN = [sys.executable, "-u", "experiments/train.py"]


def run(*command, **environment):
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        umask=0o027,
    )


def test_a_run_prints_and_leaves_what_it_promises(tmp_path):
    """With spaces in paths, and an output that knows ASCII only."""
    folder = tmp_path / "a run"
    folder.mkdir()
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
    options += ["--profile", "2:3", "--track", "tensorboard", "--optim.rows-lr", "0.03"]
    command = [*TRAIN, "--config", tiny_config("csv_dlrm"), *options]
    done = run(*command, LC_ALL="C", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    workdir = folder / "work dir"
    summary = json.loads((workdir / "summary.json").read_text())
    assert done.stderr == ""  # it warns of nothing
    for said in ("No GPU found: running on the CPU", "Examples: ", "of 5 sites in FP8"):
        assert done.stdout.count(said) == 1
    assert summary["data"]["split_rule"] in done.stdout and "12 nan" in done.stdout
    report = workdir / "report.html"
    assert done.stdout.splitlines()[-1] == f"Report: {report}"
    assert report.read_text().startswith("<!doctype html>")
    assert modes(workdir) == {0o640, 0o750}  # by the umask
    assert list((workdir / "profile").rglob("*.xplane.pb"))
    assert list((workdir / "tensorboard").glob("events*"))
    assert (summary["seed"], summary["steps"], summary["finished"]) == (3, 8, True)
    assert summary["command"].startswith("python experiments/train.py --config ")


LIGHT = """
import sys
from experiments import export, predict
try:
    predict.main(["--help"])
finally:
    print(*sorted({"jax", "flax", "numpy", "pyarrow"} & sys.modules.keys()))
"""
MISTYPED = """
import sys
from experiments import train
code = train.main(["--config", "fp8_dlrm", "--data.eaxmples", "3"])
slow = {"orbax", "scipy", "loka_jax.train.build", "loka_jax.train.session"}
print(code, *sorted(slow & sys.modules.keys()))
"""
IMPORTS = """
import sys, loka_jax, loka_jax.nn
import loka_jax.report.run_page
heavy = {"triton", "matplotlib", "sklearn", "orbax", "jax_triton", "pyarrow"}
print(*sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
print(*sorted({"flax.nnx", "jax.experimental.mosaic.gpu"} & sys.modules.keys()))
"""


def test_help_mistyped_options_and_the_library_import_nothing_heavy():
    done = run(sys.executable, "-c", LIGHT)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "")
    done = run(sys.executable, "-c", MISTYPED)
    assert (done.stdout, done.stderr[:31]) == ("2\n", "error: there is no option --dat")
    done = run(sys.executable, "-W", "error", "-c", IMPORTS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n\n", "")
