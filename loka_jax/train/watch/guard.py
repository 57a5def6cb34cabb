"""Notices a run that diverges, before its state replaces a healthy checkpoint.

    NE(window) = log loss of the training examples since the last log line, each capped
                 / entropy of their click rate          1: as bad as the mean click rate

The cap (`metrics.capped_ne`) keeps a few outliers among the rows from being taken for
divergence.

An untrained model predicts one half, whose NE is large where clicks are rare: 12 at 1 %
of clicks. A window is bad if its NE is beyond `ABSURD` times that, or after the warm-up
beyond `LIMIT` times the larger of 1 and the lowest NE so far, or that of one half in
the first window. Windows with few examples of a label have an NE by chance: only the
first rule holds for them. Two bad windows in a row are divergence; a single one can be
a batch of outliers.

An error names the symptom; `explained` adds the likely cause, for which the model runs
twice.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from loka_jax import nn
from loka_jax.data import Batch
from loka_jax.recipe import get_recipe
from loka_jax.train import metrics
from loka_jax.train.build import Run
from loka_jax.train.state import TrainState
from loka_jax.train.step import past_first_steps

type EvalStep = Callable[..., tuple[metrics.MetricState, Array]]

LIMIT = 1.5
ABSURD = 3.0
ENOUGH = 16  # examples of the rarer label
_WINDOWS = 2
# Magnitude of a feature that no transform leaves behind: log1p(1e12) is 28.
_LARGE_FEATURE = 1e4


class TrainingFailed(Exception):
    """Training cannot continue, for a reason other than a wrong option."""


class Diverged(TrainingFailed):
    """The loss has left all bounds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guard:
    """The windows so far; `dataclasses.asdict` gives JSON values.

    Attributes:
        lowest: the lowest NE of a window so far, or None.
        bad_windows: number of bad windows since the last good one.
    """

    lowest: float | None = None
    bad_windows: int = 0

    def after_steps(self, run: Run, state: TrainState, step: int) -> "Guard":
        """Returns the guard after the training examples since the last log line."""
        if run.config.optim.loss is not None:  # which need not lower the NE
            return self
        window = metrics.capped_ne(state.metrics)
        return self.after(window, is_warm=step > run.config.optim.warmup_steps)

    def after(self, window: metrics.CappedNe, *, is_warm: bool) -> "Guard":
        """Returns the guard after a window; one whose NE is undefined says nothing.

        `is_warm` once the warm-up of the learning rate has ended.
        """
        ne, has_enough = window.ne, window.rarer >= ENOUGH
        if ne is None:
            return self
        level = window.of_half if self.lowest is None else max(1.0, self.lowest)
        is_bad = not ne <= ABSURD * window.of_half
        is_bad |= is_warm and has_enough and ne > LIMIT * level
        lowest = self.lowest
        if has_enough and math.isfinite(ne):
            lowest = ne if lowest is None else min(lowest, ne)
        return Guard(lowest=lowest, bad_windows=self.bad_windows + 1 if is_bad else 0)


def judged(seen: Guard, run: Run, state: TrainState, step: int) -> Guard:
    """Returns the guard after the training examples since the last log line.

    Raises Diverged, with the symptom, if this was one bad window too many.
    """
    seen = seen.after_steps(run, state, step)
    if seen.bad_windows >= _WINDOWS:
        ne = metrics.capped_ne(state.metrics).ne
        raise Diverged(
            f"the NE of the training examples is {ne:.3g}, and predicting the mean "
            "click rate has 1"
        )
    return seen


def is_healthy(seen: Guard, run: Run, state: TrainState, step: int) -> bool:
    """Returns whether the state may become a checkpoint."""
    now = seen.after_steps(run, state, step)
    return now.bad_windows == 0 and not poisoned(state)


def refuse_skipping(state: TrainState, step: int, limit: int) -> None:
    """Raises TrainingFailed if the last `limit` steps or more were skipped."""
    skipped = int(state.skipped_in_a_row)
    if skipped < limit:
        return
    raise TrainingFailed(
        f"the last {skipped} steps up to step {step} were skipped, because their loss "
        "or gradients were not finite: lower --optim.lr or --optim.rows-lr, or set "
        "--optim.clip-norm 10."
    )


def refuse_ruin(seen: Guard, run: Run, state: TrainState, step: int) -> None:
    """Raises TrainingFailed if a finished run was skipped, is bad or not finite."""
    few = min(run.config.loop.log_every, step)
    refuse_skipping(state, step, max(few, 1))
    if not is_healthy(seen, run, state, step):
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
    """Returns the error of a divergence as a sentence with its likely cause."""
    newest = "there is no checkpoint" if saved is None else f"step {saved} is saved"
    columns = run.splits.train.schema.dense
    model = past_first_steps(run.planned, state)
    cause = likely_cause(model, run.eval_step, state, batch, columns)
    return Diverged(
        f"training has diverged at step {step}: {symptom}; {cause}; {newest}."
    )


def likely_cause(
    model: nn.Planned,
    eval_step_of: Callable[[nn.Planned], EvalStep],
    state: TrainState,
    batch: Batch | None,
    columns: tuple[str, ...],
) -> str:
    """Returns a phrase with the likely cause of divergence, and the remedy.

    `eval_step_of` gives the compiled evaluation step of a model.
    """
    if batch is None:
        return "no batch was seen that could tell why"
    sizes = np.abs(np.asarray(batch.dense, np.float64))
    if sizes.size and not np.nanmax(sizes) <= _LARGE_FEATURE:
        worst = int(np.nanargmax(np.nanmax(sizes, axis=0)))
        return (
            f"the features are the likely cause: column {columns[worst]!r} holds "
            f"{np.nanmax(sizes[:, worst]):.3g}; transform it (--data.transform log1p) "
            "or clip it in the files"
        )
    in_fp8 = _logloss(eval_step_of(model), state, batch)
    plain = nn.Planned(model.model.clone(recipe="bf16"))
    in_bf16 = _logloss(eval_step_of(plain), state, batch)
    if in_bf16 < in_fp8 / 2:
        return (
            f"FP8 is the likely cause: the loss of the newest batch is {in_fp8:.3g}, "
            f"and {in_bf16:.3g} in bfloat16; use --recipe fp8_rowwise or --recipe bf16"
        )
    cause = (
        "the learning rate is the likely cause, as the loss is no lower in bfloat16: "
        "lower --optim.lr or --optim.rows-lr, or set --optim.clip-norm 10"
    )
    if not model.choices and get_recipe(model.model.recipe).fwd is None:
        return cause
    return f"{cause}; if --recipe bf16 trains well, gradients in FP8 led here"


def _logloss(step: EvalStep, state: TrainState, batch: Batch) -> float:
    """Returns the largest log loss of a task, infinite if one is not finite."""
    seen, _ = step(state, metrics.init_like(state.metrics), batch)
    values = (metrics.compute(task)["logloss"] for task in metrics.split_tasks(seen))
    return max(x if x is not None and math.isfinite(x) else math.inf for x in values)


def poisoned(state: TrainState) -> bool:
    """Returns whether a parameter, a row or the optimizer's state is not finite."""
    trained = (state.params, state.opt_state, state.table, state.row_state)
    leaves = jax.tree.leaves(trained)
    floats = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    return not jax.device_get(_all_finite(floats))


@jax.jit
def _all_finite(arrays: list[Array]) -> Array:
    # One program: by themselves operations would be compiled for each shape.
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in arrays]))
