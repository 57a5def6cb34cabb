"""Configurations in JSON: what `Config.identity` gives, read back.

    from_json(config.identity(), ...) == config, but for `run`

A field that is not there has its default, so that configurations of before an option
was added, and short ones written by hand, are read. Others are refused by dotted name.
"""

import dataclasses
import pathlib
import typing
from collections.abc import Collection, Iterator

from loka_jax import jsonfile, saved_format
from loka_jax.terminal import clip
from loka_jax.train.config import FLAX_FIELDS, Config


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

    Raises:
        ValueError: one sentence with their source, the field and the remedy.
    """
    try:
        cls, model = _classes(values)
        values = saved_format.without_key(jsonfile.as_dict(values))
        of_model = {k: v for k, v in values["model"].items() if k != "kind"}
        form = _form(cls, {"run"}, model=_form(model, FLAX_FIELDS))
        fields = vars(jsonfile.typed(values | {"model": of_model}, form))
        return cls(**fields | {"model": model(**vars(fields["model"]))})
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _classes(values: object) -> tuple[type[Config], type]:
    """Returns the class of configurations with the model that `values` name, and it."""
    model = jsonfile.as_dict(jsonfile.as_dict(values).get("model"))
    models = {cls: typing.get_type_hints(cls)["model"] for cls in _subclasses(Config)}
    by_kind = {model.__name__: (cls, model) for cls, model in models.items()}
    kind = model.get("kind")
    if not isinstance(kind, str) or kind not in by_kind:
        kinds = ", ".join(sorted(by_kind))
        raise ValueError(
            f"model.kind is {clip(kind)}, which is none of {kinds}: use what "
            "--print-config prints, or name the Python file of your own model with "
            "--config FILE.py:FUNCTION."
        )
    return by_kind[kind]


def _subclasses(cls: type) -> Iterator[type]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _form(cls: type, without: Collection[str], **others: type) -> type:
    """Returns a dataclass with the fields of `cls` in JSON, `others` of other types."""
    hints = typing.get_type_hints(cls) | others
    fields = [
        (
            field.name,
            hints[field.name],
            dataclasses.field(
                default=field.default, default_factory=field.default_factory
            ),
        )
        for field in dataclasses.fields(cls)
        if field.init and field.name not in without
    ]
    return dataclasses.make_dataclass(cls.__name__, fields, kw_only=True)
