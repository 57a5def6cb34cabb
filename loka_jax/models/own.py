"""A model of a user's own, in a run: named by its module and class.

    logits = Name(**options)(dense, embeddings)

Dense features are float32 [B, n], embeddings float32 [B, F, D]; logits [B] or [B, 1],
of T tasks [B, T]. `train` is passed on where the call takes it. The products of the
model run as sites (`nn.convert`), without a change to its file. A run keeps the names
and the options, so the class must be found by them wherever the run is read.
"""

import importlib
import inspect
import json
import os
import sys
from typing import Any

import jax.numpy as jnp
from flax import linen
from jaxtyping import Array, Float

from loka_jax import nn
from loka_jax.models.ranking import RankingModel
from loka_jax.options import did_you_mean
from loka_jax.terminal import one_line

_FLAX = {"parent", "name"}


class OwnModel(RankingModel):
    """A user's Linen module as a ranking model.

    Attributes:
        own: "module:Name" of the class; the module is looked for in the current folder,
            too.
        own_options: the fields of the class that are given, as JSON.
        skip: patterns of the paths of sites that stay as they are written.
    """

    own: str = ""
    own_options: str = "{}"
    skip: tuple[str, ...] = ()

    @linen.compact
    def __call__(
        self,
        dense_features: Float[Array, "B n"],
        embeddings: Float[Array, "B F D"],
        *,
        train: bool = False,
    ) -> Float[Array, "B"] | Float[Array, "B T"]:
        """Returns float32 logits."""
        cls = class_of(self.own)
        module = cls(**_read(self.own_options))
        takes_train = "train" in inspect.signature(cls.__call__).parameters
        options: dict[str, Any] = {"train": train} if takes_train else {}
        model = nn.convert(module, recipe=self.recipe, skip=self.skip)
        logits = model(dense_features, embeddings.astype(jnp.float32), **options)
        if logits.ndim == 2 and logits.shape[1] == 1:
            logits = logits[:, 0]
        if logits.ndim not in (1, 2) or len(logits) != len(embeddings):
            raise ValueError(
                f"{self.own} returns an array of {logits.shape} for {len(embeddings)} "
                "examples: return a logit for each, or one for each label."
            )
        return logits.astype(jnp.float32)


def class_of(own: str) -> Any:
    """Returns the class that "module:Name" names.

    Raises:
        ValueError: one sentence if there is none, or it is no Linen module.
    """
    module_name, _, name = own.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's file may raise any kind
        raise ValueError(
            f"the model {own!r} cannot be imported ({one_line(error)}): name it as "
            "module:Name, with the module's folder in PYTHONPATH or as the current one."
        ) from None
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, linen.Module)):
        classes = [k for k, v in vars(module).items() if _is_linen(v)]
        hint = did_you_mean(name, classes, cutoff=0.4)
        raise ValueError(
            f"{own!r} is no Flax Linen module: {hint}{module_name} has "
            f"{', '.join(classes) or 'none'}. (An NNX model trains in a loop of your "
            "own, see docs/your-model.md.)"
        )
    return found


def own_model(model: Any, **options: Any) -> OwnModel:
    """Returns the model of "module:Name", or of an instance of such a class.

    Args:
        model: the name, or a Linen module whose class and fields a run can keep.
        **options: fields of `OwnModel`.

    Raises:
        ValueError: one sentence for what is no model, or could not be read again.
    """
    if isinstance(model, str):
        class_of(model)
        return OwnModel(own=model, **options)
    if not isinstance(model, linen.Module):
        raise ValueError(
            f"the model is a {type(model).__name__}, and must be a name such as "
            "'dlrm', or 'module:Name', or an instance of a Flax Linen module."
        )
    cls = type(model)
    own, fields = f"{cls.__module__}:{cls.__qualname__}", cls.__dataclass_fields__
    given = {name: getattr(model, name) for name in fields if name not in _FLAX}
    changed = {k: v for k, v in given.items() if v is not fields[k].default}
    try:
        if cls.__module__ == "__main__" or class_of(own) is not cls:
            raise ValueError("its class is not in a module that can be imported")
        text = json.dumps(changed)
        if cls(**_read(text)) != model:
            raise ValueError("its fields are not the same when read again")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the model {cls.__qualname__} could not be read again from the run's "
            f"folder ({one_line(error)}): define it in a file, with fields that are "
            "numbers, texts and tuples of them."
        ) from None
    return OwnModel(own=own, own_options=text, **options)


def _read(text: str) -> dict[str, Any]:
    """Returns fields from JSON, which has lists in place of tuples."""

    def as_fields(value: Any) -> Any:
        return tuple(map(as_fields, value)) if isinstance(value, list) else value

    return {name: as_fields(value) for name, value in json.loads(text).items()}


def _is_linen(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, linen.Module)
