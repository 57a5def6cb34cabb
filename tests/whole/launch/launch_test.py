"""A job of several processes ends as a whole, says why, and never hangs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

CHILD = Path(__file__).with_name("child.py")
ROOT = CHILD.parents[3]
# From a death to the end of the job: SIGTERM, five seconds, SIGKILL. Without the
# launcher, JAX would end the others after 20 seconds without a heartbeat.
BOUND_SECONDS = 19
LIMIT_SECONDS = 900  # for what takes seconds where the machine is not busy


def wait_until(is_true):
    until = time.monotonic() + LIMIT_SECONDS
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.02)


class Launched:
    """A launcher in a process of its own."""

    def __init__(
        self, logs, *arguments, script=CHILD, processes=2, devices=1, **environment
    ):
        options = ["--processes", processes, "--cpu-devices", devices, "--logs", logs]
        command = ["-m", "loka_jax.launch", *options, script, *arguments]
        self.process = started(*command, **environment)
        self.logs, self.processes = logs, processes

    def wait_until_said(self, text, rank=None):
        """Waits until a child, or each of them, has said something."""
        ranks = range(self.processes) if rank is None else [rank]

        def all_have():
            assert self.process.poll() is None, self.end()
            return all(text in self.log(rank) for rank in ranks)

        wait_until(all_have)

    def pids(self):
        """Returns the process ids of the ranks."""
        return self.children()[-self.processes :]

    def children(self):
        """Returns those of what copies the output of the first, and of the ranks."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children]

    def end(self):
        """Returns exit code, output and errors."""
        out, errors = self.process.communicate(timeout=LIMIT_SECONDS)
        return self.process.returncode, out, errors

    def log(self, rank):
        path = self.logs / f"rank-{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""


def started(*command, **environment):
    """Returns a Python process."""
    # Not the tests' own flags, which say how many devices there are.
    flags = "--xla_backend_optimization_level=0"
    own = {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env=os.environ | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][1] != "Z"
    except OSError:
        return False


def test_every_process_gets_its_rank_and_the_output_of_the_first_is_shown(tmp_path):
    job = Launched(tmp_path, "done", processes=3)
    code, out, errors = job.end()
    assert (code, errors) == (0, "")
    assert out.splitlines()[1:] == ["0 0 3 127.0.0.1 cpu"]
    said = [job.log(rank) for rank in range(3)]
    assert said == [f"{rank} {rank} 3 127.0.0.1 cpu\n" for rank in range(3)]


def test_what_the_processes_have_started_ends_with_them(tmp_path):
    code, _, errors = Launched(tmp_path / "logs", "nest", tmp_path).end()
    assert code == 1 and "rank 1 ended with exit code 3" in errors
    pids = [(tmp_path / rank).read_text() for rank in "01"]
    wait_until(lambda: not any(map(is_alive, pids)))  # they have been killed


def test_processes_end_with_a_supervisor_that_is_killed(tmp_path):
    job = Launched(tmp_path, "deaf")
    job.wait_until_said("waiting")
    children = job.pids()
    assert len(children) == 2
    os.kill(job.process.pid, signal.SIGKILL)
    assert job.end()[0] == -signal.SIGKILL
    wait_until(lambda: not any(map(is_alive, children)))


def test_a_signal_to_all_processes_loses_no_output(tmp_path):
    job = Launched(tmp_path, "deaf")
    job.wait_until_said("waiting")
    for pid in job.children():
        os.kill(pid, signal.SIGTERM)
    heard = f"heard {signal.SIGTERM}"
    job.wait_until_said(heard)
    job.process.kill()
    _, out, _ = job.end()  # of the first process, as what copies it has lived on
    assert out.splitlines()[1:] == job.log(0).splitlines() == ["waiting", heard]


def test_a_job_ends_though_its_output_is_no_longer_read(tmp_path):
    script, logs = tmp_path / "chat.py", tmp_path / "logs"
    script.write_text("for i in range(40_000): print('line', i)")
    with Launched(logs, script=script, processes=1).process as job:
        assert job.stdout is not None
        job.stdout.readline()
        job.stdout.close()
        assert job.wait(LIMIT_SECONDS) == 0
    assert (logs / "rank-0.log").read_text().endswith("line 39999\n")
