"""The training loop: steps, evaluations, log lines, checkpoints.

The loop waits for the device only every few steps, so that steps are queued ahead. The
numerics are in `step.py`; a checkpoint holds `TrainState` and `Progress`.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import jax.numpy as jnp

from loka_jax.data.batch import Batch, Dataset, Position, alike, next_position
from loka_jax.dispatch.plan import as_json
from loka_jax.terminal import one_line
from loka_jax.train import metrics
from loka_jax.train.ahead import make_ahead, make_first
from loka_jax.train.build import Run
from loka_jax.train.checkpoints.checkpoint import Checkpoints
from loka_jax.train.evaluation import Evaluated, evaluate, held_out, logged
from loka_jax.train.folder.record import AMAXES, PLAN, SCALES, RunRecord
from loka_jax.train.logs import log_lines
from loka_jax.train.logs.progress import TrainingProgress
from loka_jax.train.logs.timing import Clock, Profiler
from loka_jax.train.loop_options import LOOK_STEPS
from loka_jax.train.observe import probe_step
from loka_jax.train.processes import watchdog
from loka_jax.train.processes.signals import StopRequest
from loka_jax.train.state import TrainState
from loka_jax.train.step import scales_initialized
from loka_jax.train.watch import alarm, confirm, guard, host_state, replan
from loka_jax.train.watch.guard import Diverged
from loka_jax.train.watch.heeded import heeded
from loka_jax.train.watch.host_state import Moment, Progress
from loka_jax.train.watch.looks import Looks

# An operand that is always zero never initializes its scale, so after this many steps
# the guard for first steps is dropped in any case (scaling.delayed_scale_inv).
_MAX_FIRST_STEPS = 16


@dataclasses.dataclass(eq=False)
class Loop:
    """A run in progress: its state, which steps donate, its record and checkpoints."""

    run: Run
    state: TrainState
    progress: Progress
    _: dataclasses.KW_ONLY
    record: RunRecord
    checkpoints: Checkpoints
    best: Checkpoints
    display: TrainingProgress
    profiler: Profiler

    def __post_init__(self):
        """Starts or continues the run at `state` and `progress`."""
        self.clock = Clock(self.progress)
        self._scales_initialized = self._has_begun = self._is_blind = False
        self._is_new_plan = True
        self._batch: Batch | None = None
        self._looks = Looks(self.display.say)

    def train(self, stop: StopRequest):
        """Trains to the end or until `stop` is set, and saves before it returns.

        Raises:
            TrainingFailed: if too many steps in a row were not finite, or the loss has
                diverged; healthy checkpoints stay as they are.
            OSError: if a checkpoint could not be written.
        """
        try:
            while True:
                try:
                    return self._train(stop)
                except Diverged as symptom:
                    error = self._explained(symptom)
                if not self._go_back(error):
                    raise error
        finally:
            if self.run.hope is not None:
                self.run.hope.end()

    def _train(self, stop: StopRequest):
        loop = self.run.config.loop
        self.clock.restart()
        is_over = self.progress.plateau.stop  # early stopping
        left = 0 if is_over else max(self.run.total_steps - self.progress.step, 0)
        if left and self.run.hope is not None:
            self.run.hope.begin()
        start = self.progress.position
        with self.run.prefetched(start, left) as batches:
            source = iter(self.run.placement.look_ahead(batches))
            while pairs := list(itertools.islice(source, self._steps_at_once())):
                with self.run.turn(lambda: self.state):
                    self._look_at_operands(pairs[0][1])
                    self._make_first(pairs[0][1])
                    self._observe(pairs[0][1])
                    for some in alike(pairs):
                        self.step(some)
                    self._look_at_scales(pairs[-1][1])
                    if self.clock.has_compiled():  # which no rate is to count
                        self._tick()
                        self.clock.rewind(self.progress)
                    if self._is_due(loop.log_every):
                        self._log()
                    if self._evaluation_is_due():
                        self.evaluate()
                if self._review_is_due():
                    self._review_plan()
                if self._save_is_due():
                    self._save()
                watchdog.alive()
                if stop.reached() or self.progress.plateau.stop:
                    break
        if not self._save_is_due():
            self._save()
        with self.display.doing("saving"):
            self.checkpoints.wait()
        if not stop.is_set:
            guard.refuse_ruin(*self._judged())

    def best_state(self) -> Moment:
        """Returns the run at its best evaluation if that was saved, or at its end.

        It is saved if `plateau_patience` is set. Sites may have been demoted since.
        """
        saved = self.best.newest()
        if saved is None:
            return Moment(self.run, self.state, self.progress)
        return host_state.restored(self.best, saved, self.run)

    def step(self, pairs: Sequence[tuple[Position, Batch]]):
        """Trains on batches by one call, and moves `state` and `progress` on."""
        step, (positions, batches) = self.progress.step, zip(*pairs, strict=True)
        self._batch = batches[-1]
        self.profiler.before(step)
        take_step = self.run.train_step(
            scales_initialized=self._ready_for_initialized_step(), steps=len(pairs)
        )
        compiles = not take_step.has_run
        activity = "compiling" if compiles else "training"
        try:
            with self.display.doing(activity), watchdog.resting(compiles):
                self.state = take_step(self.state, *batches)
        except Exception as error:  # a compiler may raise any kind
            # Only a step that has never run leaves the donated state intact.
            followed = replan.after_failure(self.run, self.progress, error)
            if take_step.has_run or followed is None:
                raise
            self._change(followed)
            for pair in pairs:
                self.step([pair])
            return
        self.profiler.after(step, self.state)
        if compiles and not self._has_begun:
            self._has_begun = True
            make_ahead(self.run, self.state, self.progress, batches[-1])
        rows = self.run.splits.train.num_examples
        size = self.run.config.loop.batch_size
        examples = sum(min(size, rows - position.step * size) for position in positions)
        self.progress = dataclasses.replace(
            self.progress,
            step=step + len(pairs),
            position=next_position(positions[-1], self.run.steps_per_epoch),
            examples=self.progress.examples + examples,
        )
        self.display.step(self.progress.step)

    def _observe(self, batch: Batch):
        """Learns of the sites by a batch, before a step that Probe observes."""
        probe = self.run.config.probe.config_at(self.progress.step)
        if probe is None or self._is_blind:
            return
        observe = probe_step(self.run, probe)
        try:
            with self.display.doing("observing" if observe.has_run else "compiling"):
                self._sync()
                seen = observe(self.state, batch)
        except Exception as error:  # a compiler may raise any kind
            if observe.has_run:
                raise
            self._is_blind = True  # nothing of the training is lost
            reason = f"its program does not run ({one_line(error)})"
            self.display.say(f"Probe observes this run no more: {reason}.")
            return
        self.state = dataclasses.replace(self.state, probe=seen)
        if not self._ready_for_initialized_step():
            self.state = replan.with_scales(self.run, self.state)

    def _make_first(self, batch: Batch):
        """Begins to compile what the next steps of a new plan need."""
        if self._is_new_plan:
            self._is_new_plan = False
            with self.display.doing("compiling"):
                make_first(self.run, self.state, self.progress, batch)

    def _steps_at_once(self) -> int:
        run, step = self.run, self.progress.step
        if not self._ready_for_initialized_step():
            return 1
        return run.config.steps_at_once(step, run.steps_per_epoch, run.total_steps)

    def _change(self, change: replan.Change):
        """Follows another plan from now on."""
        self.run, self.state = replan.replanned(self.run, self.state, change.plan)
        self.record.write(PLAN, as_json(change.plan))
        self.progress = dataclasses.replace(
            change.progress,
            changes=(*change.progress.changes, *change.said),
            replanned=change.progress.step,
        )
        self._scales_initialized, self._is_new_plan = False, True
        for sentence in change.said:
            self.display.say(sentence)

    def _look_at_operands(self, batch: Batch):
        """Looks at FP8 sites at fixed steps, so that resumed runs do the same."""
        probe = self.run.config.probe
        is_early = self.progress.step < probe.first_look
        if probe.look_every and self._is_due(probe.look_every) and not is_early:
            with self.display.doing("looking at operands"):
                self._sync()
                self.progress = self._looks.before_step(
                    self.run, self.state, self.progress, batch
                )

    def _look_at_scales(self, batch: Batch):
        """Looks at delayed scales at fixed steps, so that resumed runs do the same."""
        if self._is_due(LOOK_STEPS) or self._ends():
            with self.display.doing("looking at scales"):
                self.progress = self._looks.after_step(
                    self.run, self.state, self.progress, batch
                )

    def _review_plan(self):
        """Changes the plan by drift and by live errors, before the next checkpoint."""
        self.progress = self._looks.read(self.progress)
        if self._ends():
            return
        seen, say = (self.state.probe, self.progress), self.display.say
        with self.display.doing("reviewing the plan"), watchdog.resting():
            change = replan.agreed_review(self.run, *seen, say)
        if change is not None:
            self._change(change)

    def _ready_for_initialized_step(self) -> bool:
        """Returns whether delayed scales are initialized, judged by the state alone."""
        if not self._scales_initialized:
            steps = self.progress.step - self.progress.replanned
            is_late = steps >= _MAX_FIRST_STEPS
            self._scales_initialized = is_late or scales_initialized(self.state)
        return self._scales_initialized

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self.progress.step % every == 0

    def _ends(self) -> bool:
        return self.progress.step == self.run.total_steps

    def _evaluation_is_due(self) -> bool:
        every = self.run.config.loop.eval_every or self.run.steps_per_epoch
        return self._is_due(every) or self._ends()

    def _review_is_due(self) -> bool:
        is_first = self.progress.step == self.run.config.probe.first_review()
        return is_first or self._evaluation_is_due()

    def _save_is_due(self) -> bool:
        every = self.run.config.loop.save_every
        return self._is_due(every) if every else self._evaluation_is_due()

    def _tick(self):
        self.progress = self.clock.tick(self.state, self.progress)

    def _log(self):
        self._tick()
        step, rate = self.progress.step, self.clock.rate(self.progress)
        line = log_lines.training(self.run, self.state, self.progress, rate)
        self.record.log(line)
        judged = guard.judged(*self._judged())
        self.progress = dataclasses.replace(self.progress, guard=judged)
        if scales := log_lines.scales(self.state):
            self.record.log({"step": step, **scales}, SCALES)
        self.progress = self._looks.read(self.progress)
        monitors = alarm.seen_by(self.run, self.state)
        if amaxes := log_lines.amaxes(self.state) | log_lines.monitors(monitors):
            self.record.log({"step": step, **amaxes}, AMAXES)
        self.display.numbers(step, line)
        seen = metrics.init_like(self.state.metrics)
        self.state = dataclasses.replace(self.state, metrics=seen)
        self.clock.mark(self.progress)
        self._refuse_skipping()
        if change := heeded(self.run, self.progress, monitors, self.display.say):
            self._heed(change)

    def _heed(self, change: replan.Change):
        """Follows what new alarms ask for: lower rates, another plan, or nothing."""
        self.progress = change.progress
        self._set_rates()
        if change.said and not self._ends():
            self._change(change)

    def _set_rates(self):
        """Trains on at the rates of `progress`."""
        lr_scale = jnp.asarray(self.progress.plateau.lr_scale, jnp.float32)
        self.state = dataclasses.replace(self.state, lr_scale=lr_scale)

    def _judged(self) -> tuple[guard.Guard, Run, TrainState, int]:
        """Returns what the guard judges."""
        return self.progress.guard, self.run, self.state, self.progress.step

    def _refuse_skipping(self):
        limit = self.run.config.loop.max_skipped_steps
        guard.refuse_skipping(self.state, self.progress.step, limit)

    def _explained(self, symptom: Diverged) -> Diverged:
        self.checkpoints.wait()
        self._sync()
        return guard.explained(
            symptom,
            self.run,
            self.state,
            self.progress.step,
            batch=self.run.fetched(self._batch),
            saved=self.checkpoints.latest_step(),
        )

    def _go_back(self, error: Diverged) -> bool:
        """Continues from the newest checkpoint; returns False if that is not wanted."""
        moment = host_state.gone_back(error, self.checkpoints, self.run, self.progress)
        if moment is None:
            return False
        self.run, self.state, self.progress = moment
        self.display.say(self.progress.returns[-1])
        self.best.drop_after(self.progress.step)
        self.record.truncate(self.progress.step)
        self.clock.rewind(self.progress)
        self._looks.drop()
        self._scales_initialized = False
        return True

    def _sync(self):
        """Makes the tables of all groups equal, before they are read."""
        self.state = self.run.placement.sync(self.state)

    def evaluate(self):
        """Evaluates the state, keeps it if it is the best, and lowers rates."""
        self._tick()
        self._refuse_skipping()
        self._sync()
        with self.display.doing("evaluating"):
            evaluated = evaluate(self.run, self.state, self._held_out())
        line = log_lines.evaluation(self.progress, logged(evaluated))
        self.record.log(line)
        self.display.evaluation(self.progress.step, line)
        plateau, optim = self.progress.plateau, self.run.config.optim
        after = plateau.after(log_lines.measure(line, optim), optim)
        self.progress = dataclasses.replace(self.progress, plateau=after)
        if after.best != plateau.best:
            self.progress = dataclasses.replace(self.progress, best=line)
            if optim.plateau_patience is not None:
                with self.display.doing("saving"):
                    meta = host_state.as_meta(self.run, self.progress)
                    self.best.save(self.progress.step, self.state, meta)
        self._set_rates()
        if confirm.is_due(self.run, self.progress) and not self._ends():
            self._confirm(evaluated)
        self.clock.restart()

    def _confirm(self, evaluated: Evaluated):
        """Compares FP8 of the plan with bfloat16 on the same validation examples."""
        plain = confirm.in_bfloat16(self.run)
        with self.display.doing("evaluating in bfloat16"):
            in_bf16 = evaluate(plain, self.state, self._held_out())
        said, change = confirm.confirmed(self.run, self.progress, evaluated, in_bf16)
        if change.said:
            self._change(change)
            return
        self.display.say(said)
        self.progress = change.progress

    def _held_out(self) -> Dataset:
        return held_out(self.run, 0 if self._ends() else self.progress.position.step)

    def _save(self):
        """Saves the state, unless it is not healthy: older checkpoints may be."""
        self._tick()
        self._sync()
        self.progress = self._looks.read(self.progress)
        if not guard.is_healthy(*self._judged()):
            self.display.say(
                f"step {self.progress.step:,}: not saved, as the loss is out of bounds."
            )
            return
        with self.display.doing("saving"):
            self.best.wait()  # so that a kill cannot lose a checkpoint's best state
            meta = host_state.as_meta(self.run, self.progress)
            self.checkpoints.save(self.progress.step, self.state, meta)
        self.clock.restart()
