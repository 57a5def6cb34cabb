"""Makes what a run may need next, in a thread, while it trains on one device.

    probe      compiles what Probe learns of the sites by
    hope       checks the kernels of the plan that the first review is to choose
    steps      compiles the steps of this plan

One after another, as Python traces them, which slows the loop's own steps. The loop
waits for a program that it needs before the thread has it.
"""

import threading
from collections.abc import Callable, Sequence

import jax

from loka_jax.data import Batch
from loka_jax.train.build import Run
from loka_jax.train.observe import probe_step
from loka_jax.train.state import TrainState


def make_ahead(run: Run, state: TrainState, batch: Batch) -> None:
    """Begins with it, if the run has a use for it; of the arrays types are read."""
    config, probe = run.config, run.config.probe.first()
    # Batches of an event log are of several sizes.
    if probe is None or run.placement.size > 1 or config.data.is_log:
        return
    observe = probe_step(run, probe)
    jobs = [] if observe.has_run else [observe.ahead(state, batch)]
    if run.hope is None:
        _begin(jobs)
        return
    run.hope.is_ready.clear()
    _begin([*jobs, lambda: _make_hoped(run, batch)])


def _begin(jobs: Sequence[Callable[[], None]]) -> None:
    def work():
        for job in jobs:
            job()

    threading.Thread(target=work, daemon=True).start()


def _make_hoped(run: Run, batch: Batch) -> None:
    """Checks the plan that a run hopes for, and compiles its steps if it is another."""
    assert run.hope is not None
    try:
        is_new = run.hoped.plan.choices != run.plan.choices
        jobs = _steps(run.hoped, batch) if is_new else []
    finally:
        run.hope.is_ready.set()
    for job in jobs:
        job()


def _steps(run: Run, batch: Batch) -> list[Callable[[], None]]:
    """Returns the jobs that compile a run's steps, but for those that make scales."""
    state = jax.eval_shape(run.init)
    return [
        run.train_step(scales_initialized=run.planned.is_delayed, steps=steps).ahead(
            state, *[batch] * steps
        )
        for steps in run.config.loop.calls
    ]
