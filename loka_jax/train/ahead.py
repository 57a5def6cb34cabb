"""Makes what a run may need next, in threads, while it trains on one device.

From its beginning:

    hope       checks the kernels of the plan that the first review is to choose

Before its first step in FP8, and the first of a new plan:

    first      compiles what the next steps run

After it, beside its own steps, in two threads:

    probe      compiles what Probe learns of the sites by
    look       then, a look at the operands of sites in FP8
    rare       then, what moves covariances of weights

    steps      compiles the steps of the plan that was checked, and its looks

The loop waits for a program that it needs before a thread has it.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from loka_jax.data import Batch
from loka_jax.train.build import Run
from loka_jax.train.observe import probe_step
from loka_jax.train.state import TrainState
from loka_jax.train.step import scales_initialized
from loka_jax.train.watch.host_state import Progress
from loka_jax.train.watch.looks import look_step, watched


def make_first(run: Run, state: TrainState, progress: Progress, batch: Batch) -> None:
    """Compiles what the next steps of a plan run, side by side.

    All are lowered before the first is compiled, as a Mosaic kernel that was lowered
    beside a compilation has ended the process. A CPU compiles them as they are needed:
    it has no cores to spare. So does a run that begins in bfloat16, for which one of
    them is enough.
    """
    is_delayed = run.planned.is_delayed
    is_first = is_delayed and not scales_initialized(state)
    if not (is_first or progress.step) or not _compiles_ahead(run):
        return
    if jax.default_backend() == "cpu":
        return
    programs: list[tuple[Any, int]] = [
        (run.train_step(scales_initialized=is_delayed, steps=steps), steps)
        for steps in run.config.loop.calls
    ]
    if is_first:
        probe = run.config.probe.config_at(progress.step)
        first: Any = run.train_step() if probe is None else probe_step(run, probe)
        programs.insert(0, (first, 1))
    jobs = [
        program.lowered(state, *[batch] * steps)
        for program, steps in programs
        if not program.is_begun
    ]
    for job in jobs:
        _begin([job])


def make_ahead(run: Run, state: TrainState, progress: Progress, batch: Batch) -> None:
    """Begins to make what comes after the first step; of the arrays types are read."""
    if not _compiles_ahead(run):
        return
    probe = run.config.probe
    jobs = _observed(run, probe.first(), state, batch)
    jobs += _look(run, state, progress, batch)
    if probe.first_move < run.total_steps:
        rare = probe.config_at(probe.first_move)
        jobs += _observed(run, rare, state, batch)
    _begin(jobs)
    if run.hope is not None:
        run.hope.is_ready.clear()
        _begin([lambda: _make_hoped(run, progress, batch)])


def _compiles_ahead(run: Run) -> bool:
    """Returns whether a run has one device, and batches of one shape.

    What is compiled here would be of no use to a stream, whose batches have several.
    """
    return run.placement.size == 1 and not run.config.data.stream


def _observed(
    run: Run, probe: Any, state: TrainState, batch: Batch
) -> list[Callable[[], None]]:
    """Returns the job that compiles what an observer observes by, unless one has."""
    observe = None if probe is None else probe_step(run, probe)
    if observe is None or observe.is_begun:
        return []
    return [observe.ahead(state, batch)]


def _look(
    run: Run, state: TrainState, progress: Progress, batch: Batch
) -> list[Callable[[], None]]:
    """Returns the job that compiles a look at a run's operands, if it takes any."""
    probe = run.config.probe
    if not probe.look_every or run.total_steps <= probe.first_look:
        return []
    look = look_step(run, watched(run, progress))
    return [] if look is None or look.has_run else [look.ahead(state, batch)]


def _begin(jobs: Sequence[Callable[[], None]]) -> None:
    def work():
        for job in jobs:
            job()

    threading.Thread(target=work, daemon=True).start()


def _make_hoped(run: Run, progress: Progress, batch: Batch) -> None:
    """Compiles the steps of the plan that a run hopes for, once it is checked."""
    assert run.hope is not None
    try:
        is_new = run.hoped.plan.choices != run.plan.choices
        jobs = _steps(run.hoped, progress, batch) if is_new else []
    finally:
        run.hope.is_ready.set()
    for job in jobs:
        job()


def _steps(run: Run, progress: Progress, batch: Batch) -> list[Callable[[], None]]:
    """Returns the jobs that compile a run's steps, but for those that make scales."""
    state = jax.eval_shape(run.init)
    steps = [
        run.train_step(scales_initialized=run.planned.is_delayed, steps=steps).ahead(
            state, *[batch] * steps
        )
        for steps in run.config.loop.calls
    ]
    return steps + _look(run, state, progress, batch)
