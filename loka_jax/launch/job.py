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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from loka_jax.commands import run_by_python
from loka_jax.options import require

LOGS = "LOKA_LOGS"  # names the folder of the logs to the processes
WORKDIR = "workdir"  # there: a file in which process 0 names the folder of its run
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
# A command of Linux's before another: the kernel kills that one with its parent.
_DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
# On Linux it goes on where one of its outputs is closed or full: rank 0 would wait for
# ever.
_COPY = ("tee", "-ip" if sys.platform == "linux" else "-i")


@dataclass(kw_only=True)
class Job:
    """A command and the processes that run it.

    Their output goes to their logs, and that of rank 0 to the standard output, too.

    Attributes:
        command: a Python script, or a command of `loka`, and its arguments.
        logs: the folder of their logs, which exists.
        cpu_devices: CPU devices of each process; None for one GPU each.
    """

    command: tuple[str, ...]
    processes: int
    logs: Path
    cpu_devices: int | None = None
    _children: list[subprocess.Popen] = field(default_factory=list, init=False)

    def log(self, rank: int) -> Path:
        """Returns the file with the output of a process."""
        return self.logs / f"rank-{rank}.log"

    @contextmanager
    def running(self) -> Iterator[None]:
        """Starts the processes; none is left after the block."""
        (self.logs / WORKDIR).unlink(missing_ok=True)
        with _reserved_port() as port, self._copied_output() as output:
            try:
                self._start(port.getsockname()[1], output)
                yield
            finally:
                self._end()

    def are_started(self) -> bool:
        """Returns whether all have been started."""
        return len(self._children) == self.processes

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

    def kill(self) -> None:
        """Kills all at once, also what they have started."""
        for child in self._children:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:  # nothing of it is left
                pass
            child.wait()

    def _end(self) -> None:
        """Ends all: SIGTERM, five seconds, SIGKILL, also to what they have started."""
        self.send(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while None in self.exit_codes() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.kill()

    @contextmanager
    def _copied_output(self) -> Iterator[int]:
        """Yields a file that is copied to the standard output and to rank 0's log."""
        # A terminal, if there is one, for a progress bar.
        ours, theirs = os.openpty() if sys.stdout.isatty() else os.pipe()
        command = [*_COPY, str(self.log(0))]
        copy = subprocess.Popen(
            command,
            stdin=ours,
            stderr=subprocess.DEVNULL,
            # A signal to all processes of a group is no reason to lose output.
            preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        )
        os.close(ours)
        try:
            yield theirs
        finally:
            copy.wait()

    def _start(self, port: int, output: int) -> None:
        guard = _DIE_WITH_PARENT if shutil.which(_DIE_WITH_PARENT[0]) else ()
        try:
            for rank in range(self.processes):
                with open(self.log(rank) if rank else os.devnull, "wb") as log:
                    child = subprocess.Popen(
                        [*guard, sys.executable, *run_by_python(self.command)],
                        stdin=subprocess.DEVNULL,
                        stdout=log if rank else output,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, **self._environment(rank, port)},
                        start_new_session=True,
                    )
                self._children.append(child)
        finally:
            os.close(output)

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        """Returns what a process finds in its environment, as torchrun names it."""
        own = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(self.processes),
            "LOCAL_WORLD_SIZE": str(self.processes),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            LOGS: str(self.logs.absolute()),
            "PYTHONUNBUFFERED": "1",  # a killed process leaves all that it has said
        }
        if sys.stdout.isatty():  # of which rank 0 gets a copy without a size
            size = shutil.get_terminal_size()
            own |= {"COLUMNS": str(size.columns), "LINES": str(size.lines)}
        if self.cpu_devices is not None:
            count = str(self.cpu_devices)
            own |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": count}
        return own


def require_devices(processes: int, cpu_devices: int | None) -> None:
    """Raises ValueError if so many processes cannot run here."""
    require(processes >= 1, "--processes", processes, "at least 1")
    if cpu_devices is not None:
        require(cpu_devices >= 1, "--cpu-devices", cpu_devices, "at least 1")
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    else:
        gpus = sum(bool(name.strip()) for name in visible.split(","))
    if gpus < processes:
        raise ValueError(
            f"--processes {processes} need as many GPUs, and {gpus} are visible: "
            "lower --processes, check CUDA_VISIBLE_DEVICES, or set --cpu-devices."
        )


def _is_stopped(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has ended, or this is not Linux
        return False
    return status.rpartition(")")[2].split()[0] in ("T", "t")


def _reserved_port() -> socket.socket:
    """Returns a socket that keeps a free port for JAX's coordinator, and from others.

    It does not listen. The coordinator shares the port, as gRPC's servers do.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved
