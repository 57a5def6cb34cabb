"""What is said of a job that failed: who, why, what is saved, and how to go on."""

import re
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path

from loka_jax.launch.processes import WORKDIR, Job
from loka_jax.launch.supervisor import End
from loka_jax.saved_format import CHECKPOINTS, steps_in

_MAX_LINE = 300
_MAX_TAIL = 1 << 14
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # of a progress bar


def ended_by(job: Job, end: End) -> str | None:
    """Returns a sentence on why a job failed and how to go on, or None.

    There is none for a job that was done or whose processes all stopped when told to,
    and none for an error that a user can mend of rank 0, whose own sentence has been
    shown.
    """
    if end.late:
        late = f"{_ranks(end.late)} did not end with the others and had to be killed"
        return f"{late}; {_how_to_go_on(job)}"
    if end.rank is None or (end.code == 2 and not end.rank):
        return None
    if end.code == 2:
        return _last_line(job.log(end.rank)).removeprefix("error: ") or None
    return f"{_who(job, end)}; {_how_to_go_on(job)}"


def _who(job: Job, end: End) -> str:
    log = job.log(end.rank or 0)
    what = f"rank {end.rank} {_cause(end.exit_code)} ({_said(end.exit_code, log)})"
    if not end.stuck:
        return what
    return f"{_ranks(end.stuck)} had been stopped (SIGSTOP), and {what}"


def _ranks(ranks: Sequence[int]) -> str:
    return " and ".join(f"rank {rank}" for rank in ranks)


def _said(code: int, log: Path) -> str:
    if code == -signal.SIGABRT:  # its last lines are addresses
        return f"as JAX does to a process that misses another one: see {log}"
    last = _last_line(log)
    return f"its last line in {log} is {last!r}" if last else f"{log} is empty"


def _cause(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-code}"


def _how_to_go_on(job: Job) -> str:
    workdir = _workdir(job)
    if workdir is None:
        return "it had not begun to train."
    saved = workdir / CHECKPOINTS
    step = max(steps_in(saved), default=None) if saved.is_dir() else None
    if step is None:
        return f"no checkpoint was saved yet in {workdir}: start it again."
    options = _launch_options(job)
    command = ["python", "-m", "loka_jax.launch", *options, job.command[0]]
    resume = shlex.join([*command, "--resume", "--workdir", str(workdir)])
    return f"the newest checkpoint is step {step}: go on with {resume}"


def _launch_options(job: Job) -> Sequence[str]:
    options = ["--processes", str(job.processes)]
    if job.cpu_devices is not None:
        options += ["--cpu-devices", str(job.cpu_devices)]
    return options


def _workdir(job: Job) -> Path | None:
    """Returns the folder that process 0 has named as that of its run, or None."""
    try:
        return Path((job.logs / WORKDIR).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _last_line(log: Path) -> str:
    """Returns the start of the last line in a log that is not blank; "" if none is."""
    with open(log, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - _MAX_TAIL, 0))
        text = file.read().decode(errors="replace")
    lines = re.split(r"[\r\n]+", _ESCAPES.sub("", text))
    kept = [line.strip() for line in lines if line.strip()]
    return kept[-1][:_MAX_LINE] if kept else ""
