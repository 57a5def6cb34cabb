"""Restores a run at a checkpoint: the best one, or the newest after a divergence."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from loka_jax.train.build import Run
from loka_jax.train.checkpoints.checkpoint import Checkpoints
from loka_jax.train.checkpoints.manifest import Saved
from loka_jax.train.checkpoints.row_layout import read_state
from loka_jax.train.planning import saved_plan
from loka_jax.train.state import TrainState
from loka_jax.train.watch.guard import Diverged
from loka_jax.train.watch.host_state import Progress

# Times that a run goes back to a checkpoint before it counts as failed.
_MAX_RETURNS = 3


class Moment(NamedTuple):
    """A run at one of its steps.

    Attributes:
        run: the run with the plan of that step.
        state: the device's state.
        progress: the host's state.
    """

    run: Run
    state: TrainState
    progress: Progress


def restored(checkpoints: Checkpoints, saved: Saved, run: Run) -> Moment:
    """Returns a run as it was when a checkpoint was saved.

    Args:
        checkpoints: the folder of the checkpoint.
        saved: the checkpoint.
        run: the run under any plan.
    """
    run = run.replanned(saved_plan(saved.meta["plan"], run.sites))
    # Shapes only: a second state beside the run's might not fit on the device.
    state = TrainState(
        **read_state(checkpoints, saved, run.template(), run.placement.layout)
    )
    return Moment(run, state, Progress.from_json(saved.meta["progress"]))


def gone_back(
    error: Diverged, checkpoints: Checkpoints, run: Run, progress: Progress
) -> Moment | None:
    """Returns the run at its newest checkpoint, or None if that is not wanted.

    The examples between it and the divergence are left out, and the learning rates are
    halved: the same steps would diverge again. The last of `Progress.returns` says so.

    Args:
        error: the divergence.
        checkpoints: the checkpoints of the newest steps.
        run: the run that has diverged.
        progress: its progress.
    """
    wanted = run.config.loop.on_divergence == "go_back"
    if not wanted or len(progress.returns) >= _MAX_RETURNS:
        return None
    saved = checkpoints.newest()
    if saved is None:
        return None
    run, state, before = restored(checkpoints, saved, run)
    lr_scale = min(before.plateau.lr_scale, progress.plateau.lr_scale) / 2
    sentence = f"{error} Went back to step {before.step}, learning rates halved."
    return Moment(
        run,
        dataclasses.replace(state, lr_scale=jnp.asarray(lr_scale, jnp.float32)),
        dataclasses.replace(
            before,
            position=progress.position,
            plateau=dataclasses.replace(before.plateau, lr_scale=lr_scale),
            returns=(*progress.returns, sentence),
        ),
    )
