"""The processes of a run: who they are, and what they agree on.

They are found, in this order, by torchrun's variables, which `loka_jax.launch` sets
too, or by those of a step of srun, which JAX reads itself. A process alone has none.
"""

import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax

from loka_jax.dispatch.processes import same_text
from loka_jax.launch.job import LOGS, WORKDIR

# A process that dies elsewhere ends this one, too, after so long without a sign.
_HEARTBEAT_SECONDS = 20
# The first process writes the report while the others wait for it.
_END_SECONDS = 3600
_FAILED = (1, 2)  # exit codes
_STDERR = 2


class Processes(NamedTuple):
    """This process among those of the run."""

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """True in the process that writes the files of the run, and prints."""
        return self.index == 0

    @property
    def shows(self) -> bool:
        """True if it may print: it is the first, or its output goes to its own log."""
        return self.is_first or LOGS in os.environ

    def same(self, text: str) -> str:
        """Returns the first process's text in all of them; all must call it."""
        if self.count == 1:
            return text
        return same_text(text)


ALONE = Processes()


def start() -> Processes:
    """Returns this process among those of the run, connected to the others.

    Raises:
        ValueError: if the variables of the environment do not fit.
    """
    arguments = connection()
    if arguments is None:
        return ALONE
    if not jax.distributed.is_initialized():
        jax.distributed.initialize(
            **arguments, heartbeat_timeout_seconds=_HEARTBEAT_SECONDS
        )
    return Processes(jax.process_index(), jax.process_count())


def connection() -> dict[str, Any] | None:
    """Returns the arguments of `jax.distributed.initialize`; None in a process alone.

    Raises:
        ValueError: if a variable is missing, or is no number.
    """
    if "WORLD_SIZE" not in os.environ:
        several = _number("SLURM_STEP_NUM_TASKS", "1") > 1
        return {} if several else None  # JAX reads them
    count = _number("WORLD_SIZE")
    if count == 1:
        return None
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    # The store of torchrun listens at the port itself.
    is_taken = "TORCHELASTIC_RUN_ID" in os.environ
    port = _number("MASTER_PORT") + is_taken
    arguments = {
        "coordinator_address": f"{address}:{port}",
        "num_processes": count,
        "process_id": _number("RANK"),
        "local_device_ids": [_number("LOCAL_RANK")],
    }
    if address == "127.0.0.1":  # JAX would listen on all networks
        arguments["coordinator_bind_address"] = f"{address}:{port}"
    return arguments


def hosts() -> int:
    """Returns over how many hosts the processes of the run are spread."""
    # Such as "4(x2)": four on each of two.
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    first = re.split(r"\D", tasks)[0]
    per_host = _number("LOCAL_WORLD_SIZE", first)
    return max(jax.process_count() // per_host, 1)


def _number(name: str, default: str | None = None) -> int:
    value = os.environ.get(name, default)
    if value is None or not value.isdecimal():
        raise ValueError(
            f"{name} is {value!r} in the environment, where a number is needed as "
            "WORLD_SIZE is set: start with python -m loka_jax.launch or torchrun, or "
            "unset WORLD_SIZE."
        )
    return int(value)


def leave(main: Callable[[], int]) -> NoReturn:
    """Ends the process with the exit code of `main`.

    Processes that have succeeded end together, and silently. One of several that has
    failed ends at once, without the wait for the others that JAX adds to an end: they
    wait for this one.
    """
    try:
        code = main()
        has_others = jax.distributed.is_initialized()
        if has_others and code not in _FAILED:
            _disconnect()
    except SystemExit as end:
        code = end.code
        if jax.distributed.is_initialized():
            _leave_at_once(code if isinstance(code, int) else 1)
        raise
    except BaseException:  # whatever it is, JAX would wait for the other processes
        if jax.distributed.is_initialized():
            traceback.print_exc()
            _leave_at_once(1)
        raise
    if has_others:
        _leave_at_once(code)
    sys.exit(code)


def _disconnect() -> None:
    """Disconnects from the other processes, all of which have succeeded.

    A thread of XLA's watches the coordinator for as long as anything refers to a GPU,
    and would write to stderr that it is gone. So nothing is written from here on, but
    that disconnecting has failed.
    """
    # Imported late: it takes long, and only several processes need it.
    from orbax.checkpoint import multihost

    wait = multihost.get_barrier_sync_fn(processes=set(range(jax.process_count())))
    wait(key="end", timeout_ms=1000 * _END_SECONDS)
    sys.stdout.flush()
    sys.stderr.flush()
    errors = os.dup(_STDERR)
    os.dup2(os.open(os.devnull, os.O_WRONLY), _STDERR)
    try:
        jax.distributed.shutdown()
    except BaseException:
        os.dup2(errors, _STDERR)
        raise


def _leave_at_once(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def tell_workdir(workdir: Path) -> None:
    """Tells the launcher, if there is one, the folder of the run."""
    if (logs := os.environ.get(LOGS)) is not None:
        (Path(logs) / WORKDIR).write_text(str(workdir), encoding="utf-8")
