"""A model of a user's own, in a run: named by its module and class.

    logits = Name(**options)(dense, embeddings)

Dense features are float32 [B, n], embeddings float32 [B, F, D]; logits [B] or [B, 1],
of T tasks [B, T]. `train` is passed on where the call takes it. The class is of Linen
or NNX; the products of the model run as sites (`nn.convert`), without a change to its
file. A run keeps the names and the options, so the class must be found by them wherever
the run is read.
"""

import dataclasses
import functools
import inspect
import json
from typing import Any

import jax.numpy as jnp
from flax import linen
from jaxtyping import Array, Float

from loka_jax import named, nn
from loka_jax.models.ranking import RankingModel
from loka_jax.terminal import one_line

_FLAX = {"parent", "name"}
_OF_OURS = {"norm", "activation", "bias", "dropout_rate", "first_order"}


class OwnModel(RankingModel):
    """A user's Flax module as a ranking model.

    Attributes:
        own: "module:Name" of the class; the module is looked for in the current folder,
            too.
        own_options: what the class is made with, as JSON.
        skip: patterns of the paths of sites that stay as they are written.
        num_tasks: number of labels that it predicts.
    """

    own: str = ""
    own_options: str = "{}"
    skip: tuple[str, ...] = ()
    num_tasks: int = 1

    def __post_init__(self):
        """Refuses options of our own models, which this one would not read."""
        super().__post_init__()
        for field in dataclasses.fields(RankingModel):
            is_given = getattr(self, field.name, field.default) != field.default
            if field.name in _OF_OURS and is_given:
                option = "--" + field.name.replace("_", "-")
                raise ValueError(
                    f"{option} is for loka_jax's own models: {self.own} says itself "
                    f"what it is made of; leave {option} out."
                )

    @linen.compact
    def __call__(
        self,
        dense_features: Float[Array, "B n"],
        embeddings: Float[Array, "B F D"],
        *,
        train: bool = False,
    ) -> Float[Array, "B"] | Float[Array, "B T"]:
        """Returns float32 logits."""
        cls, fields = class_of(self.own), _read(self.own_options)
        if issubclass(cls, linen.Module):
            module = cls(**fields)
            takes_train = "train" in inspect.signature(cls.__call__).parameters
        else:
            from loka_jax.models.own_nnx import OwnNnx  # a tenth of a second

            own = cls, fields, self.num_tasks
            module, takes_train = OwnNnx(*own, name=f"{cls.__name__}_0"), True
        options: dict[str, Any] = {"train": train} if takes_train else {}
        model = nn.convert(module, recipe=self.recipe, skip=self.skip)
        logits = model(dense_features, embeddings.astype(jnp.float32), **options)
        shape = (len(embeddings), self.num_tasks)[: min(self.num_tasks, 2)]
        if logits.shape not in (shape, (*shape, 1)):
            raise ValueError(
                f"{self.own} returns an array of {logits.shape} for {len(embeddings)} "
                f"examples and {self.num_tasks} labels: return a logit for each."
            )
        return logits.reshape(shape).astype(jnp.float32)


def class_of(own: str) -> Any:
    """Returns the class that "module:Name" names.

    Raises:
        ValueError: one sentence if there is none, or it is no module of Flax.
    """
    return named.found("the model", own, _is_module, "Flax module, Linen or NNX")


def own_model(model: Any, **options: Any) -> OwnModel:
    """Returns the model of "module:Name", of such a class, or of what it is made with.

    Args:
        model: the name; a class of Linen or NNX; `functools.partial(Class, width=64)`;
            or a Linen module, which keeps its fields.
        **options: fields of `OwnModel`.

    Raises:
        ValueError: one sentence for what is no model, or could not be read again.
    """
    if isinstance(model, str):
        class_of(model)
        return OwnModel(own=model, **options)
    cls, given = _made_with(model)
    own = named.name_of(f"the model {cls.__qualname__}", cls)
    try:
        text = json.dumps(given)
        if _read(text) != given:
            raise ValueError("what it is made with is not the same when read again")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the model {cls.__qualname__} could not be read again from the run's "
            f"folder ({one_line(error)}): make it with numbers, texts and tuples of "
            "them."
        ) from None
    return OwnModel(own=own, own_options=text, **options)


def _made_with(model: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the class of a model, and with what it is made."""
    if isinstance(model, linen.Module):
        cls, fields = type(model), type(model).__dataclass_fields__
        given = {name: getattr(model, name) for name in fields if name not in _FLAX}
        return cls, {k: v for k, v in given.items() if v is not fields[k].default}
    is_partial = isinstance(model, functools.partial) and not model.args
    cls, given = (model.func, model.keywords) if is_partial else (model, {})
    if _is_module(cls):
        return cls, given
    kind = type(model).__name__
    if _is_module(type(model)):
        raise ValueError(
            f"an NNX module, such as this {kind}, does not keep what it was made with: "
            f"give its class, or functools.partial({kind}, width=64)."
        )
    raise ValueError(
        f"the model is a {kind}, and must be a name such as 'dlrm', or 'module:Name', "
        "or a Flax Linen module, or a class of Linen or NNX."
    )


def _read(text: str) -> dict[str, Any]:
    """Returns options from JSON, which has lists in place of tuples."""

    def as_fields(value: Any) -> Any:
        return tuple(map(as_fields, value)) if isinstance(value, list) else value

    return {name: as_fields(value) for name, value in json.loads(text).items()}


def _is_module(value: Any) -> bool:
    if not isinstance(value, type):
        return False
    from flax import nnx  # a tenth of a second, which not all need

    return issubclass(value, linen.Module | nnx.Module)
