"""Tables of several embedding dims: a stack for each dim, and projections to the model.

A model takes vectors of one dim D. A field f of another dim D_f gets

    x[b, f] = e[b, f] P[f],   P[f] of D_f x D, without a bias

with P trained like any dense parameter. Whatever is done to one stack (lookups, row
gradients, updates, optimizer state) is done to each of them: `by_stack` gives the
result of a function for the only stack, or a tuple of its results.

B examples, F fields, G fields of a stack, D_g its dim.

References:
    Ginart, Naumov, Mudigere, Yang, Zou: Mixed Dimension Embeddings with Application to
    Memory-Efficient Recommendation Systems. arXiv 1909.11810, section 3.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax.data import Batch
from loka_jax.data.batch import Array as BatchArray
from loka_jax.nn import Model
from loka_jax.ops.tables import MixedTables, Tables, TableSpec

PROJECTIONS = "embedding_projections"  # among a model's parameters


def by_stack(function: Callable[..., Any], tables: Tables, *parts: Any) -> Any:
    """Returns `function(spec, *parts)`; of several stacks a tuple, one of each.

    Args:
        parts: what belongs to the only stack, or a tuple with what belongs to each.
    """
    if isinstance(tables, TableSpec):
        return function(tables, *parts)
    return tuple(map(function, tables.stacks, *parts))


def regroup(tables: Tables, results: Any) -> Any:
    """Returns the results of `by_stack` by their parts, where they are tuples.

    Of two stacks ((a1, b1), (a2, b2)) becomes ((a1, a2), (b1, b2)).
    """
    if isinstance(tables, TableSpec):
        return results
    return tuple(zip(*results, strict=True))


def split(tables: Tables, batch: Batch) -> Any:
    """Returns the batch, or for each of several stacks that with its fields alone."""
    if isinstance(tables, TableSpec):
        return batch
    single = batch.ids.shape[1]

    def part(fields: tuple[int, ...]) -> Batch:
        ids = batch.ids[:, np.array([f for f in fields if f < single], np.int32)]
        bags = tuple(batch.bags[f - single] for f in fields if f >= single)
        return batch._replace(ids=ids, bags=bags)

    return tuple(map(part, tables.fields))


def project(model: Model, tables: Tables) -> "Model | Projected | Widened":
    """Returns the model; for several stacks it takes the embeddings of each.

    With a wide part it takes the embeddings of that, too.
    """
    if not isinstance(tables, TableSpec):
        return Projected(model, tables)
    return Widened(model, tables.wide) if tables.wide else model


@dataclasses.dataclass(frozen=True)
class Widened:
    """A model with a wide part beside it, of the last fields; used as the model is.

        logit_t = model(...)_t + sum over the fields of the wide part of e[t]

    so that a value has one weight for each task t, and the model does not see it.

    References:
        Cheng et al.: Wide & Deep Learning for Recommender Systems. arXiv 1606.07792.
    """

    model: Model
    wide: int

    @property
    def compute_dtype(self) -> DTypeLike:
        """The model's compute dtype; float32 if it has none."""
        return getattr(self.model, "compute_dtype", jnp.float32)

    def init(self, key: Array, dense: BatchArray, embeddings: Array) -> dict[str, Any]:
        """Returns the model's variables."""
        return self.model.init(key, dense, embeddings[:, : -self.wide])

    def apply(
        self, variables: Any, dense: BatchArray, embeddings: Array, **options: Any
    ) -> Any:
        """Returns the output of the model's `apply`, the wide part in its logits."""
        own = embeddings[:, : -self.wide]
        found = self.model.apply(variables, dense, own, **options)
        logits, *rest = found if isinstance(found, tuple) else (found,)
        tasks = 1 if logits.ndim == 1 else logits.shape[1]
        weights = embeddings[:, -self.wide :, :tasks].astype(jnp.float32).sum(axis=1)
        logits = logits + weights.reshape(logits.shape)
        return (logits, *rest) if rest else logits


@dataclasses.dataclass(frozen=True)
class Projected:
    """A model of the embeddings `[B, F, D]` of all stacks; used as the model is."""

    model: Model
    tables: MixedTables

    @property
    def compute_dtype(self) -> DTypeLike:
        """The model's compute dtype; float32 if it has none."""
        return getattr(self.model, "compute_dtype", jnp.float32)

    def init(
        self, key: Array, dense: BatchArray, rows: tuple[Array, ...]
    ) -> dict[str, Any]:
        """Returns the model's variables, the projections among its parameters."""
        model_key, key = jax.random.split(key)
        projections = self._init_projections(key)
        embeddings = self._embeddings(projections, rows)
        variables = self.model.init(model_key, dense, embeddings)
        params = {**variables["params"], PROJECTIONS: projections}
        return {**variables, "params": params}

    def apply(
        self, variables: Any, dense: BatchArray, rows: tuple[Array, ...], **options: Any
    ) -> Any:
        """Returns the output of the model's `apply`."""
        embeddings = self._embeddings(variables["params"][PROJECTIONS], rows)
        return self.model.apply(variables, dense, embeddings, **options)

    def _init_projections(self, key: Array) -> dict[str, Array]:
        """Returns a projection `[G, D_g, D]` for each stack of another dim.

        Variance 1 / D_g: vectors of independent numbers keep their spread.
        """
        initial = linen.initializers.lecun_normal(batch_axis=(0,))
        shapes = {
            str(stack.dim): (len(stack.rows), stack.dim, self.tables.dim)
            for stack in self.tables.stacks
            if stack.dim != self.tables.dim
        }
        keys = jax.random.split(key, len(shapes))
        return {
            name: initial(one, shape, jnp.float32)
            for (name, shape), one in zip(shapes.items(), keys, strict=True)
        }

    def _embeddings(
        self, projections: dict[str, Array], rows: tuple[Array, ...]
    ) -> Float[Array, "B F D"]:
        """Returns the vectors of all fields, in their order."""
        parts = []
        for stack, part in zip(self.tables.stacks, rows, strict=True):
            if str(stack.dim) in projections:
                weight, dtype = projections[str(stack.dim)], part.dtype
                part = jnp.einsum(
                    "bgd,gde->bge",
                    part,
                    weight.astype(dtype),
                    preferred_element_type=jnp.float32,
                ).astype(dtype)
            parts.append(part)
        places = np.argsort(np.concatenate(self.tables.fields))
        return jnp.concatenate(parts, axis=1)[:, places]
