"""The training loop: steps, evaluations, log lines, checkpoints.

The loop waits for the device only every few steps, so that steps are queued ahead. The
numerics are in `step.py`; a checkpoint holds `TrainState` and `Progress`.
"""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loka_jax.data.batch import Batch, Dataset, Position, next_position
from loka_jax.data.prefetch import Prefetcher
from loka_jax.dispatch.plan import as_json
from loka_jax.site import BF16
from loka_jax.train import guard, metrics, operands
from loka_jax.train.build import Run
from loka_jax.train.checkpoint import Checkpoints, Saved
from loka_jax.train.guard import Diverged, TrainingFailed
from loka_jax.train.host_state import Progress
from loka_jax.train.planning import saved_plan
from loka_jax.train.profiler import Profiler
from loka_jax.train.progress import TrainingProgress
from loka_jax.train.record import RunRecord
from loka_jax.train.scale_watch import LOOK_STEPS, Look
from loka_jax.train.signals import StopRequest
from loka_jax.train.state import TrainState
from loka_jax.train.step import scales_initialized

# An operand that is always zero never initializes its scale, so after this many steps
# the guard for first steps is dropped in any case (scaling.delayed_scale_inv).
_MAX_FIRST_STEPS = 16
# Times that a run goes back to a checkpoint before it counts as failed.
_MAX_RETURNS = 3
# Looks that wait for a log line; older ones are read, as they have been computed.
_UNREAD_LOOKS = 8


class Best(NamedTuple):
    """The state to judge a run by.

    Attributes:
        step: the number of steps that the state has seen.
        run: the run with the plan of that step.
        state: the state.
    """

    step: int
    run: Run
    state: TrainState


class Loop:
    """A run in progress: its state, its record and its checkpoints."""

    def __init__(
        self,
        run: Run,
        state: TrainState,
        progress: Progress,
        *,
        record: RunRecord,
        checkpoints: Checkpoints,
        best: Checkpoints,
        display: TrainingProgress,
        profiler: Profiler,
    ):
        """Starts or continues a run at `state` and `progress`.

        Args:
            run: the built run.
            state: the device's state, which the loop may donate.
            progress: the host's state.
            record: receives the log lines.
            checkpoints: the checkpoints of the newest steps.
            best: the checkpoint of the best evaluation.
            display: shows the progress to the user.
            profiler: traces some steps.
        """
        self.run = run
        self.state = state
        self.progress = progress
        self._record = record
        self._checkpoints = checkpoints
        self._best = best
        self._display = display
        self._profiler = profiler
        self._scales_initialized = False
        self._batch: Batch | None = None
        self._looks: list[Look] = []
        self._since = time.perf_counter()
        self._logged = (progress.examples, progress.seconds)
        self._warm: tuple[int, float] | None = None

    def train(self, stop: StopRequest):
        """Trains to the end or until `stop` is set, and saves before it returns.

        Raises:
            TrainingFailed: if too many steps in a row were not finite, or the loss has
                diverged; healthy checkpoints stay as they are.
            OSError: if a checkpoint could not be written.
        """
        while True:
            try:
                return self._train(stop)
            except Diverged as error:
                if not self._go_back(error):
                    raise

    def _train(self, stop: StopRequest):
        loop = self.run.config.loop
        self._since = time.perf_counter()
        with Prefetcher(
            self.run.splits.train,
            self.progress.position,
            loop.batch_size,
            shuffle=True,
            num_batches=self._remaining(),
        ) as batches:
            for position, batch in batches:
                self.step(position, batch)
                self._take_look(batch)
                if self._is_due(loop.log_every):
                    self._log()
                if self._evaluation_is_due():
                    self._evaluate()
                    self._demote_drifted()
                if self._save_is_due():
                    self._save()
                if stop.is_set or self.progress.plateau.stop:
                    break
        if not self._save_is_due():
            self._save()
        self._checkpoints.wait()
        if not stop.is_set:
            self._refuse_ruin()

    def best_state(self) -> Best:
        """Returns the state with the best validation AUC if it was saved, or the last.

        It is saved if `plateau_patience` is set, as in the BARS benchmark. Sites may
        have been demoted since.
        """
        saved = self._best.newest()
        if saved is None:
            return Best(self.progress.step, self.run, self.state)
        run = self._run_of(saved)
        return Best(saved.step, run, _read(self._best, saved, run))

    def saved_step(self) -> int | None:
        """Returns the step of the newest checkpoint, or None."""
        return self._checkpoints.latest_step()

    def examples_per_second(self) -> float | None:
        """Returns this session's rate after its first log line, without compilation."""
        examples, seconds = self._warm or (0, 0.0)
        elapsed = self.progress.seconds - seconds
        if self._warm is None or elapsed <= 0:
            return None
        return (self.progress.examples - examples) / elapsed

    def step(self, position: Position, batch: Batch):
        """Trains on a batch, and moves `state` and `progress` on."""
        step = self.progress.step
        self._batch = batch
        self._profiler.before(step)
        take_step = self.run.train_step(
            scales_initialized=self._ready_for_initialized_step(),
            probe=self.run.config.probe.config_at(step),
        )
        try:
            self.state = take_step(self.state, batch)
        except Exception as error:
            # Only a step that has never run leaves the donated state intact.
            if take_step.has_run or not self._fall_back(error):
                raise
            return self.step(position, batch)
        self._profiler.after(step, self.state)
        rows = self.run.splits.train.num_examples
        size = self.run.config.loop.batch_size
        self.progress = dataclasses.replace(
            self.progress,
            step=step + 1,
            position=next_position(position, self.run.steps_per_epoch),
            examples=self.progress.examples + min(size, rows - position.step * size),
        )
        self._display.step(step + 1)

    def _fall_back(self, error: Exception) -> bool:
        """Replaces the plan's kernels by XLA in bfloat16; returns False without any."""
        choices = self.run.plan.choices
        kernels = [path for path, choice in choices if choice.provider != "xla"]
        if not kernels or "RESOURCE_EXHAUSTED" in str(error):
            return False
        text = " ".join(str(error).split())[:200]
        reason = f"its step did not compile ({type(error).__name__}: {text})"
        self._demote(dict.fromkeys(kernels, reason))
        return True

    def _demote(self, reasons: Mapping[str, str]):
        """Runs sites in XLA's bfloat16 from now on."""
        plan, step = self.run.plan, f"step {self.progress.step:,}"
        for path, reason in reasons.items():
            plan = plan.demoted(path, BF16, reason)
            sentence = f"{step}: {path} runs in bfloat16 now: {reason}"
            self._display.say(sentence)
            demotions = (*self.progress.demotions, sentence)
            self.progress = dataclasses.replace(self.progress, demotions=demotions)
        self.run = self.run.replanned(plan)
        # Keep only the scales that the new plan needs.
        template = jax.eval_shape(lambda: self.run.init().fp8)
        fp8 = _restricted(self.state.fp8, template)
        self.state = dataclasses.replace(self.state, fp8=fp8)
        self._record.write_plan(plan)

    def _ready_for_initialized_step(self) -> bool:
        """Returns whether delayed scales are initialized, judged by the state alone."""
        if not self._scales_initialized:
            is_late = self.progress.step >= _MAX_FIRST_STEPS
            self._scales_initialized = is_late or scales_initialized(self.state)
        return self._scales_initialized

    def _remaining(self) -> int:
        """Returns the number of steps left, 0 after early stopping."""
        if self.progress.plateau.stop:
            return 0
        return max(self.run.total_steps - self.progress.step, 0)

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self.progress.step % every == 0

    def _ends(self) -> bool:
        return self.progress.step == self.run.total_steps

    def _evaluation_is_due(self) -> bool:
        every = self.run.config.loop.eval_every or self.run.steps_per_epoch
        return self._is_due(every) or self._ends()

    def _save_is_due(self) -> bool:
        every = self.run.config.loop.save_every
        return self._is_due(every) if every else self._evaluation_is_due()

    def _tick(self):
        """Waits for the device and adds the time since the last call to the clock."""
        jax.block_until_ready(self.state.step)
        now = time.perf_counter()
        seconds = self.progress.seconds + now - self._since
        self.progress = dataclasses.replace(self.progress, seconds=seconds)
        self._since = now

    def _log(self):
        self._tick()
        values = metrics.compute(self.state.metrics)
        examples, seconds = self._logged
        progress = self.progress
        elapsed = max(progress.seconds - seconds, 1e-9)
        skipped = int(self.state.skipped)
        lr = float(jnp.asarray(self.run.schedule(progress.step - skipped)))
        line = self._line("train") | {
            "loss": values["logloss"],
            "ne": values["ne"],
            "examples_per_second": (progress.examples - examples) / elapsed,
            "lr": lr * progress.plateau.lr_scale,
            "skipped_steps": skipped,
            "bad_ids": int(self.state.bad_ids),
        }
        self._record.log(line)
        self._judge(metrics.capped_ne(self.state.metrics))
        if scales := operands.scales(self.state):
            self._record.log_scales(progress.step, scales)
        watch = progress.watch.after(operands.drift_ratios(self.state, self.run.plan))
        self.progress = dataclasses.replace(self.progress, watch=watch)
        self._read_looks()
        if amaxes := operands.amaxes(self.state):
            self._record.log_amaxes(progress.step, amaxes)
        self._display.numbers(progress.step, line)
        self.state = dataclasses.replace(self.state, metrics=metrics.init())
        self._logged = (progress.examples, progress.seconds)
        self._warm = self._warm or self._logged
        self._refuse_skipping(self.run.config.loop.max_skipped_steps)

    def _take_look(self, batch: Batch):
        """Looks at delayed scales at fixed steps, so that resumed runs do the same."""
        if not (self._is_due(LOOK_STEPS) or self._ends()):
            return
        look = operands.look(self.run, self.state, self.progress, batch)
        if look is not None:
            self._looks.append(look)
        self._read_looks(keep=_UNREAD_LOOKS)

    def _read_looks(self, keep: int = 0):
        """Warns of outliers in all looks but the newest."""
        size = self.run.config.loop.batch_size
        while len(self._looks) > keep:
            before = self.progress.scale_watch
            watch = before.after(self._looks.pop(0), self.run.splits.train, size)
            for sentence in watch.warnings[len(before.warnings) :]:
                self._display.say(sentence)
            self.progress = dataclasses.replace(self.progress, scale_watch=watch)

    def _judge(self, ne: float | None):
        """Judges the loss of a window of training examples."""
        progress = self.progress
        is_warm = progress.step > self.run.config.optim.warmup_steps
        seen = progress.guard.after(ne, is_warm=is_warm)
        self.progress = dataclasses.replace(progress, guard=seen)
        if seen.has_diverged:
            raise self._divergence(
                f"the NE of the training examples is {ne:.3g}, and predicting the mean "
                "click rate has 1"
            )

    def _divergence(self, symptom: str) -> Diverged:
        self._checkpoints.wait()
        saved, columns = self.saved_step(), self.run.splits.train.schema.dense
        newest = "there is no checkpoint" if saved is None else f"step {saved} is saved"
        cause = guard.likely_cause(
            self.run.planned, self.run.tables, self.state, self._batch, columns
        )
        return Diverged(
            f"training has diverged at step {self.progress.step}: {symptom}; {cause}; "
            f"{newest}."
        )

    def _refuse_ruin(self):
        """Ends a finished run as failed if its state cannot be used.

        Raises:
            TrainingFailed: if the last steps were all skipped.
            Diverged: if the last window was bad, or the state is not finite.
        """
        few = min(self.run.config.loop.log_every, self.progress.step)
        self._refuse_skipping(max(few, 1))
        if not self._is_healthy():
            raise self._divergence("the loss or the state of the last steps is no good")

    def _is_healthy(self) -> bool:
        """Returns whether the state may become a checkpoint."""
        ne = metrics.capped_ne(self.state.metrics)
        is_warm = self.progress.step > self.run.config.optim.warmup_steps
        now = self.progress.guard.after(ne, is_warm=is_warm)
        return now.is_healthy and not guard.poisoned(self.state)

    def _go_back(self, error: Diverged) -> bool:
        """Continues from the newest checkpoint; returns False if that is not wanted.

        The examples between it and the divergence are left out, and the learning rates
        are halved: the same steps would diverge again.
        """
        progress = self.progress
        wanted = self.run.config.loop.on_divergence == "go_back"
        if not wanted or len(progress.returns) >= _MAX_RETURNS:
            return False
        saved = self._checkpoints.newest()
        if saved is None:
            return False
        self.run = self._run_of(saved)
        state = _read(self._checkpoints, saved, self.run)
        before = Progress.from_json(saved.meta["progress"])
        lr_scale = min(before.plateau.lr_scale, progress.plateau.lr_scale) / 2
        sentence = f"{error} Went back to step {before.step}, learning rates halved."
        self._display.say(sentence)
        self.state = dataclasses.replace(
            state, lr_scale=jnp.asarray(lr_scale, jnp.float32)
        )
        self.progress = dataclasses.replace(
            before,
            position=progress.position,
            plateau=dataclasses.replace(before.plateau, lr_scale=lr_scale),
            returns=(*progress.returns, sentence),
        )
        self._best.drop_after(before.step)
        self._record.truncate(before.step)
        self._logged = (before.examples, before.seconds)
        self._scales_initialized = False
        self._looks = []
        return True

    def _run_of(self, saved: Saved) -> Run:
        """Returns the run with the plan of a checkpoint."""
        sites = self.run.sites
        return self.run.replanned(saved_plan(saved.meta["plan"], sites))

    def _refuse_skipping(self, limit: int):
        """Raises TrainingFailed if the last `limit` steps or more were skipped."""
        skipped = int(self.state.skipped_in_a_row)
        if skipped < limit:
            return
        raise TrainingFailed(
            f"the last {skipped} steps up to step {self.progress.step} were skipped, "
            "because their loss or gradients were not finite: lower --optim.lr or "
            "--optim.rows-lr, or set --optim.clip-norm 10."
        )

    def _evaluate(self):
        self._tick()
        self._refuse_skipping(self.run.config.loop.max_skipped_steps)
        line = self._line("eval") | {"split": "valid"}
        line |= quality(self.run, self.state, self.run.splits.valid)
        self._record.log(line)
        self._display.evaluation(self.progress.step, line)
        plateau = self.progress.plateau
        auc = None if line["auc"] is None else float(line["auc"])
        after = plateau.after(auc, self.run.config.optim)
        self.progress = dataclasses.replace(self.progress, plateau=after)
        if after.best_auc != plateau.best_auc:
            self.progress = dataclasses.replace(self.progress, best=line)
            if self.run.config.optim.plateau_patience is not None:
                self._best.save(self.progress.step, self.state, self._meta())
        lr_scale = jnp.asarray(after.lr_scale, jnp.float32)
        self.state = dataclasses.replace(self.state, lr_scale=lr_scale)
        self._since = time.perf_counter()

    def _demote_drifted(self):
        """Demotes the sites that have drifted, before the next checkpoint."""
        watch = self.progress.watch
        if watch.drifted and not self._ends():
            self._demote(watch.drifted)
        watch = dataclasses.replace(watch, drifted={})
        self.progress = dataclasses.replace(self.progress, watch=watch)

    def _save(self):
        """Saves the state, unless it is not healthy: older checkpoints may be."""
        self._tick()
        self._read_looks()
        if not self._is_healthy():
            self._display.say(
                f"step {self.progress.step:,}: not saved, as the loss is out of bounds."
            )
            return
        self._best.wait()  # so that a kill cannot lose the best state of a checkpoint
        self._checkpoints.save(self.progress.step, self.state, self._meta())
        self._since = time.perf_counter()

    def _meta(self) -> dict[str, Any]:
        return {
            "progress": self.progress.to_json(),
            "config": self.run.config.identity(),
            "plan": as_json(self.run.plan),
            "data": self.run.splits.identity,
        }

    def _line(self, kind: str) -> dict[str, Any]:
        progress = self.progress
        return {
            "step": progress.step,
            "epoch": progress.position.epoch,
            "kind": kind,
            "examples": progress.examples,
            "seconds": round(progress.seconds, 3),
        }


def quality(run: Run, state: TrainState, dataset: Dataset) -> dict[str, Any]:
    """Returns AUC, log loss, NE and calibration of `state` on `dataset`."""
    values = run.evaluate(state, dataset)
    return {name: values[name] for name in ("auc", "logloss", "ne", "calibration")}


def _read(checkpoints: Checkpoints, saved: Saved, run: Run) -> TrainState:
    """Returns the state of a checkpoint, without making another one first."""
    template = jax.eval_shape(lambda: vars(run.init()))
    return TrainState(**checkpoints.read(saved, template))


def _restricted(tree: Any, template: Any) -> Any:
    """Returns the entries of nested dicts that a template has too."""
    if not isinstance(template, dict):
        return tree
    return {name: _restricted(tree[name], inner) for name, inner in template.items()}
