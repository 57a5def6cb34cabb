"""A whole training session: from a configuration to a workdir with a report.

config -> check workdir -> build -> print data and sites -> restore or init -> loop
       -> final evaluation -> summary.json, report.html
"""

import contextlib
import os
import pathlib
import shlex
from typing import Any, NamedTuple

import jax
from rich.console import Console

from loka_jax import jsonfile
from loka_jax.commands import as_commands
from loka_jax.data import Position
from loka_jax.data.places import changes
from loka_jax.dispatch.plan import as_json
from loka_jax.measure.compiling import keep_compiled
from loka_jax.report.run_page import write_run_page
from loka_jax.saved_format import CHECKPOINTS
from loka_jax.train import next_day
from loka_jax.train.build import Run, build
from loka_jax.train.checkpoints.checkpoint import Checkpoints, require_space
from loka_jax.train.checkpoints.manifest import Saved
from loka_jax.train.config import Config
from loka_jax.train.first_order import (
    at_regression,
    is_clearly_better,
    starts_at_regression,
)
from loka_jax.train.folder.record import (
    BEST,
    PLAN,
    REPORT,
    SITES,
    SUMMARY,
    RunRecord,
    read_run,
)
from loka_jax.train.folder.source_run import SourceRun, keep_encoding, open_run
from loka_jax.train.folder.workdir import choose_workdir, workdir_of
from loka_jax.train.in_turn import build_in_turn
from loka_jax.train.logs import log_lines
from loka_jax.train.logs.printing import print_run
from loka_jax.train.logs.progress import TrainingProgress, resume_note
from loka_jax.train.logs.timing import Profiler
from loka_jax.train.logs.trackers import Trackers
from loka_jax.train.loop import Loop
from loka_jax.train.processes import group
from loka_jax.train.processes.group import ALONE, Processes
from loka_jax.train.processes.signals import stop_on_signals
from loka_jax.train.processes.watchdog import Watchdog
from loka_jax.train.state import TrainState
from loka_jax.train.summary import print_end, summarize
from loka_jax.train.watch.host_state import Progress, keep_start, restored

# Options in which a resumed run may differ from the stopped one.
_MAY_CHANGE = (
    "loop.steps_per_call",
    "loop.epochs",
    "loop.max_steps",
    "loop.log_every",
    "loop.save_every",
    "loop.keep_checkpoints",
    "loop.max_skipped_steps",
    "loop.on_divergence",
    "loop.on_alarm",
    *("calibrate", "metrics"),
    *("mesh", "collectives", "optim.rows_c"),  # c follows the groups of the mesh
    # Where the data lie; what they hold is compared with the checkpoint's.
    *("data.path", "data.train", "data.valid", "data.test", "data.cache"),
)


class Trained(NamedTuple):
    """The result of a session; all but the exit code are None if nothing was trained.

    The exit code is 0 when done, 130 or 143 when stopped by Ctrl-C or SIGTERM after
    saving. The state is that after the last step.
    """

    exit_code: int
    workdir: pathlib.Path | None = None
    run: Run | None = None
    state: TrainState | None = None


def train(
    config: Config,
    arguments: list[str],
    console: Console | None = None,
    *,
    script: str = "train.py",
) -> Trained:
    """Trains the run that `config` describes.

    Raises:
        ValueError: for an error that the user can mend, in one sentence.
        TrainingFailed: if training cannot continue.
        OSError: if a checkpoint or another file could not be written.
        SystemExit: with 130 or 143, if stopped before or after training.
    """
    console = console or standard_output()
    if config.run.print_config:
        console.print_json(data=config.identity())
        return Trained(0)
    processes = group.start()
    console.quiet |= not processes.shows
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals(processes.count))
        display = TrainingProgress(console, is_stopping=lambda: stop.is_set)
        stack.enter_context(display)
        with display.doing("looking for a GPU"):
            notice = device_notice(config.run.require_gpu)
        console.print(notice)
        keep_compiled()
        if config.run.dry_run:
            return Trained(_dry_run(config, console, display))
        workdir = workdir_of(config, processes)
        # Locked before the data are read, which can take long.
        with stop.postponed():  # whoever makes a folder must be able to remove it
            record = _open_record(config, workdir, processes, display)
            stack.enter_context(record)
        newest, best = _open_folders(stack, config, workdir, processes)
        with display.doing("checking the checkpoint"):
            start = _start_of(config, workdir, newest)
        run = _build(config, console, display, start, processes)
        loop = _open_loop(stack, run, start, record, (newest, best), display)
        if start is not None and not start.is_resumed:
            with display.doing("evaluating"):
                next_day.begin(loop, start, console)
        if processes.count > 1:
            stack.enter_context(Watchdog(config.run.watchdog))
        with stop.deferred():  # a run that is stopped before leaves nothing
            _begin_record(record, loop, start)
            if start is None and starts_at_regression(run):
                loop.evaluate()  # the start is the best state so far
            loop.train(stop)
            _say_left_out(run, display)
            if not stop.is_set:
                _settle(loop, display)
        record.write(SITES, [site.as_row() for site in loop.run.running_sites])
        with display.doing("evaluating"):
            summary = summarize(loop, stop, record)
        command = as_commands(
            shlex.join(["python", f"experiments/{script}", *arguments])
        )
        page = workdir / REPORT
        record.write(SUMMARY, summary | {"command": command})
        if processes.is_first:
            with display.doing("writing the report"):
                write_run_page(page, read_run(workdir))
        display.close()
        print_end(console, summary, page, loop.checkpoints.latest_step())
        return Trained(stop.exit_code, workdir, loop.run, loop.state)


def _say_left_out(run: Run, display: TrainingProgress):
    """Says how many events batches had no room for, if any."""
    if left_out := run.splits.left_out:
        display.say(
            f"{left_out:,} events were left out of histories, as batches had no room "
            "for them: raise --data.row-capacity."
        )


def standard_output() -> Console:
    """Returns a console on the standard output, with wide lines off a terminal.

    It prints text as it is: brackets in a path or a message are no markup.
    """
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 120
    return console


def device_notice(require_gpu: bool) -> str:
    """Returns a sentence that names the device.

    Raises:
        ValueError: if a GPU is required and there is none, or JAX_PLATFORMS names a
            platform that is not available.
    """
    try:
        device = jax.devices()[0]
    except (RuntimeError, AssertionError):  # the latter if a plugin is not installed
        platforms = os.environ.get("JAX_PLATFORMS")
        raise ValueError(
            f"JAX cannot run on JAX_PLATFORMS={platforms}: install the extra cuda13 "
            "(uv run --extra cuda13 ...) or unset JAX_PLATFORMS."
        ) from None
    if device.platform == "gpu":
        return f"Running on {device.device_kind}."
    if require_gpu:
        raise ValueError(
            f"--require-gpu was given, but JAX found only a {device.platform}: install "
            "the extra cuda13 (uv run --extra cuda13 ...) or leave the option out."
        )
    return "No GPU found: running on the CPU, where FP8 is emulated."


def _build(
    config: Config,
    console: Console,
    display: TrainingProgress,
    start: SourceRun | None,
    processes: Processes = ALONE,
) -> Run:
    """Builds the run from its start, and prints its data, sites and plan."""
    base = None if start is None else start.base()
    saved = _resumed(start)
    if saved is not None and config.probe.every is None and saved.has("probe"):
        probe = saved.meta["config"]["probe"]  # as its plan chose at the start
        config = config.observed(probe["begin"], tuple(probe["recipes"]))

    def build_run(plan: Any) -> Run:
        with display.doing("preparing data, model and plan"):
            run = build(config, plan, display.say, base)
        print_run(console, run)
        _require_steps_to_profile(run)
        return run

    plan = None if start is None else start.saved.meta.get("plan", {})
    run = build_in_turn(processes, build_run, plan)
    if saved is None:
        return run
    changed = jsonfile.explain_mismatch(saved.meta.get("data"), run.splits.identity)
    if changed:
        changed = [*changes(saved.meta.get("files", {}), run.splits.files), *changed]
        raise ValueError(
            f"the data differ from those of the checkpoint at step {saved.step} "
            f"({'; '.join(changed[:5])}): put the old data back, or train in another "
            "--workdir."
        )
    return run


def _start_of(
    config: Config, workdir: pathlib.Path, newest: Checkpoints
) -> SourceRun | None:
    """Returns the run to start from: itself at its newest checkpoint, or another."""
    saved = newest.newest() if config.run.resume else None
    if saved is None:
        return next_day.source_of(config)
    return SourceRun(workdir, config, newest, saved, is_resumed=True)


def _resumed(start: SourceRun | None) -> Saved | None:
    """Returns the checkpoint of a run that goes on itself; None for another start."""
    return start.saved if start is not None and start.is_resumed else None


def _require_steps_to_profile(run: Run):
    options = run.config.run
    if options.profile_steps().start >= run.total_steps:
        raise ValueError(
            f"--profile {options.profile} starts after the run's last step "
            f"{run.total_steps - 1}: start earlier."
        )


def _open_record(
    config: Config,
    workdir: pathlib.Path,
    processes: Processes,
    display: TrainingProgress,
) -> RunRecord:
    return RunRecord(
        workdir,
        config=config.identity(),
        resume=config.run.resume,
        may_change=_MAY_CHANGE,
        trackers=Trackers(config.run.track, display.say),
        writes=processes.is_first,
    )


def _open_folders(
    stack: contextlib.ExitStack,
    config: Config,
    workdir: pathlib.Path,
    processes: Processes,
) -> tuple[Checkpoints, Checkpoints]:
    """Returns the checkpoints of the newest steps, and that of the best evaluation."""
    keep = config.loop.keep_checkpoints
    newest = Checkpoints(workdir / CHECKPOINTS, keep=keep, processes=processes)
    best = Checkpoints(workdir / BEST, keep=1, processes=processes)
    for folder in (newest, best):
        stack.enter_context(folder)
        folder.remove_unfinished()  # of an interrupted save
    return newest, best


def _open_loop(
    stack: contextlib.ExitStack,
    run: Run,
    start: SourceRun | None,
    record: RunRecord,
    folders: tuple[Checkpoints, Checkpoints],
    display: TrainingProgress,
) -> Loop:
    """Returns the loop, at its checkpoint, or at step 0 of a run of its own."""
    config, (newest, best), saved = run.config, folders, _resumed(start)
    if saved is not None:
        with display.doing("reading the checkpoint"):
            run, state, progress = restored(newest, saved, run)
        display.say(resume_note(saved.step, run.total_steps, config.loop))
    else:
        progress = Progress(position=Position(0, 0, config.seed))
        with display.doing("initializing"):
            state = _initial_state(run, start)
        if config.run.resume:
            display.say("Nothing was saved yet: starting at step 0.")
    best.drop_after(progress.step)
    keeps_best = config.optim.plateau_patience is not None
    require_space(folders if keeps_best else [newest], state)
    display.begin(run.total_steps, progress.step)
    profiler = Profiler(config.run.profile_steps(), record.workdir / "profile")
    stack.callback(profiler.close)
    return Loop(
        run,
        state,
        progress,
        record=record,
        checkpoints=newest,
        best=best,
        display=display,
        profiler=profiler,
    )


def _initial_state(run: Run, start: SourceRun | None) -> TrainState:
    if start is not None:
        return next_day.initial_state(run, start)
    state = run.init()
    return at_regression(run, state) if starts_at_regression(run) else state


def _settle(loop: Loop, display: TrainingProgress):
    """Keeps the start at a regression unless the best state is clearly better."""
    run = loop.run
    keeps_best = run.config.optim.plateau_patience is not None
    began_there = run.config.init_from is None and starts_at_regression(run)
    if not (keeps_best and began_there):
        return
    with display.doing("comparing with the start"):
        best = loop.best_state()
        if not best.progress.step or is_clearly_better(best.run, best.state):
            return
        keep_start(loop.best, run, at_regression(run, run.init()))
    display.say(
        f"Step {best.progress.step:,} is not clearly better than the regression at the "
        "start, by the validation rows: that is kept."
    )


def _begin_record(record: RunRecord, loop: Loop, start: SourceRun | None):
    """Writes what a run knows of itself before its first step."""
    run, progress = loop.run, loop.progress
    is_new = _resumed(start) is None
    # A run that begins again has scored its day again.
    record.start(-1 if is_new else progress.step)
    if record.writes:
        keep_encoding(run.splits, record.workdir)
    if is_new and progress.days:
        record.log(log_lines.day(progress))
    record.write(SITES, [site.as_row() for site in run.running_sites])
    record.write(PLAN, as_json(run.plan))


def _dry_run(config: Config, console: Console, display: TrainingProgress) -> int:
    """Builds a run as it would begin or go on, and compiles a step."""
    if config.run.resume:
        start = open_run(choose_workdir(config), best=False)
        start = start._replace(is_resumed=True)
    else:
        start = next_day.source_of(config)
    run = _build(config, console, display, start)
    with display.doing("compiling"):
        state = jax.eval_shape(run.init)
        batch = run.read(run.splits.train, 0)
        step = run.train_step()
        memory = step.lower(state, batch).compile().memory_analysis()
    if memory is not None:
        held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        console.print(f"One step compiles; it holds {held / 2**20:,.0f} MiB.")
    console.print(f"{run.total_steps:,} steps would be taken.")
    return 0
