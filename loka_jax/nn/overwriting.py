"""The FP8 state of a model under optax: overwritten, not optimized.

    tx = nn.overwriting(optax.adamw(1e-3))
    opt_state = tx.init(variables)                      # all that model.init returned
    gradients = jax.grad(loss)(variables)
    updates, opt_state = tx.update(gradients, opt_state, variables)
    variables = optax.apply_updates(variables, updates)

The optimizer sees the parameters alone: the gradient of `_overwrite_with_gradient` is
its next value. Variables may lie at any depth, as in `{"user": model.init(...), "item":
model.init(...)}`, where the optimizer sees `{"user": params, "item": params}`. The
state of a site on which the loss does not depend, such as that of an unused tower,
stays as it was.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import core, struct
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as _STATES
from jaxtyping import Array


@struct.dataclass
class Overwrite:
    """An update that replaces what it is added to: `old + Overwrite(new)` is `new`.

    So `optax.apply_updates`, which adds, overwrites. No difference could: `old + (new -
    old)` is 0 in float32 where `new` is far smaller than `old`.

    Attributes:
        value: the new value; zeros if the loss does not depend on it.
    """

    value: Any

    __array_ufunc__ = None  # numpy would look for elements to add

    def __radd__(self, old: Any) -> Any:
        """Returns the new value, or the old one if the new one is zeros."""
        return next_table(jnp.asarray(old), self.value)


def next_table(old: Array, gradient: Array) -> Array:
    """Returns the next table of a state, or of several, stacked.

    A site on which no loss depends has a gradient of zeros, which JAX makes itself, and
    stays as it was. The weights of a real one are positive.
    """
    # By row, as a reduction would be a kernel of its own.
    return jnp.where(gradient[..., :1] != 0, gradient, old)


def overwriting(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer of all variables of a model that overwrites its FP8 state.

    The variables of several models may be in one tree.

    It must be outermost: `overwriting(optax.MultiSteps(tx, 4))`, and
    `overwriting(optax.chain(clip, tx))`. Parameters alone go through unchanged, so that
    it may stand in Flax's `TrainState`, which overwrites by itself.

    Args:
        optimizer: of the parameters, the only ones that it sees; also of the arguments
            `grad` and `value_fn` that a line search takes.

    Raises:
        ValueError: in `init` and `update`, if there are other collections among the
            variables, such as batch statistics; in `update`, if the optimizer's
            updates have not the structure of the gradients.
    """
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    inner = optax.with_extra_args_support(optimizer)

    def init(params):
        return inner.init(_split(params)[0])

    def update(updates, state, params=None, **extra) -> tuple[Any, Any]:
        gradients, states = _split(updates)
        rest = None if params is None else _split(params)[0]
        extra = {
            name: _of_parameters(name, value, params) for name, value in extra.items()
        }
        out, state = inner.update(gradients, state, rest, **extra)
        if jax.tree.structure(out) != jax.tree.structure(gradients):
            raise ValueError(
                "overwriting takes optimizers whose updates have the structure of the "
                f"gradients, not that of {type(out).__name__}: take another one, or "
                "split the variables yourself."
            )
        return _join(out, jax.tree.map(Overwrite, states)), state

    return optax.GradientTransformationExtraArgs(init, update)


def _of_parameters(name: str, value: Any, variables: Any) -> Any:
    """Returns an argument of a line search as one of the parameters alone."""
    if name == "grad":
        return _split(value)[0]
    if name == "value_fn":
        states = _split(variables)[1]
        return lambda params, *args, **kw: value(_join(params, states), *args, **kw)
    return value


@struct.dataclass
class _States:
    """The FP8 states in the variables of a model."""

    collections: dict[str, Any]
    is_frozen: bool = struct.field(pytree_node=False)

    def join(self, params: Any) -> Any:
        """Returns the variables with these parameters."""
        variables = {"params": params, **self.collections}
        return core.freeze(variables) if self.is_frozen else variables


def _join(params: Any, states: Any) -> Any:
    """Returns the variables that `_split` took apart."""
    return jax.tree.map(
        lambda own, part: part if own is None else own.join(part),
        states,
        params,
        is_leaf=lambda own: own is None or isinstance(own, _States),
    )


def _split(variables: Any) -> tuple[Any, Any]:
    """Returns the parameters of all models, and the FP8 states of each, or None."""

    def params(part):
        return part.get("params", {}) if _is_of_model(part) else part

    return (
        jax.tree.map(params, variables, is_leaf=_is_of_model),
        jax.tree.map(_states, variables, is_leaf=_is_of_model),
    )


def _states(part: Any) -> _States | None:
    if not _is_of_model(part):
        return None
    if others := sorted(set(part) - {"params", _STATES}):
        names = ", ".join(map(repr, others))
        raise ValueError(
            f"the variables hold {names} beside the parameters, which an optimizer "
            f"would change: give it {{'params': ..., {_STATES!r}: ...}} alone. Batch "
            "statistics are what `apply` returns, and Probe's are updated by "
            "nn.merge_stats."
        )
    collections = {name: part[name] for name in part if name == _STATES}
    return _States(collections, isinstance(part, core.FrozenDict))


def _is_of_model(part: Any) -> bool:
    is_dict = isinstance(part, dict | core.FrozenDict)
    return is_dict and ("params" in part or _STATES in part)
