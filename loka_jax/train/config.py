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
from typing import Annotated, Any

import tyro
from flax import linen

from loka_jax.data import DataConfig
from loka_jax.models import (
    Dcnv2,
    Dhen,
    DhenDlrm,
    Dlrm,
    Hstu,
    InterFormer,
    Mmoe,
    OneTrans,
    OwnModel,
    RankingModel,
    Wukong,
)
from loka_jax.nn import Converted
from loka_jax.optim import OptimConfig
from loka_jax.options import option_of, require
from loka_jax.recipe import get_recipe
from loka_jax.train.loop_options import (
    LOOK_STEPS,
    DispatchOptions,
    LoopConfig,
    ProbeOptions,
    RunOptions,
)
from loka_jax.train.mesh.devices import CollectivesConfig, MeshConfig, require_averages
from loka_jax.train.tables.embedding_config import EmbeddingConfig

FLAX_FIELDS = {"parent", "name"}  # of a module, which are Flax's own


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
        metrics: further measures of evaluations, as NAME=module:function of functions
            of your own, see `loka_jax.train.own_functions`.
        calibrate: fits a line to the logits of the validation rows when training has
            ended, through which all later logits go: in prediction, exports and
            servers, too.
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
    metrics: tuple[str, ...] = ()
    calibrate: bool = False
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

    def observed(self, begin: int, recipes: tuple[str, ...]) -> "Config":
        """Returns the configuration with Probe, as a plan chose it."""
        probe = dataclasses.replace(self.probe, begin=begin, recipes=recipes)
        return dataclasses.replace(self, probe=probe)

    def identity(self) -> dict[str, Any]:
        """Returns the configuration without `run`, as JSON values."""
        return _as_json(self, {name for name, _ in _fields(self)} - {"run"})

    def steps_at_once(self, step: int, steps_per_epoch: int, end: int) -> int:
        """Returns the number of steps of the next call: `loop.steps_per_call` or 1.

        A call costs the host hundreds of microseconds, whatever it computes. What the
        loop does between steps (log lines, evaluations, looks, profiles) ends a call,
        so that runs do the same at the same steps, and steps that Probe observes are
        taken one by one. `step` have been taken, of `end`.
        """
        loop, traced = self.loop, self.run.profile_steps()
        after = step + loop.steps_per_call
        if after > end:
            return 1
        every = (
            loop.log_every,
            loop.eval_every or steps_per_epoch,
            loop.save_every or after,
            self.probe.look_every or after,
            LOOK_STEPS,
        )
        is_interrupted = any(step // n != (after - 1) // n for n in every)
        is_alone = is_interrupted or any(
            self.probe.config_at(s) is not None or s in traced
            for s in range(step, after)
        )
        return 1 if is_alone else loop.steps_per_call

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneTransConfig(Config):
    """A run of a OneTrans on an event log."""

    model: Annotated[OneTrans, tyro.conf.OmitArgPrefixes] = OneTrans()


@dataclasses.dataclass(frozen=True, kw_only=True)
class InterFormerConfig(Config):
    """A run of an InterFormer on an event log."""

    model: Annotated[InterFormer, tyro.conf.OmitArgPrefixes] = InterFormer()


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnConfig(Config):
    """A run of a model of a user's own."""

    model: Annotated[OwnModel, tyro.conf.OmitArgPrefixes] = OwnModel()


def _check_kind(model: Any):
    """Refuses what training cannot call, as a function of a user's file may give."""
    kind = type(model).__name__
    if not isinstance(model, linen.Module) or isinstance(model, Converted):
        raise ValueError(
            f"the model is a {kind}, and must be a Flax Linen module, such as a "
            "RankingModel of loka_jax.models, or own_model(...) of them for any other "
            "of Linen or NNX; what nn.convert returns is for loops of your own."
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
    scale = getattr(model, "input_scale", 1.0)
    require(1e-6 <= scale <= 1e6, "--input-scale", scale, "in 1e-6..1e6")
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
