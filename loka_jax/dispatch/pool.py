"""Hands jobs to worker processes, so that a crash costs one candidate only.

Several workers lower and compile at a time, which is most of the work; they take times
one after another, while no worker compiles. A worker takes jobs from a connection and
answers with their measurements; it says when it waits for its turn on the GPU, and when
it has it.
"""

import contextlib
import fcntl
import math
import multiprocessing
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from multiprocessing.connection import Connection

import jax

from loka_jax.dispatch.measuring import ALONE, Job, bytes_needed, measure_site
from loka_jax.dispatch.table import Entry

_POLL_S = 0.5  # between looks whether to end
_TIMEOUT_S = 600.0  # of silence, not counting waits for a turn
_MEM_FRACTION = 0.75  # of a GPU's memory, which JAX may take
_USED = 0.95  # of it, by all processes together
_CONTEXT = 1 << 30  # bytes of a process beside its arrays, with room: not measured
# Not by multiprocessing, whose processes import the main module, a script of the user.
_SERVE = "from loka_jax.dispatch.pool import serve; serve({}, {!r})"
_WAITS, _HAS = "waits", "has"  # of a worker and its turn


def measure_all(
    jobs: Iterable[Job | None],
    workers: int,
    say: Callable[[str], None],
    *,
    seconds: float | None = None,
    turns: "Turns | None" = None,
) -> Iterator[tuple[Job, Entry]]:
    """Yields jobs and their measurements, in the order in which they finish.

    Args:
        jobs: asked for the next one when a process is idle, after what finished was
            yielded, so that it may depend on that; None if there is none for now.
        workers: processes, see `fitting`.
        say: takes a line on each job, and on each failure.
        seconds: after which the processes are ended, without the jobs that are left.
        turns: of these processes; None for turns of their own.

    Raises:
        Over: once `turns` are over; the processes are ended.
    """
    turns = Turns() if turns is None else turns
    jobs = iter(jobs)
    until = math.inf if seconds is None else time.monotonic() + seconds
    running: set[futures.Future] = set()
    # Threads wait for processes; each keeps one from job to job.
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(futures.ThreadPoolExecutor(workers))
        idle: queue.Queue[Worker] = queue.Queue()
        for _ in range(workers):
            idle.put(stack.enter_context(Worker(say, turns.folder)))

        def measure(job: Job) -> tuple[Job, Entry]:
            worker = idle.get()
            try:
                say(str(job))
                return job, worker.measure(job)
            finally:
                idle.put(worker)

        while True:
            while len(running) < workers and (job := next(jobs, None)) is not None:
                running.add(pool.submit(measure, job))
            left = min(until - time.monotonic(), _POLL_S)
            done, running = futures.wait(running, left, futures.FIRST_COMPLETED)
            if turns.are_over.is_set():
                raise Over
            for future in done:
                yield future.result()
            if not done and (not running or time.monotonic() >= until):
                return  # all jobs are done, or the budget is spent


def fitting(workers: int, jobs: Sequence[Job]) -> int:
    """Returns how many processes have the memory for any of the jobs at a time."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats or not jobs:
        return workers
    fraction = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", _MEM_FRACTION))
    held = stats.get("pool_bytes", stats["bytes_limit"])
    left = _USED * stats["bytes_limit"] / fraction - held
    each = max(map(bytes_needed, jobs)) + _CONTEXT
    return max(1, min(workers, int(left // each)))


class Over(SystemExit):
    """Ends a thread, without a word, whose results have become useless."""


class Turns:
    """Turns of several processes on the GPU, see `gpu_turn`.

    Attributes:
        folder: of the files.
        are_over: set to end who has or wants one.
    """

    def __init__(self):
        """Makes a folder, which lasts as long as the object."""
        self.folder = tempfile.mkdtemp()
        self.are_over = threading.Event()
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)


@contextlib.contextmanager
def gpu_turn(folder: str, kind: str) -> Iterator[None]:
    """Waits for a turn on the GPU, and holds it, but no longer than the process lives.

    A turn alone takes precedence. No shared turn begins while a process waits for, or
    has, a turn alone: it would keep all that wait to take times waiting for one more
    compilation.

    Turns are locks of two files in `folder`.
    """
    with (
        open(os.path.join(folder, "alone"), "ab") as alone,
        open(os.path.join(folder, "gpu"), "ab") as gpu,
    ):
        if kind == ALONE:
            fcntl.flock(alone, fcntl.LOCK_SH)
            fcntl.flock(gpu, fcntl.LOCK_EX)
        else:
            fcntl.flock(alone, fcntl.LOCK_EX)
            fcntl.flock(gpu, fcntl.LOCK_SH)
            fcntl.flock(alone, fcntl.LOCK_UN)
        yield


class Worker:
    """A worker process, started when it is needed; a context manager.

    One thread measures; another may end it meanwhile.
    """

    def __init__(
        self, say: Callable[[str], None], folder: str, *, timeout_s: float = _TIMEOUT_S
    ):
        """Makes a worker that reports failures to `say`, with turns by `folder`."""
        self._say = say
        self._folder = folder
        self._timeout_s = timeout_s
        self._process: subprocess.Popen | None = None
        self._connection: Connection | None = None
        self._starts_or_stops = threading.Lock()
        self._is_closed = False

    def __enter__(self) -> "Worker":
        """Returns itself."""
        return self

    def __exit__(self, *error):
        """Ends the worker; a measurement under way raises."""
        self._is_closed = True
        self._stop()

    def measure(self, job: Job) -> Entry:
        """Returns the measurements; a candidate that ended the worker is a failure."""
        connection, limit = self._started(), self._timeout_s
        # A worker that ended, or was ended, closes its side.
        with contextlib.suppress(EOFError, OSError):
            connection.send(job._replace(stats=jax.device_get(job.stats)))
            while connection.poll(limit):
                message = connection.recv()
                if isinstance(message, Entry):
                    return message
                limit = None if message == _WAITS else self._timeout_s
        self._stop()
        # A worker that was ended on purpose has no faulty candidate.
        self._require_open()
        why = "ended the process that ran it"
        self._say(f"{job} {why}")
        return Entry(failures={} if job.choice is None else {job.choice.name: why})

    def _started(self) -> Connection:
        with self._starts_or_stops:
            self._require_open()
            if self._connection is not None and self._process is not None:
                if self._process.poll() is None:
                    return self._connection
            self._connection, its = multiprocessing.Pipe()
            with its:
                self._process = subprocess.Popen(
                    (sys.executable, "-c", _SERVE.format(its.fileno(), self._folder)),
                    pass_fds=[its.fileno()],
                    # Ctrl-C is for the parent; a candidate would be blamed for it.
                    process_group=0,
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what libraries print goes to the error output
                    # Beside a parent that may hold most of the GPU's memory already.
                    env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
                )
            return self._connection

    def _stop(self):
        with self._starts_or_stops:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._process = None

    def _require_open(self):
        if self._is_closed:
            raise RuntimeError("the worker was ended.")


def serve(handle: int, folder: str):
    """Measures jobs in a worker process until its parent ends, which ends it, too."""
    parent = Connection(handle)

    @contextlib.contextmanager
    def turn(kind: str) -> Iterator[None]:
        parent.send(_WAITS)
        with gpu_turn(folder, kind):
            parent.send(_HAS)
            yield

    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            parent.send(measure_site(parent.recv(), turn))
