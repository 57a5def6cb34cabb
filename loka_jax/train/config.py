"""The configuration of a training run: frozen dataclasses, checked when created.

A run is described by data alone, so that it can be printed, compared and repeated.
Options of a single execution (where to write, whether to resume) are in `RunOptions`
and are not part of a run's identity.
"""

import dataclasses
import hashlib
import inspect
import json
import pathlib
import re
from collections.abc import Collection, Iterator
from typing import Annotated, Any, Literal

import tyro
from flax import linen

from loka_jax.data import DataConfig
from loka_jax.dispatch.policy import DEFAULT_LIMITS, Limits
from loka_jax.models import (
    Dcnv2,
    Dhen,
    DhenDlrm,
    Dlrm,
    Hstu,
    Mmoe,
    RankingModel,
    Wukong,
)
from loka_jax.nn import Converted, ProbeConfig
from loka_jax.optim import OptimConfig
from loka_jax.options import option_of, require
from loka_jax.probe.live_errors import RECIPES
from loka_jax.recipe import get_recipe
from loka_jax.train.mesh.devices import (
    CollectivesConfig,
    MeshConfig,
    require_averages,
)
from loka_jax.train.tables.embedding_config import EmbeddingConfig

LOOK_EVERY = 64  # steps, by default
_LONGEST_WATCH = 1_000_000  # seconds; a thread cannot wait for ever
# Observed steps from one update of weights' covariances to the next: they cost more
# than all other statistics together.
_COVARIANCES_EVERY = 20
_OBSERVED_BEFORE_REVIEW = 5  # observed steps after the first: errors vary little
_OFTEN = 4  # times as often a run is observed before its first review
FLAX_FIELDS = {"parent", "name"}  # of a module, which are Flax's own
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """How often a run looks at its sites, and what it learns of them.

    Attributes:
        every: every so many steps the operands of FP8 sites are looked at, for their
            drift, and the statistics of all sites are learned, four times as often
            before the first review of the plan; 0 for never. None looks every 64th
            step, and learns there only in a run in one process whose FP8 that lacks
            known errors alone would save more than entering it takes.
        decay: factor on the weight of earlier rows at every observed batch.
        recipes: whose products are multiplied on the operands themselves, to measure
            their errors: at every site, whatever runs there.
    """

    every: int | None = None
    decay: float = 0.7
    recipes: tuple[str, ...] = RECIPES

    def __post_init__(self):  # noqa: D105
        every = self.every
        require(every is None or every >= 0, "--probe.every", every, "at least 0")
        ProbeConfig(decay=self.decay, recipes=self.recipes)  # which refuses others

    @property
    def look_every(self) -> int:
        """Steps from one look at operands to the next; 0 for no looks."""
        return LOOK_EVERY if self.every is None else self.every

    def config_at(self, step: int) -> ProbeConfig | None:
        """Returns how sites are observed in a step; None if they are not."""
        if not self.every or (step % self.every and not self._is_early(step)):
            return None
        return ProbeConfig(
            decay=self.decay,
            recipes=self.recipes,
            moves_weight_covariances=step % (self.every * _COVARIANCES_EVERY) == 0,
        )

    def first_review(self) -> int | None:
        """Returns the number of steps after which live errors are first reviewed."""
        return self._early * _OBSERVED_BEFORE_REVIEW + 1 if self.every else None

    @property
    def _early(self) -> int:
        """Steps from one observed step to the next before the first review."""
        return max(1, (self.every or 0) // _OFTEN)

    def _is_early(self, step: int) -> bool:
        is_before = step <= self._early * _OBSERVED_BEFORE_REVIEW
        return is_before and step % self._early == 0


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
            prediction, before it runs on a device for the first time.
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
        tensorboard: write TensorBoard events too (needs the extra `report`).
        require_gpu: exit with an error if there is no GPU.
        watchdog: seconds without a step after which one of several processes ends, as
            another is stuck.
    """

    workdir: pathlib.Path | None = None
    resume: bool = False
    print_config: bool = False
    dry_run: bool = False
    profile: str | None = None
    tensorboard: bool = False
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A training run; a subclass for each model family sets the model.

    Attributes:
        name: name of the configuration, which names the folders of its runs.
        seed: seed of initial weights, dropout, the order of examples and generated
            data.
        data: the source of the examples.
        embedding: the tables.
        optim: optimizers and schedules.
        loop: the training loop.
        probe: Probe's observation of sites.
        plan: "auto" chooses what runs at each site by what is known of this GPU's
            speed, measured or predicted; "tune" measures first what is not; a file is a
            table or a plan; "off" runs every site in the model's recipe.
        dispatch: rules and limits of that choice.
        mesh: several devices.
        collectives: what is summed over them, and how it travels.
        init_from: the folder of a run to go on from, with the data of a later day: with
            its weights, its optimizer states, its plan and its vocabulary.
        run: options of this execution only.
    """

    name: Annotated[str, tyro.conf.Suppress]
    model: RankingModel
    seed: int = 0
    data: DataConfig = DataConfig()
    embedding: EmbeddingConfig = EmbeddingConfig()
    optim: OptimConfig = OptimConfig()
    loop: LoopConfig = LoopConfig()
    probe: ProbeOptions = ProbeOptions()
    plan: str = "auto"
    dispatch: DispatchOptions = DispatchOptions()
    mesh: MeshConfig = MeshConfig()
    collectives: CollectivesConfig = CollectivesConfig()
    init_from: pathlib.Path | None = None
    run: Annotated[RunOptions, tyro.conf.OmitArgPrefixes] = RunOptions()

    def __post_init__(self):  # noqa: D105
        is_plain = re.fullmatch(r"\w[\w.-]*", self.name) is not None
        require(is_plain, "name", self.name, "letters, digits and any of _ . -")
        require(0 <= self.seed < 2**31, "--seed", self.seed, "in 0..2147483647")
        _check_kind(self.model)
        get_recipe(self.model.recipe)
        _check_model(self.model)
        require_averages(self.mesh, self.optim, self.embedding)
        count, every = self.loop.steps_per_call, self.mesh.sync_every
        if count > 1 and every > 1:
            raise ValueError(
                f"--loop.steps-per-call {count} cannot be with --mesh.sync-every "
                f"{every}: groups average their rows between calls. Make one of them 1."
            )

    def observed(self) -> "Config":
        """Returns the configuration with Probe, as often as a plan has it observe."""
        probe = dataclasses.replace(self.probe, every=LOOK_EVERY)
        return dataclasses.replace(self, probe=probe)

    def identity(self) -> dict[str, Any]:
        """Returns the configuration without `run`, as JSON values."""
        return _as_json(self, {name for name, _ in _fields(self)} - {"run"})

    def source(self, data: dict[str, Any]) -> str:
        """Returns the name of the run's operands in tables: `NAME@DIGEST`.

        The digest is of all that decides them: the data's identity, model, tables,
        optimizer, and the rows of a product. Another seed draws others of the same
        operands. Options at their default are left out, so that one can be added.
        """
        parts = self.model, self.embedding, self.optim
        rows = self.loop.batch_size, self.loop.microbatches
        values = [_without_seeds(data), *map(_unlike_default, parts), *rows]
        text = json.dumps(values, sort_keys=True)
        return f"{self.name}@{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DlrmConfig(Config):
    """A run of a DLRM."""

    model: Annotated[Dlrm, tyro.conf.OmitArgPrefixes] = Dlrm()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dcnv2Config(Config):
    """A run of a DCN V2."""

    model: Annotated[Dcnv2, tyro.conf.OmitArgPrefixes] = Dcnv2()


@dataclasses.dataclass(frozen=True, kw_only=True)
class MmoeConfig(Config):
    """A run of an MMoE, or of a shared bottom."""

    model: Annotated[Mmoe, tyro.conf.OmitArgPrefixes] = Mmoe()


@dataclasses.dataclass(frozen=True, kw_only=True)
class WukongConfig(Config):
    """A run of a Wukong."""

    model: Annotated[Wukong, tyro.conf.OmitArgPrefixes] = Wukong()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DhenConfig(Config):
    """A run of a DHEN."""

    model: Annotated[Dhen, tyro.conf.OmitArgPrefixes] = Dhen()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DhenDlrmConfig(Config):
    """A run of a mix of DHEN, DLRM and DCN V2."""

    model: Annotated[DhenDlrm, tyro.conf.OmitArgPrefixes] = DhenDlrm()


@dataclasses.dataclass(frozen=True, kw_only=True)
class HstuConfig(Config):
    """A run of an HSTU on an event log."""

    model: Annotated[Hstu, tyro.conf.OmitArgPrefixes] = Hstu()


def _check_kind(model: Any):
    """Refuses what training cannot call, as a function of a user's file may give."""
    kind = type(model).__name__
    if not isinstance(model, linen.Module) or isinstance(model, Converted):
        raise ValueError(
            f"the model is a {kind}, and must be a Flax Linen module, such as a "
            "RankingModel of loka_jax.models; what nn.convert returns, and NNX models, "
            "are for training loops of your own."
        )
    if not isinstance(getattr(model, "recipe", None), str):
        raise ValueError(
            f"the model, a {kind}, has no field `recipe` with the name of a recipe: "
            "add `recipe: str = 'bf16'`, or extend RankingModel of loka_jax.models."
        )
    signature = inspect.signature(type(model).__call__)
    inputs = ["dense_features", "embeddings"]
    inputs += ["events"] if getattr(model, "takes_events", False) else []
    names = ", ".join(inputs)
    try:
        for options in ({}, {"train": True}):
            signature.bind(model, *inputs, **options)
    except TypeError as error:
        raise ValueError(
            f"the model, a {kind}, is called as ({names}), in training with "
            f"train=True, which its __call__ does not take ({error}): make it "
            f"`def __call__(self, {names}, *, train=False)`."
        ) from None


def _check_model(model: RankingModel):
    for name in ("dropout_rate", "layer_dropout_rate", "input_dropout_rate"):
        rate = getattr(model, name, 0.0)
        require(0 <= rate < 1, option_of(name), rate, "in [0, 1)")
    for field in dataclasses.fields(model):
        value, option = getattr(model, field.name), option_of(field.name)
        if isinstance(value, tuple):
            require(all(width >= 1 for width in value), option, value, "positive")
        elif isinstance(value, int) and not isinstance(value, bool):
            require(value >= 1, option, value, "at least 1")


def _unlike_default(value: Any) -> dict[str, Any]:
    """Returns a dataclass as JSON values, without fields at their default."""
    names = {
        name for name, field in _fields(value) if getattr(value, name) != field.default
    }
    return {"kind": type(value).__name__} | _as_json(value, names)


def _without_seeds(value: Any) -> Any:
    """Returns nested dicts without what draws examples of one distribution."""
    if not isinstance(value, dict):
        return value
    return {k: _without_seeds(x) for k, x in value.items() if k != "seed"}


def _as_json(value: Any, names: Collection[str] | None = None) -> Any:
    """Returns JSON values, of the named fields of a dataclass; a model has its kind."""
    if dataclasses.is_dataclass(value):
        is_model = isinstance(value, linen.Module)
        kind = {"kind": type(value).__name__} if is_model else {}
        names = [name for name, _ in _fields(value)] if names is None else names
        return kind | {name: _as_json(getattr(value, name)) for name in sorted(names)}
    if isinstance(value, tuple | list):
        return [_as_json(item) for item in value]
    return str(value) if isinstance(value, pathlib.Path) else value


def _fields(value: Any) -> Iterator[tuple[str, dataclasses.Field]]:
    """Yields the fields of a dataclass by name, but for Flax's own."""
    is_model = isinstance(value, linen.Module)
    for field in dataclasses.fields(value):
        if not (is_model and field.name in FLAX_FIELDS):
            yield field.name, field
