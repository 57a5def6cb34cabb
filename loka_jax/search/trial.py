"""Trials: the training loop for a few log lines, in a process that may die.

    python -m loka_jax.search.trial FOLDER A.json B.json     a line of JSON for each

The process trains each configuration without evaluations, checkpoints and Probe, until
the lines suffice, and ends at the first that fails. Its parent knows how it ended, ends
what hangs, and begins another process with the rest. Programs are shared by a process's
trials, and by all processes in JAX's folder of compiled programs. Of several processes
on one GPU one at a time trains for its rates, or has kernels timed for its plan, while
no other builds or compiles: they take turns by locks in FOLDER; '' without any.
"""

import contextlib
import dataclasses
import gc
import io
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console

from loka_jax import jsonfile
from loka_jax.data import Position
from loka_jax.dispatch.measuring import ALONE, TOGETHER
from loka_jax.dispatch.pool import gpu_turn
from loka_jax.measure.compiling import keep_compiled
from loka_jax.search.history import Outcome
from loka_jax.terminal import clip, one_line
from loka_jax.train.build import Run, build
from loka_jax.train.checkpoints.checkpoint import Checkpoints
from loka_jax.train.config import Config
from loka_jax.train.folder.config_file import read_config
from loka_jax.train.folder.record import METRICS, RunRecord
from loka_jax.train.logs.progress import TrainingProgress
from loka_jax.train.logs.timing import Profiler
from loka_jax.train.loop import Loop
from loka_jax.train.plan_files import OFF
from loka_jax.train.processes.signals import StopRequest
from loka_jax.train.watch.host_state import Progress

PROGRAM = (sys.executable, "-m", "loka_jax.search.trial")
_LINE_US, _LEAST_STEPS = 250e3, 8  # of a line of a slow configuration
_LEAST_RATES, _LEAST_SECONDS, _MOST_RATES = 5, 1.0, 100
_WARM = 2  # lines: batches were made ahead of the first, the second waited for a turn
_STEPS, _NEVER = 1_000_000, 2**31 - 1
_KEPT_OUTPUT = 2000  # characters of the end of what a process printed


class _Enough(Exception):
    """The lines of a trial suffice."""


class _Lines(RunRecord):
    """A record that writes nothing, and keeps the rates of log lines.

    Attributes:
        begin: called at the first rate, before those that count.
    """

    def __init__(self, begin: Callable[[], Any]):
        super().__init__("", config={}, writes=False)
        self.rates: list[float] = []
        self.begin = begin
        self._seconds: list[float] = []

    def log(self, line: Mapping[str, Any], name: str = METRICS) -> None:
        """Takes a line; raises _Enough, also at the end of a stream's data."""
        if line.get("kind") == "eval":
            raise _Enough
        if (rate := line.get("examples_per_second")) is None:
            return
        self.rates.append(rate)
        if len(self.rates) < _WARM:
            return self.begin()
        self._seconds.append(line["seconds"])
        count, long = len(self.rates) - _WARM, self._seconds[-1] - self._seconds[0]
        if count >= _MOST_RATES or (count >= _LEAST_RATES and long >= _LEAST_SECONDS):
            raise _Enough


def as_trial(config: Config) -> Config:
    """Returns a run that does nothing but train, and never ends by itself."""
    epochs = 1 if config.data.stream else _STEPS
    loop = dataclasses.replace(
        config.loop,
        epochs=epochs,
        max_steps=_STEPS,
        eval_every=_NEVER,
        save_every=_NEVER,
        on_divergence="stop",
    )
    probe = dataclasses.replace(config.probe, every=0)
    optim = dataclasses.replace(config.optim, plateau_patience=None)
    return dataclasses.replace(config, loop=loop, probe=probe, optim=optim)


def paced(config: Config, step_us: float) -> Config:
    """Returns a configuration whose log lines a trial can wait for.

    Lines are those of the user, or of fewer steps where they would take long: of slow
    steps a few are as exact, and what a line costs is little beside them.

    Args:
        step_us: predicted microseconds of a step.
    """
    loop, few = config.loop, max(_LEAST_STEPS, config.loop.steps_per_call)
    while few < loop.log_every and 2 * few * step_us <= _LINE_US:
        few *= 2
    loop = dataclasses.replace(loop, log_every=min(few, loop.log_every))
    return dataclasses.replace(config, loop=loop)


def rates_of(config: Config, turns: str = "") -> list[float]:
    """Returns the examples per second between log lines, without the first ones."""
    with contextlib.ExitStack() as turn:

        def take(kind: str) -> None:
            turn.close()
            if turns:
                turn.enter_context(gpu_turn(turns, kind))

        take(TOGETHER if config.plan == OFF else ALONE)  # a plan may time kernels
        run = build(as_trial(config), None, lambda _: None)
        take(TOGETHER)
        return _rates(run, lambda: take(ALONE))


def _rates(run: Run, begin: Callable[[], Any]) -> list[float]:
    config = run.config
    lines, progress = _Lines(begin), Progress(position=Position(0, 0, config.seed))
    display = TrainingProgress(Console(file=io.StringIO()))
    display.begin(run.total_steps, 0)
    with tempfile.TemporaryDirectory() as folder:  # which stays empty
        with Checkpoints(folder, keep=1) as checkpoints:
            loop = Loop(
                run,
                run.init(),
                progress,
                record=lines,
                checkpoints=checkpoints,
                best=checkpoints,
                display=display,
                profiler=Profiler(range(0), pathlib.Path(folder)),
            )
            with contextlib.suppress(_Enough):
                loop.train(StopRequest())
    return lines.rates[_WARM:]


def measured(
    configs: Sequence[Config],
    seconds: float,
    together: int = 1,
    environment: Mapping[str, str] | None = None,
    turns: str = "",
) -> Generator[Outcome]:
    """Yields what comes of each configuration, in their order.

    Args:
        seconds: after which a trial without a result is ended.
        together: trials of a process.
        environment: variables of the processes, beside those of this one.
        turns: a folder of locks, by which processes take turns on a GPU; '' for one
            process at a time.
    """
    variables = os.environ | (environment or {})
    with tempfile.TemporaryDirectory() as folder:
        files = [pathlib.Path(folder) / f"{i}.json" for i in range(len(configs))]
        for file, config in zip(files, configs, strict=True):
            jsonfile.write(file, config.identity())
        while files:
            arguments = [turns, *map(str, files[:together])]
            for outcome in _of_process(arguments, seconds, variables):
                yield outcome
                del files[0]


def _of_process(
    arguments: Sequence[str], seconds: float, variables: Mapping[str, str]
) -> Iterator[Outcome]:
    """Yields the outcomes of a process, until one of them is not ok."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        child = subprocess.Popen(
            [*PROGRAM, *arguments],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,
        )

        def pass_on() -> None:
            assert child.stdout is not None
            for line in child.stdout:
                lines.put(line)
            lines.put(None)

        reader = threading.Thread(target=pass_on, daemon=True)
        reader.start()
        try:
            for _ in arguments[1:]:
                begun = time.monotonic()
                outcome = _next(lines, seconds, child, said)
                took = round(time.monotonic() - begun, 1)
                yield dataclasses.replace(outcome, seconds=took)
                if outcome.status != "ok":
                    return
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            reader.join()
            assert child.stdout is not None
            child.stdout.close()
            child.wait()


def _next(
    lines: "queue.SimpleQueue[str | None]",
    seconds: float,
    child: subprocess.Popen,
    said: Any,
) -> Outcome:
    try:
        line = lines.get(timeout=seconds)
    except queue.Empty:
        return Outcome(status="hang", why=f"no result within {seconds:g} seconds")
    if line is not None:
        return jsonfile.typed(json.loads(line), Outcome)
    code = child.wait()
    if code == -signal.SIGKILL:
        return Outcome(status="killed", why="another process, or the system, killed it")
    said.seek(0, os.SEEK_END)
    said.seek(max(said.tell() - _KEPT_OUTPUT, 0))
    last = [text for text in said.read().splitlines() if text.strip()]
    why = f"it ended with code {code}: {clip(last[-1] if last else 'no word', 300)}"
    return Outcome(status="crash", why=why)


def outcome_of(config: Config, turns: str = "") -> Outcome:
    """Returns what comes of a configuration in this process, if that survives."""
    try:
        rates = rates_of(config, turns)
    except Exception as error:  # a compiler may raise any kind
        no_memory = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
        status = "memory" if no_memory else "crash"
        return Outcome(status=status, why=one_line(error))
    if not rates:
        return Outcome(status="crash", why="the data end before two lines were logged")
    return Outcome(status="ok", rates=tuple(round(rate, 1) for rate in rates))


def main(turns: str, *files: str) -> int:
    """Prints an outcome for each file, and ends after one that is not ok."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no outcome
    keep_compiled()
    for file in files:
        outcome = outcome_of(read_config(pathlib.Path(file)), turns)
        print(jsonfile.dumps(dataclasses.asdict(outcome)), file=out, flush=True)
        if outcome.status != "ok":
            break
        jax.clear_caches()
        gc.collect()
    return 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # threads may still compile what no trial needs
