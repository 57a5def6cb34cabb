"""What a user's loss tells of the sites of a model: shapes, live errors, scales.

    LinenLoss   loss(model, variables, batch), of a Linen model, converted or planned
    NnxLoss     loss(model, batch), of an NNX model of `nn.convert`

The loss calls the model as its training step does. What Probe needs beside is handed
to the model as a further collection, which the loss does not see: it is differentiated
with respect to it alone.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax import nn
from loka_jax.measure.compiling import untuned_here
from loka_jax.nn.observed import is_of_site
from loka_jax.nn.overwriting import next_table
from loka_jax.nn.scale_state import tables_by_path
from loka_jax.probe import live_errors
from loka_jax.probe.live_errors import LiveErrors
from loka_jax.probe.site import ErrorsAlone
from loka_jax.site import Choice

RECIPES = live_errors.RECIPES  # whose live errors are measured
_OPEN = "fp8_tensorwise"  # of a site to which nobody gave a recipe
_OBSERVER = ErrorsAlone(recipes=RECIPES)

type Choices = Mapping[str, Choice]


@dataclasses.dataclass(frozen=True)
class LinenLoss:
    """A loss of a Linen model and its variables."""

    model: Any
    variables: Any
    loss: Callable[[Any, Any, Any], Any]

    @property
    def tables(self) -> dict[str, Array]:
        """The delayed scales among the variables, by the paths of their sites."""
        return tables_by_path(self.variables.get(nn.OVERWRITE_WITH_GRADIENT, {}))

    def sites(self, batch: Any) -> tuple[nn.Site, ...]:
        """Returns the sites that the loss runs, in calling order."""
        of_loss = functools.partial(self._loss, self.model)
        return nn.sites_of(of_loss, self.variables, batch, recipe=_OPEN)

    def errors(self, choices: Choices, batches: Sequence[Any]) -> dict[str, LiveErrors]:
        """Returns live errors by path, of `RECIPES`, while these choices run."""
        model = nn.Planned(self.model, tuple(choices.items()))
        with nn.probing(_OBSERVER):
            shapes = self._made(model, batches[0])[nn.PROBE]

        def observe(variables: Any, step: Array, batch: Any) -> Any:
            stats = _at_step(shapes, step)

            def told(stats: Any) -> Array:
                seeing = _With(model, {nn.PROBE: stats})
                return self._loss(seeing, variables, batch)

            with nn.probing(_OBSERVER):
                return nn.by_path(jax.grad(told)(stats))

        return _over(observe, self.variables, batches)

    def planned(self, choices: Choices, batches: Sequence[Any]) -> tuple[Any, Any]:
        """Returns the model with these choices, and its variables with scales."""
        model = nn.Planned(self.model, tuple(choices.items()))
        name = nn.OVERWRITE_WITH_GRADIENT
        made = self._made(model, batches[0]).get(name, {})
        given = self.variables.get(name, {})
        scales = _merged(jax.tree.map(_zeros, made), given)

        def told(scales: Any, variables: Any, batch: Any) -> Array:
            return self._loss(model, {**variables, name: scales}, batch)

        scales = _after_all(told, scales, self.variables, batches)
        model = dataclasses.replace(model, scales_initialized=True)
        return model, {**self.variables, name: scales}

    def step(self, planned: tuple[Any, Any], batch: Any) -> Callable[[], Any]:
        """Returns a call of the compiled gradients of what `planned` returned."""
        model, variables = planned
        return _gradients(functools.partial(self._loss, model), variables, batch)

    def _loss(self, model: Any, variables: Any, batch: Any) -> Array:
        return _scalar(self.loss(model, variables, batch))

    def _made(self, model: Any, batch: Any) -> dict[str, Any]:
        """Returns the shapes of the collections that the calls of the model make."""
        found: dict[str, Any] = {}
        loss = functools.partial(self._loss, _Making(model, self.model, found))
        jax.eval_shape(loss, self.variables, batch)
        if not found:
            raise ValueError(
                "loss(model, variables, batch) calls no `apply` of the model that it "
                "is given: call that one, whose plan can change."
            )
        return found


class _With:
    """A model whose variables get further collections."""

    def __init__(self, model: Any, collections: Mapping[str, Any]):
        self._model, self._collections = model, collections

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the output of the model's `apply`."""
        return self._model.apply({**variables, **self._collections}, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the model."""
        return getattr(self._model, name)


class _Making:
    """A model that tells of the collections that its calls make.

    Args:
        model: makes them.
        own: the model as it was given, which has its variables.
        found: takes their shapes.
    """

    def __init__(self, model: Any, own: Any, found: dict[str, Any]):
        self._model, self._own, self._found = model, own, found

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the output of the model's `apply`."""
        options = {k: x for k, x in kwargs.items() if k not in ("rngs", "mutable")}
        rngs = kwargs.get("rngs") or {}
        rngs = rngs if isinstance(rngs, Mapping) else {"dropout": rngs}
        rngs = {"params": jax.random.key(0), **rngs}
        made = jax.eval_shape(lambda: self._model.init(rngs, *args, **options))
        for name in (nn.OVERWRITE_WITH_GRADIENT, nn.PROBE):
            found = self._found.get(name, {})
            self._found[name] = _merged(found, made.get(name, {}))
        with nn.probing(None):
            return self._own.apply(variables, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the model."""
        return getattr(self._model, name)


@dataclasses.dataclass(frozen=True)
class NnxLoss:
    """A loss of an NNX model of `nn.convert`."""

    model: Any
    loss: Callable[[Any, Any], Any]

    @property
    def tables(self) -> dict[str, Array]:
        """The delayed scales in the model, by the paths of their sites."""
        from loka_jax.nn.nnx_convert import site_variables

        return {
            "/".join(path): table
            for (collection, path, _), table in site_variables(self.model).items()
            if collection == nn.OVERWRITE_WITH_GRADIENT
        }

    def sites(self, batch: Any) -> tuple[nn.Site, ...]:
        """Returns the sites that the loss runs, in calling order."""
        from flax import nnx

        graph, state = nnx.split(self.model)
        return nn.sites_of(
            lambda state, batch: _scalar(self.loss(nnx.merge(graph, state), batch)),
            state,
            batch,
            recipe=_OPEN,
        )

    def errors(self, choices: Choices, batches: Sequence[Any]) -> dict[str, LiveErrors]:
        """Returns live errors by path, of `RECIPES`, while these choices run."""
        from flax import nnx

        from loka_jax.nn.nnx_convert import site_variables, with_choices

        model = with_choices(self.model, choices)
        with nn.probing(_OBSERVER):
            self.loss(model, batches[0])  # makes the statistics
        graph, stats, rest = nnx.split(model, nn.ProbeStats, ...)

        def observe(rest: Any, step: Array, batch: Any) -> Any:
            def told(stats: Any) -> Array:
                return _scalar(self.loss(nnx.merge(graph, stats, rest), batch))

            with nn.probing(_OBSERVER):
                seen = jax.grad(told)(_at_step(stats, step))
            of_sites = site_variables(nnx.merge(graph, seen, rest))
            return {
                "/".join(path): value
                for (collection, path, _), value in of_sites.items()
                if collection == nn.PROBE
            }

        return _over(observe, rest, batches)

    def planned(self, choices: Choices, batches: Sequence[Any]) -> tuple[Any, Any]:
        """Returns a copy of the model with these choices and scales; and None."""
        from flax import nnx

        from loka_jax.nn.nnx_convert import with_choices

        model = with_choices(self.model, choices)
        graph, scales, rest = self._with_scales(model, batches[0])

        def told(scales: Any, rest: Any, batch: Any) -> Array:
            return _scalar(self.loss(nnx.merge(graph, scales, rest), batch))

        scales = _after_all(told, scales, rest, batches)
        model = nnx.merge(graph, scales, rest)
        return with_choices(model, choices, scales_initialized=True), None

    def step(self, planned: tuple[Any, Any], batch: Any) -> Callable[[], Any]:
        """Returns a call of the compiled gradients of what `planned` returned."""
        from flax import nnx

        graph, state = nnx.split(planned[0])

        def loss(state: Any, batch: Any) -> Array:
            return _scalar(self.loss(nnx.merge(graph, state), batch))

        return _gradients(loss, state, batch)

    def _with_scales(self, model: Any, batch: Any) -> tuple[Any, Any, Any]:
        """Returns a model that was called: its graph, its scales and the rest."""
        from flax import nnx

        graph, old, rest = nnx.split(model, nn.Fp8State, ...)
        graphs = []

        def made(old: Any, rest: Any, batch: Any) -> Any:
            called = nnx.merge(graph, old, rest)
            self.loss(called, batch)
            after, scales, _ = nnx.split(called, nn.Fp8State, ...)
            graphs.append(after)
            return scales

        scales = jax.jit(made, compiler_options=untuned_here())(old, rest, batch)
        return graphs[-1], scales, rest


type ModelLoss = LinenLoss | NnxLoss


def loss_of(model: Any, variables: Any, loss: Callable[..., Any]) -> ModelLoss:
    """Returns the loss of a Linen model, or of an NNX model.

    Raises:
        ValueError: if variables are given for an NNX model, or none for another.
    """
    from flax import nnx  # a tenth of a second, which not all need

    is_nnx = isinstance(model, nnx.Module)
    if is_nnx != (variables is None):
        kind = "an NNX" if is_nnx else "a Linen"
        takes = "None, and loss(model, batch)" if is_nnx else "all that init returned"
        raise ValueError(f"variables of {kind} model must be {takes}.")
    if is_nnx:
        return NnxLoss(model, loss)
    own = model.model if isinstance(model, nn.Planned) else model
    return LinenLoss(own, variables, loss)


def _over(
    observe: Callable[..., Any], variables: Any, batches: Sequence[Any]
) -> dict[str, LiveErrors]:
    """Returns the live errors by path of some batches, each a step of its own."""
    observe = jax.jit(observe, compiler_options=untuned_here())
    errors: dict[str, LiveErrors] = {}
    for step, batch in enumerate(batches):
        seen = observe(variables, jnp.asarray(step, jnp.float32), batch)
        for path, x in seen.items():
            # All steps count alike, and so do those of each layer of a stack.
            before = errors.get(path)
            errors[path] = x if before is None else jax.tree.map(jnp.add, before, x)
    return jax.device_get(errors)


def _after_all(
    loss: Callable[..., Array], scales: Any, rest: Any, batches: Sequence[Any]
) -> Any:
    """Returns the scales after a step on each batch, by a loss of all three."""

    def after(scales: Any, rest: Any, batch: Any) -> Any:
        gradients = jax.grad(loss)(scales, rest, batch)
        return jax.tree.map(next_table, scales, gradients)

    if jax.tree.leaves(scales):
        after = jax.jit(after, compiler_options=untuned_here())
        for batch in batches:
            scales = after(scales, rest, batch)
    return scales


def _at_step(shapes: Any, step: Float[Array, ""]) -> Any:
    """Returns an observer's statistics, of which only the number of steps is read."""
    return jax.tree.map(lambda x: jnp.full(x.shape, step, x.dtype), shapes)


def _zeros(shape: Any) -> Array:
    return jnp.zeros(shape.shape, shape.dtype)


def _gradients(
    loss: Callable[[Any, Any], Array], variables: Any, batch: Any
) -> Callable[[], Any]:
    """Returns a call of the compiled gradients of the variables that have some."""
    leaves, tree = jax.tree.flatten(variables)
    has_one = [jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in leaves]

    def gradients(leaves: list[Array], batch: Any) -> list[Array]:
        def told(moving: list[Array]) -> Array:
            rest = iter(moving)
            pairs = zip(leaves, has_one, strict=True)
            every = [next(rest) if moves else x for x, moves in pairs]
            return loss(jax.tree.unflatten(tree, every), batch)

        pairs = zip(leaves, has_one, strict=True)
        return jax.grad(told)([x for x, moves in pairs if moves])

    return functools.partial(jax.jit(gradients), leaves, batch)


def _scalar(loss: Any) -> Array:
    """Returns the loss of what a loss function returns, which may have more."""
    return loss[0] if isinstance(loss, tuple) else loss


def _merged(tree: Any, more: Any) -> Any:
    """Returns nested dicts with the entries of both; of a leaf in both, the second."""
    if not isinstance(tree, Mapping) or is_of_site(tree):
        return more
    inner = {k: _merged(tree[k], x) if k in tree else x for k, x in more.items()}
    return {**tree, **inner}
