"""Two processes of JAX under the launcher: they agree, and never hang."""

import re
import signal
import time

import pytest

from tests.whole.launch.launch_test import BOUND_SECONDS, Launched

pytestmark = pytest.mark.slow

FOREVER = 10**6


def launch(tmp_path, *, watchdog=60.0, num_steps=FOREVER):
    arguments = (tmp_path / "run", watchdog, num_steps)
    return Launched(
        tmp_path / "logs", *arguments, script="jax_child.py", devices_per_process=2
    )


def test_processes_sum_over_all_devices_and_end_well(tmp_path):
    job = launch(tmp_path, num_steps=3)
    code, out, errors = job.end()
    assert (code, errors) == (0, ""), (out, job.log(1))
    assert re.findall(r"step \d: \d+", job.log(1)) == re.findall(r"step \d: \d+", out)
    assert "step 3: 84" in out  # 0 + 1 + ... + 7 in each
    assert (job.logs / "workdir").read_text() == f"{tmp_path}/run/of-0"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_all_after_the_same_step(tmp_path, number):
    job = launch(tmp_path)
    job.wait_until_said("step 20:")
    job.process.send_signal(number)
    code, _, errors = job.end()
    assert (code, errors) == (128 + number, "")
    saved = [re.findall(r"saved step \d+", job.log(rank)) for rank in (0, 1)]
    assert saved[0] == saved[1] and len(saved[0]) == 1


def test_a_killed_process_ends_all_within_seconds(tmp_path):
    job = launch(tmp_path)
    job.wait_until_said("step 20:")
    job.signal_rank(1, signal.SIGKILL)
    began = time.monotonic()
    code, _, errors = job.end()
    assert time.monotonic() - began < BOUND_SECONDS
    assert code == 1
    assert errors.startswith("error: rank 1 was killed by SIGKILL"), errors


def test_a_stuck_process_ends_all(tmp_path):
    job = launch(tmp_path, watchdog=3.0)
    job.wait_until_said("step 20:")
    job.signal_rank(1, signal.SIGSTOP)
    code, _, errors = job.end()
    assert code == 1
    assert errors.startswith("error: rank 1 had been stopped (SIGSTOP), and rank 0")
    assert "no step within 3 s" in errors
