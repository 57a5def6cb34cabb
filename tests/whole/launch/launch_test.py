"""A job of several processes ends as a whole, says why, and never hangs."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loka_jax.launch.__main__ import _new_folder, main
from loka_jax.launch.processes import _reserved_port, require_devices
from loka_jax.launch.supervisor import to_blame

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
        self,
        logs,
        *arguments,
        processes=2,
        script="child.py",
        devices_per_process=1,
        start=("-m", "loka_jax.launch"),
    ):
        options = ["--processes", processes, "--cpu-devices", devices_per_process]
        command = [*options, "--logs", logs, CHILD.with_name(script), *arguments]
        # Not the tests' own flags, which say how many devices there are.
        flags = "--xla_backend_optimization_level=0"
        self.process = subprocess.Popen(
            [sys.executable, *start, *map(str, command)],
            cwd=ROOT,
            env=os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.logs, self.processes = logs, processes

    def wait_until_said(self, text):
        """Waits until all children have said something."""

        def all_have():
            assert self.process.poll() is None, self.end()
            return all(text in self.log(rank) for rank in range(self.processes))

        wait_until(all_have)

    def pids(self):
        """Returns the process ids of the ranks."""
        pid = self.process.pid
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()

    def signal_rank(self, rank, number):
        os.kill(int(self.pids()[rank]), number)

    def end(self):
        """Returns exit code, output and errors."""
        out, errors = self.process.communicate(timeout=LIMIT_SECONDS)
        return self.process.returncode, out, errors

    def log(self, rank):
        path = self.logs / f"rank-{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""


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


def test_a_death_ends_all_and_says_who_why_and_how_to_go_on(tmp_path):
    for name in ("4", "12", "16.damaged-1", ".unfinished"):
        (tmp_path / "run" / "checkpoints" / name).mkdir(parents=True)
    code, _, errors = Launched(tmp_path / "logs", "die", tmp_path / "run").end()
    died = float((tmp_path / "logs" / "died").read_text())
    assert code == 1 and time.monotonic() - died < BOUND_SECONDS
    (sentence,) = errors.splitlines()
    assert sentence.startswith("error: rank 1 was killed by SIGKILL (its last line in")
    assert "is 'step 7'" in sentence
    assert "newest checkpoint is step 12:" in sentence
    resume = f"--processes 2 --cpu-devices 1 {CHILD} --resume --workdir {tmp_path}/run"
    assert sentence.endswith(f"go on with python -m loka_jax.launch {resume}")


def test_without_a_checkpoint_the_sentence_says_so(tmp_path):
    _, _, errors = Launched(tmp_path / "logs", "die", tmp_path / "run").end()
    assert f"no checkpoint was saved yet in {tmp_path}/run" in errors


def test_a_failure_is_named_by_its_last_line(tmp_path):
    code, _, errors = Launched(tmp_path, "fail").end()
    assert code == 1
    assert re.search("rank 1 ended with exit code 1 .*'KeyError: 3'", errors), errors
    assert "had not begun to train" in errors


def test_an_error_that_the_user_can_mend_stays_one_sentence(tmp_path):
    code, out, errors = Launched(tmp_path, "refuse").end()
    assert (code, errors) == (2, "error: no such file.\n")


def test_a_stopped_process_is_named_when_another_gives_up(tmp_path):
    code, _, errors = Launched(tmp_path, "stuck", tmp_path / "pid").end()
    assert code == 1
    stuck = r"error: rank 1 had been stopped \(SIGSTOP\), and rank 0 .*no step for 1 s"
    assert re.match(stuck, errors), errors
    assert not is_alive((tmp_path / "pid").read_text())


def test_what_the_processes_have_started_ends_with_them(tmp_path):
    code, _, errors = Launched(tmp_path / "logs", "nest", tmp_path).end()
    assert code == 1 and "rank 1 ended with exit code 3" in errors
    pids = [(tmp_path / rank).read_text() for rank in "01"]
    wait_until(lambda: not any(map(is_alive, pids)))  # they have been killed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_all_and_decides_the_exit_code(tmp_path, number):
    job = Launched(tmp_path, "save")
    job.wait_until_said("waiting")
    job.process.send_signal(number)
    code, _, errors = job.end()
    assert (code, errors) == (128 + number, "")
    assert all("saved on signal 2" in job.log(rank) for rank in (0, 1))


SIGNALLED = """
import os, signal, sys
from loka_jax.launch import processes
from loka_jax.launch.__main__ import main

plain, signals = processes._start, [signal.SIGTERM]

def start(*arguments):
    child = plain(*arguments)
    while signals:
        os.kill(os.getpid(), signals.pop())
    return child

processes._start = start
sys.exit(main(sys.argv[1:]))
"""


def test_a_signal_while_processes_are_started_ends_all(tmp_path):
    options = ["--processes", "2", "--cpu-devices", "1", "--logs", str(tmp_path)]
    command = [sys.executable, "-c", SIGNALLED, *options, str(CHILD), "wait"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stderr) == (143, b"")


def test_a_second_signal_kills(tmp_path):
    job = Launched(tmp_path, "deaf")
    job.wait_until_said("waiting")
    job.process.send_signal(signal.SIGTERM)
    job.wait_until_said(f"heard {signal.SIGINT:d}")
    job.process.send_signal(signal.SIGTERM)
    assert job.end()[0] == 143
    # At once: not by a SIGTERM that comes first.
    assert not any(f"heard {signal.SIGTERM:d}" in job.log(rank) for rank in (0, 1))


def test_a_process_that_is_left_behind_by_a_stopped_job_is_killed(tmp_path):
    """In a job of which one stops when told to, and the other waits for ever."""
    program = """
import sys
from loka_jax.launch import __main__ as launch, supervisor

class Impatient(supervisor.Supervisor):
    def __init__(self, processes):
        super().__init__(processes, grace_s=0.5)

launch.Supervisor = Impatient
sys.exit(launch.main(sys.argv[1:]))
"""
    job = Launched(tmp_path, "late", start=("-c", program))
    job.wait_until_said("waiting")
    job.process.send_signal(signal.SIGTERM)
    code, _, errors = job.end()
    assert code == 143
    assert errors.startswith("error: rank 1 did not end with the others and had to be")


def test_processes_end_with_a_supervisor_that_is_killed(tmp_path):
    job = Launched(tmp_path, "deaf")
    job.wait_until_said("waiting")
    children = job.pids()
    assert len(children) == 2
    os.kill(job.process.pid, signal.SIGKILL)
    assert job.end()[0] == -signal.SIGKILL
    wait_until(lambda: not any(map(is_alive, children)))


@pytest.mark.parametrize(
    "codes, stopping, rank",
    [
        ((None, 0, None), False, None),
        ((-signal.SIGABRT, 1, -signal.SIGKILL), False, 2),
        ((-signal.SIGABRT, None, 1), False, 2),
        ((0, -signal.SIGABRT), False, 1),
        ((143, 130, None), False, None),  # saved on a signal to one of them
        ((-signal.SIGINT, -signal.SIGABRT), True, None),
        ((-signal.SIGINT, -signal.SIGSEGV), True, 1),
    ],
)
def test_the_process_to_blame_is_the_one_that_died_first(codes, stopping, rank):
    assert to_blame(codes, is_stopping=stopping) == rank


def test_more_processes_than_gpus_are_refused():
    with pytest.raises(ValueError, match="and 2 are visible: lower --processes"):
        require_devices(4, None, {"CUDA_VISIBLE_DEVICES": "0,1"})
    require_devices(4, None, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})


def test_a_folder_of_logs_that_cannot_be_made_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    options = ["--processes", "1", "--cpu-devices", "1", "--logs"]
    assert main([*options, str(tmp_path / "file" / "logs"), "x.py"]) == 2
    error = capsys.readouterr().err
    assert f"logs {tmp_path}/file" in error and "another --logs" in error


def test_launchers_share_no_folder_of_logs(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda _: False)  # as where both have looked
    first, second = (_new_folder(tmp_path / "runs") for _ in range(2))
    assert (first.name, second.name) == ("launch-1", "launch-2")
    assert first.is_dir() and second.is_dir()


def test_a_job_ends_though_its_output_is_no_longer_read(tmp_path):
    script, logs = tmp_path / "chat.py", tmp_path / "logs"
    script.write_text("for i in range(40_000): print('line', i)")
    options = ["--processes", "1", "--cpu-devices", "1", "--logs", str(logs)]
    job = subprocess.Popen(
        [sys.executable, "-m", "loka_jax.launch", *options, str(script)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert job.stdout is not None
    job.stdout.readline()
    job.stdout.close()
    assert job.wait(LIMIT_SECONDS) == 0
    assert (logs / "rank-0.log").read_text().endswith("line 39999\n")


def test_the_port_of_a_job_is_kept_for_those_who_share_it():
    with _reserved_port() as reserved:
        address = reserved.getsockname()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        with socket.socket() as own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            own.bind(address)
            own.listen()
            # What does not listen gets no connections.
            for _ in range(8):
                socket.create_connection(address, timeout=5).close()
                own.accept()[0].close()


def test_the_supervisor_imports_neither_jax_nor_numpy():
    heavy = "{'jax', 'numpy'}"
    code = f"import sys, loka_jax.launch.__main__; print({heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True)
    assert done.stdout == b"set()\n", done.stderr
