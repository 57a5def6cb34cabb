"""Waits for the processes of a job, ends all when one fails, and says why it ended.

all end with 0           0
one dies or fails        SIGTERM to the others, 5 s, SIGKILL; 1 (2 if it said so)
Ctrl-C, SIGTERM          passed on, so that all save the same step; 130, 143
  before all have begun  as if one had failed; 130, 143
  one is left behind     a minute after another has ended, as if it had failed; 130, 143
a second signal          SIGKILL to all; 130, 143
"""

import math
import re
import shlex
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from loka_jax.launch.job import WORKDIR, Job
from loka_jax.saved_format import CHECKPOINTS, steps_in

_STOPPED = {128 + signal.SIGINT, 128 + signal.SIGTERM}  # by a signal, after saving
_USAGE = 2
_POLL_SECONDS = 0.05
# From the end of the first process of a stopped job to that of the last. All have saved
# the same step by then; one that misses another may wait for it for ever.
_GRACE_SECONDS = 60.0
_MAX_LINE = 300  # characters of a log's last line that are shown
_MAX_TAIL = 1 << 14
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # of a progress bar


class End(NamedTuple):
    """How a job ended.

    Attributes:
        rank: the process that failed first; None if none did.
        exit_code: of that process, minus the signal that killed it.
        stuck: the processes that were held by SIGSTOP then.
        late: those of a stopped job that had not ended with the others.
    """

    code: int
    rank: int | None = None
    exit_code: int = 0
    stuck: tuple[int, ...] = ()
    late: tuple[int, ...] = ()


class Supervisor:
    """Waits for the processes of a job; signals to this one are theirs."""

    def __init__(self, job: Job, grace_s: float = _GRACE_SECONDS):
        """Handles Ctrl-C and SIGTERM from now on, also while they are started."""
        self._job, self._grace_s = job, grace_s
        self._signal: int | None = None
        self._is_over = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def wait(self) -> End:
        """Returns how the job ended; what still runs then is to be ended."""
        first_end = math.inf
        while True:
            codes = self._job.exit_codes()
            worst = max(code or 0 for code in codes) if codes else 0
            stopped = worst if self._signal is None else 128 + self._signal
            if self._is_over:
                return End(stopped)
            is_stopping = self._signal is not None
            if (rank := to_blame(codes, is_stopping=is_stopping)) is not None:
                code = codes[rank] or 0
                stuck = tuple(self._job.stopped_ranks())
                return End(2 if code == _USAGE else 1, rank, code, stuck)
            if None not in codes:
                return End(stopped if any(codes) else 0)
            if is_stopping and any(code is not None for code in codes):
                first_end = min(first_end, now := time.monotonic())
                if now - first_end > self._grace_s:
                    late = tuple(rank for rank, x in enumerate(codes) if x is None)
                    return End(stopped, late=late)
            time.sleep(_POLL_SECONDS)

    def _on_signal(self, number: int, _frame: object) -> None:
        if self._signal is not None:
            self._is_over = True
            self._job.kill()
            return
        self._signal = number
        if not self._job.are_started():  # there is nothing to save
            self._is_over = True
            return
        # As Ctrl-C in any case: SIGTERM is JAX's own in a process of several.
        self._job.send(signal.SIGINT)


def to_blame(codes: Sequence[int | None], *, is_stopping: bool) -> int | None:
    """Returns the rank of the process that failed first, or None if none has failed.

    A process that was killed goes before others that failed: they failed for want of
    it. JAX aborts a process that misses another one, so an abort goes last.

    Args:
        is_stopping: a signal was passed on, so that it may have ended some.
    """
    fine = {0, None, *_STOPPED}
    if is_stopping:
        fine |= {-signal.SIGINT, -signal.SIGTERM, -signal.SIGABRT}

    def place(rank: int) -> int:
        code = codes[rank] or 0
        if code == -signal.SIGABRT:
            return 2
        return 0 if code < 0 else 1

    failed = [rank for rank, code in enumerate(codes) if code not in fine]
    return min(failed, key=place, default=None)


def describe_end(job: Job, end: End) -> str | None:
    """Returns a sentence on why a job failed and how to go on.

    None if it was done, if all processes stopped when they were told to, or if rank 0
    had an error that a user can mend: its own sentence has been shown.
    """
    if end.late:
        late = f"{_ranks(end.late)} did not end with the others and had to be killed"
        return f"{late}; {_how_to_go_on(job)}"
    if end.rank is None or (end.code == 2 and not end.rank):
        return None
    if end.code == 2:
        return _last_line(job.log(end.rank)).removeprefix("error: ") or None
    return f"{_failure(job, end)}; {_how_to_go_on(job)}"


def _failure(job: Job, end: End) -> str:
    log, code = job.log(end.rank or 0), end.exit_code
    if code == -signal.SIGABRT:  # its last lines are addresses
        trace = f"as JAX does to a process that misses another one: see {log}"
    else:
        last = _last_line(log)
        trace = f"its last line in {log} is {last!r}" if last else f"{log} is empty"
    names = {x.value: x.name for x in signal.Signals}  # a real-time signal has none
    name = names.get(-code, f"signal {-code}")
    cause = f"ended with exit code {code}" if code >= 0 else f"was killed by {name}"
    stuck = f"{_ranks(end.stuck)} had been stopped (SIGSTOP), and " * bool(end.stuck)
    return f"{stuck}rank {end.rank} {cause} ({trace})"


def _ranks(ranks: Sequence[int]) -> str:
    return " and ".join(f"rank {rank}" for rank in ranks)


def _how_to_go_on(job: Job) -> str:
    try:  # process 0 names the folder of its run
        workdir = Path((job.logs / WORKDIR).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "it had not begun to train."
    saved = workdir / CHECKPOINTS
    step = max(steps_in(saved), default=None) if saved.is_dir() else None
    if step is None:
        return f"no checkpoint was saved yet in {workdir}: start it again."
    command = ["python", "-m", "loka_jax.launch", "--processes", str(job.processes)]
    if job.cpu_devices is not None:
        command += ["--cpu-devices", str(job.cpu_devices)]
    command += [job.command[0], "--resume", "--workdir", str(workdir)]
    return f"the newest checkpoint is step {step}: go on with {shlex.join(command)}"


def _last_line(log: Path) -> str:
    """Returns the start of the last line in a log that is not blank; "" if none is."""
    with open(log, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - _MAX_TAIL, 0))
        text = file.read().decode(errors="replace")
    lines = re.split(r"[\r\n]+", _ESCAPES.sub("", text))
    kept = [line.strip() for line in lines if line.strip()]
    return kept[-1][:_MAX_LINE] if kept else ""
