"""A whole training session: from a configuration to a workdir with a report.

config -> check workdir -> build -> print data and sites -> restore or init -> loop
       -> final evaluation -> summary.json, report.html
"""

import contextlib
import dataclasses
import functools
import pathlib
import shlex
from typing import Any, NamedTuple

import jax
from rich.console import Console

from loka_jax import jsonfile
from loka_jax.commands import as_commands
from loka_jax.data import Position
from loka_jax.data.shards import ShardFolder
from loka_jax.report import write_run_page
from loka_jax.saved_format import CHECKPOINTS
from loka_jax.train import next_day
from loka_jax.train.build import Run, build, build_in_turn
from loka_jax.train.checkpoints.checkpoint import Checkpoints, require_space
from loka_jax.train.checkpoints.manifest import Saved
from loka_jax.train.checkpoints.row_layout import read_state
from loka_jax.train.config import LOOK_EVERY, Config
from loka_jax.train.folder.record import BEST, RunRecord, SilentRecord, read_run
from loka_jax.train.folder.source_run import SourceRun, keep_encoding, open_run
from loka_jax.train.folder.workdir import choose_workdir, workdir_of
from loka_jax.train.logs import log_lines
from loka_jax.train.logs.column_table import print_columns
from loka_jax.train.logs.device_notice import device_notice
from loka_jax.train.logs.profiler import Profiler
from loka_jax.train.logs.progress import (
    TrainingProgress,
    print_data,
    print_plan,
    print_sites,
    resume_note,
)
from loka_jax.train.loop import Loop
from loka_jax.train.mesh.devices import used_devices
from loka_jax.train.planner.mesh_plan import host_note
from loka_jax.train.planner.mesh_workload import workload_of
from loka_jax.train.planner.step_sizes import Mesh
from loka_jax.train.processes.group import Processes, start
from loka_jax.train.processes.signals import stop_on_signals
from loka_jax.train.processes.watchdog import Watchdog
from loka_jax.train.state import TrainState
from loka_jax.train.summary import print_end, summarize
from loka_jax.train.watch.host_state import Progress

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
    *("mesh", "collectives", "optim.rows_c"),  # c follows the groups of the mesh
    # Where the data lie; what they hold is compared with the checkpoint's.
    *("data.path", "data.valid", "data.test", "data.cache"),
)


class Trained(NamedTuple):
    """The result of a session; all but the exit code are None if nothing was trained.

    Attributes:
        exit_code: 0 when done, 130 or 143 when stopped by Ctrl-C or SIGTERM after
            saving.
        workdir: the folder of the run's files.
        run: the trained run.
        state: the state after the last step.
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

    Args:
        console: where to print; the standard output if None.
        script: name of the script in experiments/, for the record.

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
    processes = start()
    console.quiet |= not processes.shows
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals(processes.count))
        display = TrainingProgress(console, is_stopping=lambda: stop.is_set)
        stack.enter_context(display)
        with display.doing("looking for a GPU"):
            notice = device_notice(config.run.require_gpu)
        console.print(notice)
        if config.run.dry_run:
            return Trained(_dry_run(config, console, display))
        workdir = workdir_of(config, processes)
        # Locked before the data are read, which can take long.
        with stop.postponed():  # whoever makes a folder must be able to remove it
            record = stack.enter_context(_record(config, workdir, processes))
        folders = _open_folders(stack, config, workdir, processes)
        with display.doing("checking the checkpoint"):
            saved = folders.newest.newest() if config.run.resume else None
            source = next_day.source_of(config) if saved is None else None
        config = _observed_as(saved, config)
        base = next_day.base_of(saved, source, workdir)
        build_run = functools.partial(_build, config, console, display, base=base)
        run = build_in_turn(processes, build_run, _plan_of(saved or source))
        _require_same_data(saved, run)
        loop = _open_loop(stack, run, saved or source, record, folders, display)
        if source is not None:
            with display.doing("evaluating"):
                next_day.begin(loop, source, console)
        if processes.count > 1:
            stack.enter_context(Watchdog(config.run.watchdog))
        with stop.deferred():  # a run that is stopped before leaves nothing
            _begin_record(record, loop, is_new=saved is None)
            loop.train(stop)
        record.write_sites([site.as_row() for site in loop.run.running_sites])
        with display.doing("evaluating"):
            summary = summarize(loop, stop, record)
        command = as_commands(
            shlex.join(["python", f"experiments/{script}", *arguments])
        )
        page = workdir / "report.html"
        record.write_summary(summary | {"command": command})
        if processes.is_first:
            with display.doing("writing the report"):
                write_run_page(page, read_run(workdir))
        display.close()
        print_end(console, summary, page, loop.saved_step())
        return Trained(stop.exit_code, workdir, loop.run, loop.state)


def standard_output() -> Console:
    """Returns a console on the standard output, with wide lines off a terminal.

    It prints text as it is: brackets in a path or a message are no markup.
    """
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 120
    return console


def _build(
    config: Config,
    console: Console,
    display: TrainingProgress,
    plan: Any = None,
    base: ShardFolder | None = None,
) -> Run:
    """Builds the run, with a checkpoint's plan, and prints its data, sites and plan."""
    with display.doing("preparing data, model and plan"):
        run = build(config, plan, display.say, base)
    print_data(console, run.splits.report)
    schema = run.splits.train.schema
    dims = config.embedding.dims_of(schema.fields, schema.owners)
    print_columns(console, run.splits.report, dims)
    if run.placement.size > 1:
        console.print(used_devices(*run.placement.shape))
    print_sites(console, run.running_sites)
    print_plan(console, run.plan, run.plan_notes)
    if note := _host_note(run):
        console.print(note)
    if config.run.profile_steps().start >= run.total_steps:
        raise ValueError(
            f"--profile {config.run.profile} starts after the run's last step "
            f"{run.total_steps - 1}: start earlier."
        )
    return run


def _host_note(run: Run) -> str | None:
    """Returns what several steps a call may save of a run over several GPUs."""
    config, placement = run.config, run.placement
    is_on_gpus = placement.size > 1 and jax.default_backend() == "gpu"
    if not is_on_gpus or config.mesh.sync_every > 1:
        return None
    size = config.loop.batch_size // placement.size
    workload = workload_of(config, run.splits.train.schema, size)
    return host_note(workload, Mesh(*placement.shape), run.total_steps)


def _plan_of(start: Saved | SourceRun | None) -> Any:
    """Returns the plan of a checkpoint as JSON values, None without one."""
    saved = start.saved if isinstance(start, SourceRun) else start
    return None if saved is None else saved.meta.get("plan", {})


def _observed_as(saved: Saved | None, config: Config) -> Config:
    """Returns the configuration of a run that Probe goes on to observe, or not.

    Args:
        saved: the checkpoint to go on from; None leaves the choice to the plan.
    """
    if saved is None or config.probe.every is not None:
        return config
    every = LOOK_EVERY if saved.has("probe") else None
    probe = dataclasses.replace(config.probe, every=every)
    return dataclasses.replace(config, probe=probe)


def _require_same_data(saved: Saved | None, run: Run):
    """Raises ValueError if a checkpoint was trained on other data than the run's."""
    if saved is None:
        return
    changed = jsonfile.explain_mismatch(saved.meta.get("data"), run.splits.identity)
    if changed:
        raise ValueError(
            f"the data differ from those of the checkpoint at step {saved.step} "
            f"({'; '.join(changed[:5])}): put the old data back, or train in another "
            "--workdir."
        )


def _record(config: Config, workdir: pathlib.Path, processes: Processes) -> RunRecord:
    if not processes.is_first:
        return SilentRecord(workdir)
    return RunRecord(
        workdir,
        config=config.identity(),
        resume=config.run.resume,
        may_change=_MAY_CHANGE,
        tensorboard=config.run.tensorboard,
    )


class _Folders(NamedTuple):
    """The checkpoints of the newest steps, and that of the best evaluation."""

    newest: Checkpoints
    best: Checkpoints


def _open_folders(
    stack: contextlib.ExitStack,
    config: Config,
    workdir: pathlib.Path,
    processes: Processes,
) -> _Folders:
    """Returns the run's checkpoints, without what an interrupted save left."""
    keep = config.loop.keep_checkpoints
    folders = _Folders(
        Checkpoints(workdir / CHECKPOINTS, keep=keep, processes=processes),
        Checkpoints(workdir / BEST, keep=1, processes=processes),
    )
    for folder in folders:
        stack.enter_context(folder)
        folder.remove_unfinished()
    return folders


def _open_loop(
    stack: contextlib.ExitStack,
    run: Run,
    start: Saved | SourceRun | None,
    record: RunRecord,
    folders: _Folders,
    display: TrainingProgress,
) -> Loop:
    """Returns the loop, at its checkpoint, or at step 0 of a run of its own."""
    config = run.config
    saved = start if isinstance(start, Saved) else None
    is_next = isinstance(start, SourceRun)
    with display.doing("initializing"):
        state = next_day.initial_state(run, start) if is_next else run.init()
    progress = Progress(position=Position(0, 0, config.seed))
    if saved is not None:
        with display.doing("reading the checkpoint"):
            parts = vars(state), run.placement.layout, config.identity()
            state = TrainState(**read_state(folders.newest, saved, *parts))
        progress = Progress.from_json(saved.meta.get("progress", {}))
        display.say(resume_note(saved.step, run.total_steps, config.loop))
    elif config.run.resume:
        display.say("Nothing was saved yet: starting at step 0.")
    folders.best.drop_after(progress.step)
    keeps_best = config.optim.plateau_patience is not None
    require_space(folders if keeps_best else [folders.newest], state)
    display.begin(run.total_steps, progress.step)
    profiler = Profiler(config.run.profile_steps(), record.workdir / "profile")
    stack.callback(profiler.close)
    return Loop(
        run,
        state,
        progress,
        record=record,
        checkpoints=folders.newest,
        best=folders.best,
        display=display,
        profiler=profiler,
    )


def _begin_record(record: RunRecord, loop: Loop, *, is_new: bool):
    """Writes what a run knows of itself before its first step."""
    run, progress = loop.run, loop.progress
    # A run that begins again has scored its day again.
    record.start(-1 if is_new else progress.step)
    if not isinstance(record, SilentRecord):
        keep_encoding(run.splits, record.workdir)
    if is_new and progress.days:
        record.log(log_lines.day(progress))
    record.write_sites([site.as_row() for site in run.running_sites])
    record.write_plan(run.plan)


def _dry_run(config: Config, console: Console, display: TrainingProgress) -> int:
    """Builds a run as it would begin or go on, and compiles a step without taking it.

    Raises:
        ValueError: also if there is no checkpoint to go on from, or one of other data.
    """
    if config.run.resume:
        start = open_run(choose_workdir(config), best=False)
        config = _observed_as(start.saved, config)
        base = next_day.base_of(start.saved, None, start.workdir)
    else:
        start = next_day.source_of(config)
        base = next_day.base_of(None, start, pathlib.Path())
    run = _build(config, console, display, _plan_of(start), base)
    if config.run.resume and start is not None:
        _require_same_data(start.saved, run)
    with display.doing("compiling"):
        return _compile(run, console)


def _compile(run: Run, console: Console) -> int:
    """Compiles a training step and prints what it holds."""
    state = jax.eval_shape(run.init)
    batch = run.read(run.splits.train, 0)
    compiled = run.first_step.lower(state, batch).compile()
    memory = compiled.memory_analysis()
    if memory is not None:
        held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        console.print(f"One step compiles; it holds {held / 2**20:,.0f} MiB.")
    console.print(f"{run.total_steps:,} steps would be taken.")
    return 0
