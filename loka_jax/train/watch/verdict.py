"""Judges a run: whether it goes on, and whether its state may become a checkpoint.

What counts as divergence is in `guard.py`. An error names the symptom; `explained` adds
the likely cause, for which the model runs twice.
"""

import dataclasses

from loka_jax.data import Batch
from loka_jax.train import metrics
from loka_jax.train.build import Run
from loka_jax.train.state import TrainState
from loka_jax.train.step import past_first_steps
from loka_jax.train.watch import guard
from loka_jax.train.watch.guard import Diverged, Guard, TrainingFailed
from loka_jax.train.watch.host_state import Progress


def judged(run: Run, state: TrainState, progress: Progress) -> Progress:
    """Returns the progress with the training examples since the last log line judged.

    Raises:
        Diverged: with the symptom, if this was one bad window too many.
    """
    window = metrics.capped_ne(state.metrics)
    seen = _after(window, run, progress)
    if seen.has_diverged:
        raise Diverged(
            f"the NE of the training examples is {window.ne:.3g}, and predicting the "
            "mean click rate has 1"
        )
    return dataclasses.replace(progress, guard=seen)


def is_healthy(run: Run, state: TrainState, progress: Progress) -> bool:
    """Returns whether the state may become a checkpoint."""
    now = _after(metrics.capped_ne(state.metrics), run, progress)
    return now.is_healthy and not guard.poisoned(state)


def refuse_skipping(state: TrainState, step: int, limit: int) -> None:
    """Raises TrainingFailed if the last `limit` steps or more were skipped.

    Args:
        state: the device's state.
        step: the number of steps taken, for the message.
        limit: number of steps in a row.
    """
    skipped = int(state.skipped_in_a_row)
    if skipped < limit:
        return
    raise TrainingFailed(
        f"the last {skipped} steps up to step {step} were skipped, because their loss "
        "or gradients were not finite: lower --optim.lr or --optim.rows-lr, or set "
        "--optim.clip-norm 10."
    )


def refuse_ruin(run: Run, state: TrainState, progress: Progress) -> None:
    """Ends a finished run as failed if its state cannot be used.

    Raises:
        TrainingFailed: if the last steps were all skipped.
        Diverged: with the symptom, if the last window was bad, or the state is not
            finite.
    """
    few = min(run.config.loop.log_every, progress.step)
    refuse_skipping(state, progress.step, max(few, 1))
    if not is_healthy(run, state, progress):
        raise Diverged("the loss or the state of the last steps is no good")


def explained(
    symptom: Diverged,
    run: Run,
    state: TrainState,
    step: int,
    *,
    batch: Batch | None,
    saved: int | None,
) -> Diverged:
    """Returns the error of a divergence as a sentence with its likely cause.

    Args:
        symptom: the error of `judged` or `refuse_ruin`.
        run: the run.
        state: the state that has diverged.
        step: the number of steps taken.
        batch: the newest training batch; None if there was none.
        saved: the step of the newest checkpoint; None if there is none.
    """
    newest = "there is no checkpoint" if saved is None else f"step {saved} is saved"
    columns = run.splits.train.schema.dense
    model = past_first_steps(run.planned, state)
    cause = guard.likely_cause(model, run.eval_step, state, batch, columns)
    return Diverged(
        f"training has diverged at step {step}: {symptom}; {cause}; {newest}."
    )


def _after(window: metrics.CappedNe, run: Run, progress: Progress) -> Guard:
    """Returns the guard after a window."""
    is_warm = progress.step > run.config.optim.warmup_steps
    return progress.guard.after(window, is_warm=is_warm)
