"""The FP8 state of a model under optax: overwritten, neither optimized nor averaged.

    tx = nn.overwriting(optax.adamw(1e-3))
    opt_state = tx.init(variables)                      # all that model.init returned
    gradients = jax.grad(loss)(variables)
    updates, opt_state = tx.update(gradients, opt_state, variables)
    variables = optax.apply_updates(variables, updates)

The optimizer sees everything but the collection `_overwrite_with_gradient`, whose
gradient is its next value. The collection may lie at any depth, as in `{"user":
model.init(...), "item": model.init(...)}`. The state of a site on which the loss does
not depend, such as that of an unused tower, stays as it was.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import core, struct
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as _STATES
from jaxtyping import Array, Float

from loka_jax.max_merge import unmerged
from loka_jax.nn.observed import PROBE, is_of_site
from loka_jax.scaling import merge_delayed


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
        return overwritten(jnp.asarray(old), self.value)


def overwritten(old: Array, gradient: Array) -> Array:
    """Returns the next table of a state, or of several, stacked.

    A site on which no loss depends has a gradient of zeros, which JAX makes itself, and
    stays as it was. The factors of a real one are positive.
    """
    gradient = unmerged(gradient)
    # By row, as a reduction would be a kernel of its own.
    return jnp.where(gradient[..., :1] != 0, gradient, unmerged(old))


def overwriting(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer of all variables of a model that overwrites its FP8 state.

    The variables of several models may be in one tree.

    It must be outermost: `overwriting(optax.MultiSteps(tx, 4))`, and
    `overwriting(optax.chain(clip, tx))`. Parameters alone go through unchanged, so that
    it may stand in Flax's `TrainState`, which overwrites by itself.

    Args:
        optimizer: of everything but the FP8 state, which it never sees.

    Raises:
        ValueError: in `init` and `update`, if Probe's statistics are among the
            variables: `merge_stats` updates them.
    """
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    inner = optax.with_extra_args_support(optimizer)

    def init(params):
        return inner.init(_split(params)[0])

    def update(updates, state, params=None, **extra) -> tuple[Any, Any]:
        updates, states = _split(updates)
        rest = None if params is None else _split(params)[0]
        out, state = inner.update(updates, state, rest, **extra)
        return _joined(out, jax.tree.map(Overwrite, states)), state

    return optax.GradientTransformationExtraArgs(init, update)


def accumulate(
    total: Any, gradients: Any, share: float | Float[Array, ""] = 1.0
) -> Any:
    """Returns `total + share * gradients`, the FP8 states merged by their maximum.

    All microbatches of a step start from the same variables. A mean of states would
    lose the loudest microbatch, whose values would then saturate.

        total = jax.tree.map(jnp.zeros_like, variables)
        for microbatch in microbatches:
            total = nn.accumulate(total, gradients(microbatch), 1 / len(microbatches))

    Args:
        total: of the microbatches before; zeros at first.
        gradients: of all variables of a model, or of several in one tree.
        share: of the microbatch in the step.

    Raises:
        ValueError: if Probe's statistics are among the variables.
    """
    total, states = _split(total)
    gradients, more = _split(gradients)
    total = jax.tree.map(lambda a, b: (a + share * b).astype(a.dtype), total, gradients)
    return _joined(total, merge_delayed(states, more))


def _joined(variables: Any, states: Any) -> Any:
    """Returns the variables that `_split` took apart."""

    def joined(own, part):
        return part if own is None else core.copy(part, own)

    def is_leaf(own):
        return own is None or _has_states(own)

    return jax.tree.map(joined, states, variables, is_leaf=is_leaf)


def _split(variables: Any) -> tuple[Any, Any]:
    """Returns variables without their FP8 states, and the states alone.

    The latter are `{"_overwrite_with_gradient": ...}` in the place of each model's
    variables that have them, and None elsewhere.
    """
    if any(map(is_of_site, jax.tree.leaves(variables, is_leaf=is_of_site))):
        raise ValueError(
            f"the collection {PROBE!r} is no parameter: take it out of the variables "
            "that the optimizer sees, and update it by nn.merge_stats."
        )

    def rest(part):
        return core.pop(part, _STATES)[0] if _has_states(part) else part

    def states(part):
        return {_STATES: part[_STATES]} if _has_states(part) else None

    return (
        jax.tree.map(rest, variables, is_leaf=_has_states),
        jax.tree.map(states, variables, is_leaf=_has_states),
    )


def _has_states(part: Any) -> bool:
    return isinstance(part, dict | core.FrozenDict) and _STATES in part
