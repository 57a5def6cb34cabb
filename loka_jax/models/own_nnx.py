"""A user's NNX module as a Linen one: its state is variables, made by its class."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jaxtyping import Array, Float

from loka_jax import nn

_COLLECTIONS = "params", "batch_stats"


class OwnNnx(linen.Module):
    """A module that calls one of NNX.

    Attributes:
        of: its class. It is made with those of these that it names: `rngs`, the sizes
            `num_dense`, `num_fields` and `dim` of its inputs, and `num_tasks`.
        options: further ones that it is made with, or others of these.
        num_tasks: number of labels that it predicts.
    """

    of: Any
    options: Any
    num_tasks: int = 1

    @linen.compact
    def __call__(
        self,
        dense_features: Float[Array, "B n"],
        embeddings: Float[Array, "B F D"],
        **options: Any,
    ) -> Any:
        """Returns what the module does; in training if `options` say so."""
        names = "num_dense", "num_fields", "dim", "num_tasks"
        shape = dense_features.shape[1], *embeddings.shape[1:], self.num_tasks
        sizes = dict(zip(names, shape, strict=True))
        asked = inspect.signature(self.of.__init__).parameters
        sizes = {k: v for k, v in sizes.items() if k in asked} | dict(self.options)

        def make(key: Array) -> nnx.Module:
            rngs = {"rngs": nnx.Rngs(key)} if "rngs" in asked else {}
            return self.of(**sizes, **rngs)

        if self.is_initializing():
            graph, params, stats, keys = self._split(make(self.make_rng("params")))
        else:
            shapes = nnx.eval_shape(make, jax.random.key(0))
            graph, params, stats, keys = self._split(shapes)
            for name, state in zip(_COLLECTIONS, (params, stats), strict=True):
                nnx.replace_by_pure_dict(state, dict(self.variables.get(name, {})))
        module = nnx.merge(graph, params, stats, self._drawn(keys))
        is_training = options.pop("train", False)
        module.train() if is_training else module.eval()
        if "train" in inspect.signature(self.of.__call__).parameters:
            options["train"] = is_training
        logits = self._called(module, dense_features, embeddings, **options)
        for name, state in zip(_COLLECTIONS, self._split(module)[1:3], strict=True):
            if self.is_mutable_collection(name):
                for key, value in nnx.to_pure_dict(state).items():
                    self.put_variable(name, key, value)
        return logits

    def _called(self, module: Any, *args: Any, **options: Any) -> Any:
        """Returns what a module does; its blocks leave their penalties if asked."""
        if not nn.sees_blocks():
            return module(*args, **options)
        kind = nnx.Intermediate
        out, seen = nnx.capture(module, kind, method_outputs=kind)(*args, **options)
        called = {
            path[:-1]: x.get_value()
            for path, x in nnx.to_flat_state(seen)
            if path[-1] == "__call__"
        }
        for place, x in called.items():
            within = [y for y in called if y[: len(place)] == place and y != place]
            for found in nn.penalties_of(x) if place and within else ():
                self.sow(nn.BLOCKS, "penalty", found)
        return out

    def _split(self, module: nnx.Module) -> Any:
        """Returns the module's structure, parameters, batch statistics and keys."""
        kinds = nnx.Param, nnx.BatchStat, nnx.RngState
        *parts, rest = nnx.split(module, *kinds, ...)
        for path, value in nnx.to_flat_state(rest):
            name = type(value).__name__
            raise ValueError(
                f"{self.of.__name__} has a {name} at {'/'.join(map(str, path))}, which "
                "a run does not save: keep state in nnx.Param or nnx.BatchStat."
            )
        return parts

    def _drawn(self, keys: Any) -> Any:
        """Returns the state of generators, of this step's key for dropout."""
        has_key = self.has_rng("dropout")
        key = self.make_rng("dropout") if has_key else jax.random.key(0)
        flat = nnx.to_flat_state(keys)
        for number, (_, value) in enumerate(flat):
            x = value.get_value()
            is_key = isinstance(value, nnx.RngKey)
            keys_of = jax.random.split(jax.random.fold_in(key, number), x.shape)
            value.set_value(keys_of if is_key else jnp.zeros(x.shape, x.dtype))
        return nnx.from_flat_state(flat)
