"""Options of the training loop, of Probe, of Dispatch and of one execution."""

import dataclasses
import pathlib
from typing import Any, Literal

from loka_jax.dispatch.policy import DEFAULT_LIMITS, Limits
from loka_jax.nn import ProbeConfig
from loka_jax.options import option_of, require
from loka_jax.probe.live_errors import RECIPES
from loka_jax.probe.site import ErrorsAlone

LOOK_EVERY = 64  # steps, by default
FIRST_LOOK = 1024  # the step, by default: its program is compiled meanwhile
LOOK_STEPS = 8  # from one look at delayed scales to the next
_LONGEST_WATCH = 1_000_000  # seconds; a thread cannot wait for ever
# Observed steps from one update of weights' covariances to the next: they cost more
# than all other statistics together.
_COVARIANCES_EVERY = 20
_OBSERVED_BEFORE_REVIEW = 5  # observed steps after the first: errors vary little
_OFTEN = 4  # times as often a run is observed before its first review
_MAX_BATCH_SIZE = 2**22  # its product with the number of fields must fit int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The training loop.

    Attributes:
        batch_size: examples in a step.
        microbatches: parts of a batch whose gradients are accumulated.
        steps_per_call: steps that a device takes for each call of the host, where
            nothing is due between them. The same steps, bit for bit; more of them pay
            where the host takes longer for a call than the device for a step.
        epochs: maximum number of passes over the training data.
        max_steps: maximum number of steps; None for all steps of the epochs.
        eval_every: steps between evaluations; None to evaluate after each epoch.
        log_every: steps between lines in metrics.jsonl; calls of several steps end at
            them.
        save_every: steps between checkpoints; None to save after each evaluation.
        keep_checkpoints: number of newest checkpoints to keep.
        max_skipped_steps: skipped steps in a row after which the run stops.
        on_divergence: "stop" ends the run when its loss diverges; "go_back" continues
            from the newest checkpoint with half the learning rates, without the
            examples up to the divergence, three times at most.
        on_alarm: what an alarm of Probe's monitors does: "log" says it; "demote" also
            runs its site in bfloat16 from then on; "slow" also halves the learning
            rates, three times at most; "stop" ends the run, with the checkpoints from
            before. Monitors are seen where Probe learns, see `ProbeOptions`.
    """

    batch_size: int = 8192
    microbatches: int = 1
    steps_per_call: int = 1
    epochs: int = 1
    max_steps: int | None = None
    eval_every: int | None = None
    log_every: int = 64
    save_every: int | None = None
    keep_checkpoints: int = 2
    max_skipped_steps: int = 20
    on_divergence: Literal["stop", "go_back"] = "stop"
    on_alarm: Literal["log", "demote", "slow", "stop"] = "log"

    def __post_init__(self):  # noqa: D105
        for name, value in vars(self).items():
            if isinstance(value, int):
                require(value >= 1, option_of(f"loop.{name}"), value, "at least 1")
        require(
            self.batch_size <= _MAX_BATCH_SIZE,
            "--loop.batch-size",
            self.batch_size,
            f"at most {_MAX_BATCH_SIZE}",
        )
        if self.batch_size % self.microbatches:
            raise ValueError(
                f"--loop.batch-size {self.batch_size} must be a multiple of "
                f"--loop.microbatches {self.microbatches}."
            )

    @property
    def calls(self) -> tuple[int, ...]:
        """The numbers of steps that calls take; each is a program of its own."""
        return tuple(sorted({1, self.steps_per_call}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """How often a run looks at its sites, and what it learns of them.

    Attributes:
        every: every so many steps the operands of FP8 sites are looked at, for their
            drift, and the statistics of all sites are learned, four times as often
            before the first review of the plan; 0 for never. None looks every 64th
            step from step 1,024 on, and learns errors alone, from `begin` on.
        begin: the first step at which something is learned. None is the first one with
            `every`; without, a plan that lacks the errors of faster FP8 chooses it.
        decay: factor on the weight of earlier rows at every observed batch.
        recipes: whose products are multiplied on the operands themselves, to measure
            their errors: at every site, whatever runs there.
    """

    every: int | None = None
    begin: int | None = None
    decay: float = 0.7
    recipes: tuple[str, ...] = RECIPES

    def __post_init__(self):  # noqa: D105
        for name in ("every", "begin"):
            value = getattr(self, name)
            least = value is None or value >= 0
            require(least, option_of(f"probe.{name}"), value, "at least 0")
        ProbeConfig(decay=self.decay, recipes=self.recipes)  # which refuses others

    @property
    def look_every(self) -> int:
        """Steps from one look at operands to the next; 0 for no looks."""
        return LOOK_EVERY if self.every is None else self.every

    @property
    def first_look(self) -> int:
        """The first step at which operands may be looked at."""
        return FIRST_LOOK if self.every is None else 1

    @property
    def observe_every(self) -> int:
        """Steps from one observed step to the next; 0 for none."""
        if self.every is not None:
            return self.every
        return 0 if self.begin is None else LOOK_EVERY

    def first(self) -> ProbeConfig | ErrorsAlone | None:
        """Returns how sites are observed at first; None if they never are."""
        return self.config_at(self._start)

    def config_at(self, step: int) -> ProbeConfig | ErrorsAlone | None:
        """Returns how sites are observed before a step; None if they are not."""
        every = self.observe_every
        if not every or step < self._start:
            return None
        if step % every and not self._is_early(step):
            return None
        learned: Any = dict(decay=self.decay, recipes=self.recipes)
        if self.every is None:
            return ErrorsAlone(**learned)
        # A first weight has not moved: short runs compile one program.
        steps = step - self._start
        is_rare = steps > 0 and steps % (every * _COVARIANCES_EVERY) == 0
        return ProbeConfig(**learned, moves_weight_covariances=is_rare)

    @property
    def first_move(self) -> int:
        """The first step at which covariances of weights may be updated."""
        return self._start + self.observe_every * _COVARIANCES_EVERY

    def first_review(self) -> int | None:
        """Returns the number of steps after which live errors are first reviewed."""
        if not self.observe_every:
            return None
        return self._start + self._early * _OBSERVED_BEFORE_REVIEW + 1

    @property
    def _start(self) -> int:
        return self.begin or 0

    @property
    def _early(self) -> int:
        """Steps from one observed step to the next before the first review."""
        return max(1, self.observe_every // _OFTEN)

    def _is_early(self, step: int) -> bool:
        steps = step - self._start
        is_before = steps <= self._early * _OBSERVED_BEFORE_REVIEW
        return is_before and steps % self._early == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DispatchOptions:
    """How Dispatch chooses what runs at a site.

    Attributes:
        rules: "PATTERN=CHOICE" sets the choice of all sites whose path matches,
            whatever the table says, as in "head=f32" or "top_mlp/*=pallas fp8_rowwise";
            the last rule that matches counts.
        limits: limits on errors and speed.
        tune_seconds: the budget of `--plan tune`.
        check_seconds: the budget of checking and timing what a plan chose by
            prediction, before it runs on a device for the first time; twice as much
            beside a run that trains.
    """

    rules: tuple[str, ...] = ()
    limits: Limits = DEFAULT_LIMITS
    tune_seconds: float = 90.0
    check_seconds: float = 60.0

    def __post_init__(self):  # noqa: D105
        for name in ("tune_seconds", "check_seconds"):
            value = getattr(self, name)
            require(value > 0, option_of(f"dispatch.{name}"), value, "positive")
        for rule in self.rules:
            pattern, is_rule, choice = rule.partition("=")
            require(
                bool(pattern and is_rule and choice),
                "--dispatch.rules",
                rule,
                "PATTERN=CHOICE, for example head=bf16",
            )

    @property
    def by_pattern(self) -> dict[str, str]:
        """The choices by pattern."""
        return dict(rule.split("=", 1) for rule in self.rules)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of this execution, which are not part of the run's identity.

    Attributes:
        workdir: folder for everything the run writes; None for one under runs/ named
            after configuration, recipe and seed.
        resume: continue from the newest checkpoint in the workdir.
        print_config: print the configuration as JSON and exit.
        dry_run: build, list the sites, compile one step, and exit.
        profile: START:STEPS writes a profiler trace of those steps into the workdir.
        track: trackers that take the numbers of the run, too, each of them an extra.
        require_gpu: exit with an error if there is no GPU.
        watchdog: seconds without a step after which one of several processes ends, as
            another is stuck.
    """

    workdir: pathlib.Path | None = None
    resume: bool = False
    print_config: bool = False
    dry_run: bool = False
    profile: str | None = None
    track: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = ()
    require_gpu: bool = False
    watchdog: float = 300.0

    def __post_init__(self):  # noqa: D105
        holds = 0 < self.watchdog <= _LONGEST_WATCH
        at_most = f"positive and at most {_LONGEST_WATCH:,}"
        require(holds, "--watchdog", self.watchdog, at_most)
        if self.profile is not None:
            self.profile_steps()

    def profile_steps(self) -> range:
        """Returns the steps to trace; none without `profile`."""
        if self.profile is None:
            return range(0)
        start, _, count = self.profile.partition(":")
        if not (start.isdecimal() and count.isdecimal() and int(count) > 0):
            raise ValueError(
                f"--profile {self.profile!r} must be START:STEPS, for example 100:5."
            )
        return range(int(start), int(start) + int(count))
