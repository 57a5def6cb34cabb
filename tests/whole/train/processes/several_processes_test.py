"""Training in several processes: the run of one, and nothing lost whatever dies."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.support import train as support
from tests.support.recorded import newest
from tests.whole.launch.launch_test import (
    BOUND_SECONDS,
    LIMIT_SECONDS,
    Launched,
    started,
    wait_until,
)

TRAINEE = Path(__file__).with_name("trainee.py")
LEAVER = TRAINEE.with_name("leaver.py")
# A machine that does several things at a time may keep a device waiting for a minute,
# after which XLA ends the process.
XLA_FLAGS = (
    "--xla_backend_optimization_level=0"
    " --xla_cpu_collective_call_terminate_timeout_seconds=300"
)


class Runs:
    """Runs on eight devices in all, in a folder, by name."""

    def __init__(self, folder, cache):
        self.folder, self.environment = folder, {"JAX_PLATFORMS": "cpu"}
        self.environment["XDG_CACHE_HOME"] = str(folder / "cache")
        self.environment |= {"XLA_FLAGS": XLA_FLAGS, "XLA_CACHE": str(cache)}

    def start(self, name, *options, devices=4):
        """Starts two processes, with so many devices each."""
        arguments = self.folder / f"{name}-logs", self.folder / name, *options
        return Launched(*arguments, script=TRAINEE, devices=devices, **self.environment)

    def train(self, name, *options):
        """Trains by two processes to the end of a run."""
        job = self.start(name, *options)
        code, out, errors = job.end()
        assert code == 0, out + errors + job.log(1)
        return out

    def train_alone(self, name, *options):
        """Trains by one process, without a launcher."""
        environment = self.environment | {"JAX_NUM_CPU_DEVICES": "8"}
        process = started(TRAINEE, self.folder / name, *options, **environment)
        out, errors = process.communicate(timeout=LIMIT_SECONDS)
        assert process.returncode == 0, out + errors

    def wait_for_step_3(self, name):
        """Waits until all processes, which save in the background, have saved it."""
        wait_until((self.folder / name / "checkpoints" / "3").is_dir)

    def outcome(self, name):
        """Returns what a run has left: log lines, and its last state."""
        workdir = self.folder / name
        # How long lists were so far is found anew by each session.
        lists = ("list_capacity", "list_climbs")
        lines = support.without(lists, support.lines(workdir))
        saved, state = newest(workdir / "checkpoints")
        return json.dumps(lines), saved.step, support.digest(state)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, pytestconfig):
    """Returns runs that keep their programs where tests keep theirs."""
    cache = pytestconfig.cache.mkdir("xla")
    runs = Runs(tmp_path_factory.mktemp("runs"), cache)
    runs.train_alone("one")
    return runs


def test_two_processes_give_the_bits_of_one_with_all_devices(runs):
    out = runs.train("two")
    assert runs.outcome("two") == runs.outcome("one")
    assert runs.outcome("two")[1] == 8
    assert (runs.folder / "two" / "report.html").exists() and "Report:" in out


def test_all_processes_enter_fp8_by_the_first_ones_review(tmp_path, pytestconfig):
    slow = dict(bf16_us=2e7, fp8_us=1e7)  # of which a few steps pay for entering FP8
    table = support.write_table(tmp_path / "table.json", source="another", **slow)
    runs = Runs(tmp_path, pytestconfig.cache.mkdir("xla"))
    # As many rows a device as those of the table.
    options = f"table={table}", "shards=2", "batch_size=64", "max_steps=5"
    job = runs.start("reviewed", *options, devices=1)
    code, out, errors = job.end()
    assert code == 0, out + errors + job.log(1)
    changes = support.summary(tmp_path / "reviewed")["changes"]
    assert len(changes) == 2
    for change in changes:
        assert "fp8_rowwise now: its live errors are within the limits" in change
        assert change in out and change in job.log(1)


def test_nothing_is_lost_by_a_kill_within_a_save_and_one_process_goes_on(runs):
    name = "stall_save"
    job = runs.start(name, "stall_save=6")
    job.wait_until_said("waiting in ", rank=1)
    runs.wait_for_step_3(name)
    time.sleep(1.0)  # the other process is likely to wait for this one by then
    os.kill(job.pids()[1], signal.SIGKILL)
    began = time.monotonic()
    code, _, errors = job.end()
    assert time.monotonic() - began < BOUND_SECONDS
    assert code == 1 and "rank 1 was killed by SIGKILL" in errors, errors
    assert "newest checkpoint is step 3: go on with" in errors, errors
    runs.train_alone(name, "resume=1")
    assert runs.outcome(name) == runs.outcome("one")


def test_a_process_that_is_stuck_in_a_step_is_noticed(runs):
    job = runs.start("stuck", "stall=3", "watchdog=15")
    job.wait_until_said("waiting in ", rank=1)
    runs.wait_for_step_3("stuck")
    os.kill(job.pids()[1], signal.SIGSTOP)
    code, _, errors = job.end()
    assert code == 1
    assert "rank 1 had been stopped (SIGSTOP), and rank 0" in errors, errors
    # The watchdog, or JAX's heartbeat, which stops too, on a machine that is busy.
    assert "no step within 15 s" in errors or "by SIGABRT (as JAX" in errors, errors
    # From which the run goes on, as one does that was killed.
    assert "newest checkpoint is step 3: go on with" in errors, errors


def test_a_signal_saves_the_step_of_all(runs):
    name, steps = "signal", "steps_per_call=2"
    job = runs.start(name, "slow=1", steps)
    job.wait_until_said("taking step 1", rank=1)
    job.process.send_signal(signal.SIGTERM)
    code, out, errors = job.end()
    assert (code, errors) == (143, ""), out + errors
    assert "and saved: continue with --resume" in out
    assert newest(runs.folder / name / "checkpoints")[0].step in range(2, 8)
    runs.train(name, "resume=1", steps)
    assert runs.outcome(name) == runs.outcome("one")


@pytest.mark.parametrize("code", [0, 1])
def test_nothing_is_said_after_a_success_and_a_failure_is_said_at_once(tmp_path, code):
    job = Launched(tmp_path, code, script=LEAVER)
    job.wait_until_said("is done")
    began = time.monotonic()
    ended, out, errors = job.end()
    assert ended == code and ("rank 1 ended with exit code 1" in errors) == code
    if code == 0:
        said = [out, *map(job.log, range(2))]
        assert [text.splitlines()[-1] for text in said] == [
            *("rank 0 is done", "rank 0 is done", "rank 1 is done")
        ]
    assert time.monotonic() - began < BOUND_SECONDS
