"""Training in several processes: the run of one, and nothing lost whatever dies."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from loka_jax.train.checkpoints.checkpoint import Checkpoints
from tests.support import train as support
from tests.whole.launch.launch_test import (
    BOUND_SECONDS,
    LIMIT_SECONDS,
    ROOT,
    wait_until,
)

TRAINEE = Path(__file__).with_name("trainee.py")
# A machine that does several things at a time may keep a device waiting for a minute,
# after which XLA ends the process.
XLA_FLAGS = (
    "--xla_backend_optimization_level=0"
    " --xla_cpu_collective_call_terminate_timeout_seconds=300"
)


class Runs:
    """Runs in a folder, by name."""

    def __init__(self, folder):
        self.folder = folder

    def start(self, name, processes, *options):
        """Starts a run on eight devices in all; one process needs no launcher."""
        command = [str(TRAINEE), str(self.folder / name), *options]
        devices = str(8 // processes)
        environment = os.environ | {
            "XLA_FLAGS": XLA_FLAGS,
            "XLA_CACHE": str(self.folder / "xla"),
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
        }
        if processes == 1:
            environment["JAX_NUM_CPU_DEVICES"] = devices
        else:
            logs = ["--logs", str(self.folder / f"{name}-logs")]
            command = ["--cpu-devices", devices, *logs, *command]
            command = ["-m", "loka_jax.launch", "--processes", str(processes), *command]
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def train(self, name, processes, *options):
        """Trains to the end of a run."""
        process = self.start(name, processes, *options)
        out, errors = process.communicate(timeout=LIMIT_SECONDS)
        assert process.returncode == 0, out + errors + self.log(name, 1)
        return out

    def wait_for(self, name, process, text):
        """Waits until the second process has said something."""

        def has_said():
            assert process.poll() is None, process.communicate()
            return text in self.log(name, 1)

        wait_until(has_said)

    def log(self, name, rank):
        path = self.folder / f"{name}-logs" / f"rank-{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def outcome(self, name):
        """Returns what a run has left: log lines, and its last state."""
        workdir = self.folder / name
        # How long lists were so far is found anew by each session.
        lists = ("list_capacity", "list_climbs")
        lines = support.without(lists, support.lines(workdir))
        with Checkpoints(workdir / "checkpoints") as checkpoints:
            saved = checkpoints.newest()
            assert saved is not None
            leaves = {
                key: np.zeros(leaf["shape"], leaf["dtype"])
                for key, leaf in saved.leaves.items()
            }
            state = checkpoints.read(saved, leaves)
        return json.dumps(lines), saved.step, support.digest(state)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    runs = Runs(tmp_path_factory.mktemp("runs"))
    runs.train("one", 1)
    return runs


def test_two_processes_give_the_bits_of_one_with_all_devices(runs):
    out = runs.train("two", 2)
    assert runs.outcome("two") == runs.outcome("one")
    assert runs.outcome("two")[1] == 8
    assert (runs.folder / "two" / "report.html").exists() and "Report:" in out


@pytest.mark.parametrize(
    "where, saved", [("stall=5", 3), ("stall_save=6", 3)], ids=["step", "save"]
)
def test_nothing_is_lost_by_a_kill(runs, where, saved):
    name = where.partition("=")[0]
    process = runs.start(name, 2, where)
    runs.wait_for(name, process, "waiting in ")
    # Processes save in the background.
    wait_until((runs.folder / name / "checkpoints" / str(saved)).is_dir)
    time.sleep(1.0)  # the other process is likely to wait for this one by then
    signal_rank(process, 1, signal.SIGKILL)
    began = time.monotonic()
    _, errors = process.communicate(timeout=LIMIT_SECONDS)
    assert time.monotonic() - began < BOUND_SECONDS
    assert process.returncode == 1
    assert "rank 1 was killed by SIGKILL" in errors, errors
    assert f"newest checkpoint is step {saved}: go on with" in errors, errors
    runs.train(name, 2, "resume=1")
    assert runs.outcome(name) == runs.outcome("one")


def test_a_stuck_process_is_noticed_and_nothing_is_lost(runs):
    process = runs.start("stuck", 2, "stall=5", "watchdog=15")
    runs.wait_for("stuck", process, "waiting in ")
    signal_rank(process, 1, signal.SIGSTOP)
    _, errors = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 1
    assert "rank 1 had been stopped (SIGSTOP), and rank 0" in errors, errors
    # The watchdog, or JAX's heartbeat, which stops too, on a machine that is busy.
    assert "no step within 15 s" in errors or "by SIGABRT (as JAX" in errors, errors
    runs.train("stuck", 2, "resume=1")
    assert runs.outcome("stuck") == runs.outcome("one")


def test_a_signal_saves_the_step_of_all(runs):
    name, steps = "signal", "steps_per_call=2"
    process = runs.start(name, 2, "slow=1", steps)
    runs.wait_for(name, process, "taking step 1")
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=LIMIT_SECONDS)
    assert (process.returncode, errors) == (143, ""), out + errors
    assert "and saved: continue with --resume" in out
    assert Checkpoints(runs.folder / name / "checkpoints").latest_step() in range(2, 8)
    runs.train(name, 2, "resume=1", steps)
    assert runs.outcome(name) == runs.outcome("one")


def test_a_run_goes_on_with_another_number_of_processes(runs):
    runs.train("fewer", 2, "max_steps=5")
    runs.train("fewer", 1, "resume=1")
    # Not the lines: it was evaluated once more, at the end of the first session.
    assert runs.outcome("fewer")[1:] == runs.outcome("one")[1:]


def signal_rank(process, rank, number):
    pid = process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(int(children[rank]), number)
