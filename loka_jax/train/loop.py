"""The training loop: steps, evaluations, log lines, checkpoints.

The loop waits for the device only every few steps, so that steps are queued ahead. The
numerics are in `step.py`; a checkpoint holds `TrainState` and `Progress`.
"""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp

from loka_jax.data.batch import Batch, Dataset, Position, next_position
from loka_jax.data.prefetch import Prefetcher
from loka_jax.dispatch.drift import Watch, amax_ratio
from loka_jax.nn import by_path
from loka_jax.optim import Plateau
from loka_jax.recipe import OPERANDS
from loka_jax.site import BF16
from loka_jax.train import metrics
from loka_jax.train.build import Run
from loka_jax.train.checkpoint import Checkpoints
from loka_jax.train.profiler import Profiler
from loka_jax.train.progress import TrainingProgress
from loka_jax.train.record import RunRecord
from loka_jax.train.signals import StopRequest
from loka_jax.train.state import TrainState
from loka_jax.train.step import named_sites, scales_initialized

# An operand that is always zero never initializes its scale, so after this many steps
# the guard for first steps is dropped in any case (scaling.delayed_scale_inv).
_MAX_FIRST_STEPS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """The host's state of a run; saved with the device's state.

    Attributes:
        step: steps taken, including skipped ones.
        position: position of the next batch.
        examples: training examples seen.
        seconds: time spent training, without evaluations and checkpoints.
        plateau: the state of the plateau schedule and of early stopping.
        best: the evaluation with the best AUC so far, as in metrics.jsonl.
        demotions: a sentence for each site that fell back to bfloat16.
    """

    step: int = 0
    position: Position
    examples: int = 0
    seconds: float = 0.0
    plateau: Plateau = Plateau()
    best: dict[str, Any] | None = None
    demotions: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the progress as JSON values."""
        return dataclasses.asdict(self) | {"position": list(self.position)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Progress":
        """Returns the progress from the values of `to_json`."""
        position = Position(*data["position"])
        plateau = Plateau(**data["plateau"])
        demotions = tuple(data.get("demotions", ()))
        read = {"position": position, "plateau": plateau, "demotions": demotions}
        return cls(**data | read)


class TrainingFailed(Exception):
    """Training cannot continue, for a reason other than a wrong option."""


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
        self._watch = Watch()
        self._drifted: dict[str, str] = {}
        self._since = time.perf_counter()
        self._logged = (progress.examples, progress.seconds)
        self._warm: tuple[int, float] | None = None

    def train(self, stop: StopRequest):
        """Trains to the end or until `stop` is set, and saves before it returns.

        Raises:
            TrainingFailed: if too many steps in a row were not finite.
            OSError: if a checkpoint could not be written.
        """
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
                if self._is_due(loop.log_every):
                    self._log()
                if self._evaluation_is_due():
                    self._evaluate()
                    self._demote_drifted()
                if self._save_is_due():
                    self._save()
                if stop.is_set or self.progress.plateau.stop:
                    break
        self._save()
        self._checkpoints.wait()

    def best_state(self) -> tuple[int, TrainState]:
        """Returns the state with the best validation AUC if it was saved, or the last.

        It is saved if `plateau_patience` is set, as in the BARS benchmark.

        Returns:
            the number of steps that the state has seen, and the state.
        """
        if self._best.latest_step() is None:
            return self.progress.step, self.state
        step, state, _ = self._best.restore(self.state)
        return step, state

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
        # A checkpoint of the current step still belongs to the previous plan.
        self._demote(dict.fromkeys(kernels, reason), self.progress.step + 1)
        return True

    def _watch_drift(self):
        """Records the sites whose operands have drifted from the measured ones."""
        choices = dict(self.run.plan.choices)
        sites = {
            path: amax_ratio(site, choices[path].recipe.margin)
            for path, site in named_sites(self.state).items()
            if path in choices and choices[path].is_fp8
        }
        ratios = {path: float(x) for path, x in jax.device_get(sites).items()}
        self._drifted |= self._watch.look(ratios)

    def _demote(self, reasons: dict[str, str], first_checkpoint: int):
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
        self._record.write_plan(plan, first_checkpoint)

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
        if scales := _scales(self.state):
            self._record.log_scales(progress.step, scales)
        self._watch_drift()
        if amaxes := _amaxes(self.state):
            self._record.log_amaxes(progress.step, amaxes)
        self._display.numbers(progress.step, line)
        self.state = dataclasses.replace(self.state, metrics=metrics.init())
        self._logged = (progress.examples, progress.seconds)
        self._warm = self._warm or self._logged
        self._refuse_endless_skipping()

    def _refuse_endless_skipping(self):
        skipped = int(self.state.skipped_in_a_row)
        if skipped < self.run.config.loop.max_skipped_steps:
            return
        raise TrainingFailed(
            f"the last {skipped} steps up to step {self.progress.step} were skipped, "
            "because their loss or gradients were not finite: lower --optim.lr or "
            "--optim.rows-lr, or set --optim.clip-norm 10."
        )

    def _evaluate(self):
        self._tick()
        self._refuse_endless_skipping()
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
        if self._drifted and not self._ends():
            self._demote(self._drifted, self.progress.step)
        self._drifted = {}

    def _save(self):
        self._tick()
        self._best.wait()  # so that a kill cannot lose the best state of a checkpoint
        self._checkpoints.save(self.progress.step, self.state, self._meta())
        self._since = time.perf_counter()

    def _meta(self) -> dict[str, Any]:
        config = self.run.config.identity()
        return {"progress": self.progress.to_json(), "config": config}

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


def _scales(state: TrainState) -> dict[str, float]:
    """Returns the scale_inv of every operand of the sites with delayed scaling."""
    sites = named_sites(state)
    return _by_operand({path: site.scale_inv for path, site in sites.items()})


def _amaxes(state: TrainState) -> dict[str, float]:
    """Returns the amaxes of the batch observed last, by site and operand."""
    return _by_operand(
        {
            path: [getattr(stats, operand).tails.last_amax for operand in OPERANDS]
            for path, stats in by_path(state.probe).items()
        }
    )


def _restricted(tree: Any, template: Any) -> Any:
    """Returns the entries of nested dicts that a template has too."""
    if not isinstance(template, dict):
        return tree
    return {name: _restricted(tree[name], inner) for name, inner in template.items()}


def _by_operand(tables: dict[str, Any]) -> dict[str, float]:
    """Returns the entries of tables with one per operand, by "site/operand"."""
    tables = jax.device_get(tables)
    return {
        f"{path}/{operand}": float(table[i])
        for path, table in tables.items()
        for i, operand in enumerate(OPERANDS)
    }
