"""The host's state of a run: the part of a checkpoint that no device holds.

A run is restored at a checkpoint: the best one, or the newest after a divergence.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from loka_jax import jsonfile
from loka_jax.data import Position
from loka_jax.dispatch.drift import SiteDrift
from loka_jax.dispatch.plan import as_json
from loka_jax.optim import Plateau
from loka_jax.train.build import Run
from loka_jax.train.checkpoints.checkpoint import Checkpoints
from loka_jax.train.checkpoints.manifest import Saved
from loka_jax.train.checkpoints.row_layout import KEY, read_state
from loka_jax.train.plan_files import saved_plan
from loka_jax.train.state import TrainState
from loka_jax.train.watch.alarm import Alarms
from loka_jax.train.watch.guard import Diverged, Guard
from loka_jax.train.watch.scale_watch import ScaleWatch

# Times that a run goes back to a checkpoint before it counts as failed.
_MAX_RETURNS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """The host's state of a run; saved with the device's state.

    Attributes:
        seconds: time spent training, without evaluations and checkpoints.
        best: the best evaluation so far by `OptimConfig.best_by`, as in metrics.jsonl.
        changes: a sentence for each site that left FP8, or entered it.
        returns: a sentence for each return to a checkpoint after a divergence.
        drift: what looks at the operands of FP8 sites have shown, by path.
        unsafe: paths of the sites that live errors have demoted.
        broken: paths of the sites that stay in bfloat16: their kernels did not compile,
            the validation loss rose by FP8, or they raised an alarm.
        replanned: the step of the newest change of the plan.
        confirmed: the step of the change that `watch.confirm` has judged; -1 for none.
        days: the quality on each day's training rows before it was trained on them, in
            a run that goes on from another one; see `train.next_day`.
        alarms: those of Probe's monitors.
    """

    step: int = 0
    position: Position
    examples: int = 0
    seconds: float = 0.0
    plateau: Plateau = Plateau()
    best: dict[str, Any] | None = None
    changes: tuple[str, ...] = ()
    returns: tuple[str, ...] = ()
    drift: dict[str, SiteDrift] = dataclasses.field(default_factory=dict)
    unsafe: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    replanned: int = 0
    confirmed: int = -1
    guard: Guard = Guard()
    scale_watch: ScaleWatch = ScaleWatch()
    days: tuple[dict[str, Any], ...] = ()
    alarms: Alarms = Alarms()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Progress":
        """Returns the progress from those of `dataclasses.asdict`; refuses others."""
        try:
            for name in {field.name for field in dataclasses.fields(cls)} - {*data}:
                raise ValueError(f"{name} is missing")
            return jsonfile.typed(data, cls)
        except ValueError as error:
            raise ValueError(
                f"the checkpoint has no progress of this version ({error}): use the "
                "version of loka_jax that wrote it."
            ) from None


class Moment(NamedTuple):
    """A run at one of its steps: with the plan, the state and the progress of it."""

    run: Run
    state: TrainState
    progress: Progress


def as_meta(run: Run, progress: Progress) -> dict[str, Any]:
    """Returns what a checkpoint says of a run and its progress, as JSON values."""
    return {
        "progress": dataclasses.asdict(progress),
        "config": run.config.identity(),
        "plan": as_json(run.plan),
        "data": run.splits.identity,
        "files": run.splits.files,
        "encoding": run.splits.encoding_digest,
        KEY: run.placement.layout.shards,
        **run.placement.choices(),
    }


def keep_start(best: Checkpoints, run: Run, state: TrainState):
    """Makes a run's state before its first step the best one."""
    start = Progress(position=Position(0, 0, run.config.seed))
    best.wait()
    best.drop_after(-1)
    best.save(0, state, as_meta(run, start))
    best.wait()


def restored(checkpoints: Checkpoints, saved: Saved, run: Run) -> Moment:
    """Returns a run as it was when a checkpoint was saved."""
    plan = saved_plan(saved.meta.get("plan", {}), run.sites)
    run = run if plan == run.plan else run.replanned(plan)
    # Shapes only: a second state beside the run's might not fit on the device.
    layout = run.placement.layout
    state = TrainState(**read_state(checkpoints, saved, run.template(), layout))
    return Moment(run, state, Progress.from_json(saved.meta["progress"]))


def gone_back(
    error: Diverged, checkpoints: Checkpoints, run: Run, progress: Progress
) -> Moment | None:
    """Returns the run at its newest checkpoint, or None if that is not wanted.

    The examples between it and the divergence are left out, and the learning rates are
    halved: the same steps would diverge again. The last of `Progress.returns` says so.
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
