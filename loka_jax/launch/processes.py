"""The processes of a job: started with their rank, ended to the last one.

Each leads a session of its own, so that Ctrl-C reaches it through the supervisor only,
and so that the processes that it has started end with it.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from loka_jax.commands import run_by_python
from loka_jax.options import require

LOGS = "LOKA_LOGS"  # names the folder of the logs to the processes
WORKDIR = "workdir"  # there: a file in which process 0 names the folder of its run
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
# A command of Linux's before another: the kernel kills that one with its parent.
_DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command and the processes that run it.

    Attributes:
        command: a Python script, or a command of `loka`, and its arguments.
        logs: the folder of their logs, which exists.
        cpu_devices: CPU devices of each process; None for one GPU each.
    """

    command: tuple[str, ...]
    processes: int
    logs: Path
    cpu_devices: int | None = None

    def log(self, rank: int) -> Path:
        """Returns the file with the output of a process."""
        return self.logs / f"rank-{rank}.log"


def require_devices(
    processes: int, cpu_devices: int | None, environment: Mapping[str, str]
) -> None:
    """Raises ValueError if so many processes cannot run here."""
    require(processes >= 1, "--processes", processes, "at least 1")
    if cpu_devices is not None:
        require(cpu_devices >= 1, "--cpu-devices", cpu_devices, "at least 1")
        return
    gpus = _num_gpus(environment)
    if gpus < processes:
        raise ValueError(
            f"--processes {processes} need as many GPUs, and {gpus} are visible: "
            "lower --processes, check CUDA_VISIBLE_DEVICES, or set --cpu-devices."
        )


def environment_of(
    job: Job, rank: int, port: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """Returns the environment of a process, with the variables that torchrun sets."""
    own = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(job.processes),
        "LOCAL_WORLD_SIZE": str(job.processes),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        LOGS: str(job.logs.absolute()),
        "PYTHONUNBUFFERED": "1",  # a killed process leaves all that it has said
    }
    if sys.stdout.isatty():  # of which rank 0 gets a copy without a size
        size = shutil.get_terminal_size()
        own |= {"COLUMNS": str(size.columns), "LINES": str(size.lines)}
    if job.cpu_devices is not None:
        own |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(job.cpu_devices)}
    return {**environment, **own}


class Processes:
    """The processes of a job, by rank, which run within a `with` statement.

    Their output goes to their logs, and that of rank 0 to the standard output, too.
    """

    def __init__(self, job: Job):
        self.job = job
        self._children: list[subprocess.Popen] = []
        self._copy: threading.Thread | None = None
        self._port: socket.socket | None = None

    def __enter__(self) -> "Processes":
        (self.job.logs / WORKDIR).unlink(missing_ok=True)
        try:
            self._start_all()
        except BaseException:  # whatever it is must leave no process behind
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def are_started(self) -> bool:
        """Returns whether all have been started."""
        return len(self._children) == self.job.processes

    def exit_codes(self) -> list[int | None]:
        """Returns the exit code of each process, minus the signal that killed it.

        None for those that run.
        """
        return [child.poll() for child in self._children]

    def send(self, number: int) -> None:
        """Sends a signal to those that run."""
        for child in self._children:
            child.send_signal(number)

    def stopped_ranks(self) -> list[int]:
        """Returns the ranks that SIGSTOP or a debugger holds."""
        return [rank for rank, c in enumerate(self._children) if _is_stopped(c.pid)]

    def end(self) -> None:
        """Ends all: SIGTERM, five seconds, SIGKILL, also to what they have started."""
        self.send(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while None in self.exit_codes() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.kill()

    def kill(self) -> None:
        """Kills all at once, also what they have started."""
        for child in self._children:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:  # nothing of it is left
                pass
            child.wait()
        if self._copy is not None:
            self._copy.join()
        if self._port is not None:
            self._port.close()

    def _start_all(self) -> None:
        self._port = _reserved_port()
        port = self._port.getsockname()[1]
        # A terminal, if there is one, for a progress bar.
        ours, theirs = os.openpty() if sys.stdout.isatty() else os.pipe()
        try:
            for rank in range(self.job.processes):
                environment = environment_of(self.job, rank, port, os.environ)
                with open(self.job.log(rank), "wb") as log:
                    output = log.fileno() if rank else theirs
                    self._children.append(_start(self.job.command, environment, output))
        finally:
            os.close(theirs)
            self._copy = threading.Thread(
                target=_copy_output, args=(ours, self.job.log(0)), daemon=True
            )
            self._copy.start()


def _start(
    command: Sequence[str], environment: Mapping[str, str], output: int
) -> subprocess.Popen:
    """Starts a process that leads its own session."""
    guard = _DIE_WITH_PARENT if shutil.which(_DIE_WITH_PARENT[0]) else ()
    return subprocess.Popen(
        [*guard, sys.executable, *run_by_python(command)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )


def _copy_output(source: int, log: Path) -> None:
    """Copies what a process writes to the standard output and to its log.

    It reads on where one of them is closed or full: the process would wait for ever.
    """
    with open(log, "wb", buffering=0) as file:
        sinks = [file, sys.stdout.buffer]
        while True:
            try:
                content = os.read(source, 1 << 16)
            except OSError:  # a terminal ends so
                content = b""
            if not content:
                break
            sinks = [sink for sink in sinks if _write(sink, content)]
    os.close(source)


def _write(sink: IO[bytes], content: bytes) -> bool:
    """Returns whether the content could be written."""
    try:
        sink.write(content)
        sink.flush()
    except OSError:  # a closed pipe, or a full disk
        return False
    return True


def _is_stopped(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has ended, or this is not Linux
        return False
    return status.rpartition(")")[2].split()[0] in ("T", "t")


def _num_gpus(environment: Mapping[str, str]) -> int:
    """Returns the number of GPUs that a process may see."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return sum(bool(name.strip()) for name in visible.split(","))
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _reserved_port() -> socket.socket:
    """Returns a socket that keeps a free port for JAX's coordinator, and from others.

    It does not listen. The coordinator shares the port, as gRPC's servers do.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved
