"""Configurations in JSON: what `Config.identity` gives, read back.

    from_json(config.identity(), ...) == config, but for `run`

A field that is not there has its default, so that configurations of before an option
was added, and short ones written by hand, are read. Others are refused by dotted name.
"""

import dataclasses
import pathlib
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union

from loka_jax import jsonfile, saved_format
from loka_jax.options import did_you_mean
from loka_jax.terminal import shown
from loka_jax.train.config import Config

# Fields that are not in the JSON of a model: Flax's own.
_FLAX = {"parent", "name"}
_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}


def read_config(path: pathlib.Path) -> Config:
    """Returns the configuration in a JSON file that `--print-config` printed.

    Raises:
        ValueError: one sentence with the file, the field and the remedy.
    """
    try:
        values = jsonfile.read(path)
    except OSError as error:
        raise ValueError(
            f"cannot read the configuration {path} ({error.strerror}): name a file "
            "that --print-config printed."
        ) from None
    return from_json(values, str(path))


def from_json(values: object, source: str) -> Config:
    """Returns the configuration whose `identity` are these JSON values.

    Args:
        values: the JSON values.
        source: where they come from, for messages.

    Raises:
        ValueError: one sentence with the source, the field and the remedy.
    """
    try:
        config_class = _config_class(values)
        return _dataclass(values, config_class, "")
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _config_class(values: object) -> type[Config]:
    """Returns the class of configurations with the model that `values` name."""
    model = jsonfile.as_dict(jsonfile.as_dict(values).get("model"))
    by_kind = {_model_of(cls).__name__: cls for cls in _subclasses(Config)}
    kind = model.get("kind")
    if kind not in by_kind:
        kinds = ", ".join(sorted(by_kind))
        raise ValueError(
            f"model.kind is {shown(kind)}, which is none of {kinds}: use what "
            "--print-config prints, or name the Python file of your own model with "
            "--config FILE.py:FUNCTION."
        )
    return by_kind[kind]


def _subclasses(cls: type) -> Iterator[type]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _model_of(config_class: type[Config]) -> type:
    return typing.get_type_hints(config_class)["model"]


def _dataclass(values: object, cls: type, where: str) -> Any:
    """Returns the dataclass with the fields in `values`.

    Args:
        values: the JSON values.
        cls: the class.
        where: its dotted name in the configuration.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{where or 'it'} must be an object {{...}}.")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    if _is_model(cls):
        values = {name: value for name, value in values.items() if name != "kind"}
        fields = {name: field for name, field in fields.items() if name not in _FLAX}
    elif issubclass(cls, Config):
        values = saved_format.without_key(values)
        del fields["run"]
    for name in values:
        if name not in fields:
            hint = did_you_mean(name, fields) or f"it has {', '.join(fields)}; "
            raise ValueError(
                f"{_dotted(where, shown(name))} is no field of this version: {hint}"
                "rename or remove it."
            )
    for name, field in fields.items():
        has_default = field.default is not dataclasses.MISSING
        if name not in values and not (
            has_default or field.default_factory is not dataclasses.MISSING
        ):
            raise ValueError(f"{_dotted(where, name)} is missing: add it.")
    hints = typing.get_type_hints(cls)
    return cls(
        **{
            name: _value(value, hints[name], _dotted(where, name))
            for name, value in values.items()
        }
    )


def _is_model(cls: type) -> bool:
    return _FLAX <= {field.name for field in dataclasses.fields(cls)}


def _dotted(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _value(value: object, hint: Any, where: str) -> Any:
    """Returns a JSON value as one of the type that `hint` names."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _value(value, inner[0], where)
    if origin in (Union, types.UnionType):
        return _any_of(value, inner, where)
    if origin is Literal:
        if value in inner and type(value) in map(type, inner):
            return value
        names = [str(name) for name in inner]
        hint = did_you_mean(str(value), names)
        raise ValueError(
            f"{where} is {_quoted(value)}: {hint}Use one of {', '.join(names)}."
        )
    if origin is tuple:
        return _tuple(value, inner, where)
    if origin is dict:
        if isinstance(value, dict):
            items = value.items()
            return {k: _value(v, inner[1], _dotted(where, k)) for k, v in items}
        raise ValueError(f"{where} is {_quoted(value)} and must be an object {{...}}.")
    if dataclasses.is_dataclass(hint):
        return _dataclass(value, typing.cast(type, hint), where)
    return _plain(value, hint, where)


def _any_of(value: object, alternatives: tuple, where: str) -> Any:
    """Returns a value as one of the first type that it fits."""
    if value is None and type(None) in alternatives:
        return None
    others = [hint for hint in alternatives if hint is not type(None)]
    for hint in others[:-1]:
        try:
            return _value(value, hint, where)
        except ValueError:
            continue
    return _value(value, others[-1], where)


def _tuple(value: object, inner: tuple, where: str) -> tuple:
    if not isinstance(value, list):
        raise ValueError(f"{where} is {_quoted(value)} and must be a list [...].")
    is_any_length = len(inner) == 2 and inner[1] is Ellipsis
    hints = inner[:1] * len(value) if is_any_length else inner
    if len(hints) != len(value):
        raise ValueError(f"{where} has {len(value)} values and must have {len(hints)}.")
    parts = zip(value, hints, strict=True)
    return tuple(_value(v, hint, f"{where}[{i}]") for i, (v, hint) in enumerate(parts))


def _plain(value: object, cls: type, where: str) -> Any:
    """Returns a number, a text or a path; an integer serves as any number."""
    if cls is float and type(value) is int:
        return float(value)
    if cls is pathlib.Path and isinstance(value, str):
        return pathlib.Path(value)
    if type(value) is not cls:
        raise ValueError(
            f"{where} is {_quoted(value)} and must be {_WORDS.get(cls, cls.__name__)}."
        )
    return value


def _quoted(value: object) -> str:
    """Returns a value as JSON writes it."""
    return shown(jsonfile.dumps(value))
