"""What a search may choose: axes of options, and the configurations that they make.

    axis          options of train.py                        what it changes
    steps-per-call, mesh                                     speed alone
    batch-size, microbatches, recipe, mods, table-dtype,     what is learned, too
    wire, gradient-wire, sync

An axis that changes what is learned belongs to a space only if the user names it. A
combination that the configuration itself refuses is left out, with its sentence.
"""

import contextlib
import dataclasses
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_type_hints

import jax

from loka_jax import jsonfile
from loka_jax.fitting import changed, field_of
from loka_jax.options import did_you_mean
from loka_jax.train.config import Config
from loka_jax.train.mesh.devices import group_counts, mesh_of, shape_of
from loka_jax.train.plan_files import AUTO, OFF

OWN = "own"  # the value of an axis that leaves its options as they are

type Texts = Mapping[str, str]  # of options, which are set in this order


class Axis(NamedTuple):
    """What is chosen together: by the name of each value, what it sets.

    Attributes:
        own: the value that the user's configuration has.
    """

    name: str
    values: Mapping[str, Mapping[str, Any]]
    own: str


class Point(NamedTuple):
    """A configuration of a space, and the value of each axis by its name."""

    choices: dict[str, str]
    config: Config


@dataclasses.dataclass(frozen=True)
class _Known:
    """An axis that has a name.

    Attributes:
        values: from the configuration and the number of devices to its usual values.
        settings: from the name of a value to what it sets.
        why_named: what it changes, so that a user must name it; None for speed alone.
    """

    values: Callable[[Config, int], Sequence[object]]
    settings: Callable[[str], Texts]
    why_named: str | None = None


def _option(name: str) -> Callable[[str], Texts]:
    return lambda text: {name: text}


def _mesh(text: str) -> Texts:
    replicas, _, shards = text.partition("x")
    return {"mesh.replicas": replicas, "mesh.shards": shards}


def _recipe(text: str) -> Texts:
    return {"plan": AUTO} if text == AUTO else {"recipe": text, "plan": OFF}


def _mods(text: str) -> Texts:
    mods = {
        "none": {"bias": "True", "norm": "none", "activation": "relu"},
        "loka": {"bias": "False", "norm": "block", "activation": "hard_swish"},
    }
    if text not in mods:
        raise ValueError(f"--space mods={text} must be one of {', '.join(mods)}.")
    return mods[text]


def _wire(text: str) -> Texts:
    return {"mesh.wire-rows": text, "mesh.wire-gradients": text}


def _sync(text: str) -> Texts:
    if text == "gradients":
        return {"mesh.sync-every": "1", "mesh.sync": text}
    return {"mesh.sync": "weights", "mesh.sync-every": text}


def _over(values: Sequence[str]) -> Callable[[Config, int], Sequence[str]]:
    """Returns the values of an axis that one device does not have."""
    return lambda _, devices: values if devices > 1 else ()


def _meshes(_: Config, devices: int) -> Sequence[str]:
    shapes = [f"{n}x{devices // n}" for n in group_counts(devices)]
    return ["1x1", *shapes] if devices > 1 else []


_ROUNDS = "it rounds otherwise"
_STEPS = "other batches are other steps"
_RECIPES = ("bf16", "fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_bf16_drhs", AUTO)
KNOWN = {
    "steps-per-call": _Known(lambda *_: (1, 2, 4, 8), _option("loop.steps-per-call")),
    "mesh": _Known(_meshes, _mesh),
    "batch-size": _Known(
        lambda config, _: [config.loop.batch_size * n // 2 for n in (1, 2, 4, 8)],
        _option("loop.batch-size"),
        _STEPS,
    ),
    "microbatches": _Known(
        lambda *_: (1, 2, 4), _option("loop.microbatches"), "sums have another order"
    ),
    "recipe": _Known(lambda *_: _RECIPES, _recipe, _ROUNDS),
    "mods": _Known(lambda *_: ("none", "loka"), _mods, "it is another model"),
    "table-dtype": _Known(
        lambda *_: ("f32", "bf16"), _option("embedding.dtype"), _ROUNDS
    ),
    "wire": _Known(_over(("f32", "bf16", "e4m3", "int8")), _wire, _ROUNDS),
    "gradient-wire": _Known(
        _over(("f32", "bf16", "int8")), _option("collectives.gradients"), _ROUNDS
    ),
    "sync": _Known(
        _over(("gradients", "1", "4", "16")), _sync, "groups average their rows"
    ),
}


def axes_of(config: Config, entries: Sequence[str], devices: int) -> list[Axis]:
    """Returns the axes that change speed alone, and those that entries name.

    Args:
        entries: names of axes, as "recipe"; or axes or options with their values, as
            "recipe=bf16,fp8_rowwise" or "top-mlp=512 256,1024 512".
        devices: how many there are.

    Raises:
        ValueError: for an entry that is none of these.
    """
    asked = {entry.partition("=")[0]: entry.partition("=")[2] for entry in entries}
    exact = [name for name, known in KNOWN.items() if known.why_named is None]
    axes = []
    for name in dict.fromkeys([*exact, *asked]):
        known = KNOWN.get(name)
        texts = [text for text in asked.get(name, "").split(",") if text]
        if known is None and not texts:
            hint = did_you_mean(name, KNOWN)
            raise ValueError(
                f"--space {name} is no axis{hint}: use one of {', '.join(KNOWN)}, or "
                "OPTION=A,B,C."
            )
        settings = _option(name) if known is None else known.settings
        if not texts and known is not None:
            texts = [str(value) for value in known.values(config, devices)]
        if texts:
            axes.append(_axis(config, name, {x: settings(x) for x in texts}))
    return axes


def left_out(axes: Sequence[Axis]) -> dict[str, str]:
    """Returns the known axes that are left out because nobody named them, and why."""
    names = {axis.name for axis in axes}
    return {
        name: known.why_named
        for name, known in KNOWN.items()
        if known.why_named is not None and name not in names
    }


def points_of(
    config: Config, axes: Sequence[Axis]
) -> tuple[list[Point], dict[str, int]]:
    """Returns the configurations of a space, the user's own first.

    Also how many combinations are left out, by the sentence that refuses them.
    """
    own = {axis.name: axis.own for axis in axes}
    combined: list[dict[str, str]] = [{}]
    for axis in axes:
        values = dict.fromkeys([axis.own, *axis.values])
        combined = [one | {axis.name: x} for one in combined for x in values]
    points, refused = [Point(own, config)], Counter()
    for choices in combined:
        if choices == own:
            continue
        try:
            points.append(Point(choices, _configured(config, axes, choices)))
        except ValueError as error:
            refused[str(error)] += 1
    return points, dict(refused)


def _configured(
    config: Config, axes: Sequence[Axis], choices: Mapping[str, str]
) -> Config:
    """Returns a configuration with some choices; raises ValueError if it cannot be."""
    for axis in axes:
        if choices[axis.name] != axis.own:
            config = changed(config, axis.values[choices[axis.name]])
    loop = config.loop
    mesh = mesh_of(config.mesh, loop.batch_size, loop.microbatches)
    if config.data.is_log and loop.microbatches > 1:
        raise ValueError("batches of an event log have no microbatches.")
    if config.mesh.sync == "weights" and (mesh is None or mesh.shape["replica"] == 1):
        raise ValueError("there is one group of devices, and no weights to average.")
    return config


def with_mesh(config: Config) -> Config:
    """Returns a configuration that names the mesh which it has by default."""
    if jax.device_count() == 1:
        return config
    replicas, shards = shape_of(config.mesh)
    return changed(config, {"mesh.replicas": replicas, "mesh.shards": shards})


def _axis(config: Config, name: str, values: Mapping[str, Texts]) -> Axis:
    """Returns an axis of values that its options may have."""
    typed: dict[str, dict[str, Any]] = {}
    own = OWN
    for label, texts in values.items():
        typed[label] = {}
        is_own = True
        for option, text in texts.items():
            now, kind = _field(config, option)
            typed[label][option] = value = _typed(f"{name}={label}", kind, text)
            is_own &= jsonfile.jsonable(now) == jsonfile.jsonable(value)
        own = label if is_own else own
    return Axis(name, typed, own)


def _field(config: Config, option: str) -> tuple[Any, Any]:
    """Returns the value of an option, and its type."""
    *groups, name = field_of(config, option).split(".")
    owner = operator.attrgetter(".".join(groups))(config) if groups else config
    return getattr(owner, name), get_type_hints(type(owner))[name]


def _typed(entry: str, kind: Any, text: str) -> Any:
    """Returns what a text says, as a value of a type."""
    error = None
    for value in _readings(text):
        try:
            return jsonfile.typed(value, kind)
        except ValueError as refused:
            error = error or refused
    raise ValueError(f"--space {entry}: {error}")


def _readings(text: str) -> Iterator[Any]:
    """Yields what a text may say: itself, a constant, a number, a list."""
    yield text
    constants = {"True": True, "False": False, "None": None}
    if text in constants:
        yield constants[text]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            yield kind(text)
    words = text.split()
    yield words
    with contextlib.suppress(ValueError):
        yield [int(word) for word in words]
