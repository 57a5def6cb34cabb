"""Optimizers whose updates a step may refuse, once it knows its gradients.

    tx = skipping(optax.adamw(1e-3))
    updates, opt_state = tx.update(grads, opt_state, params, accept=is_finite)
    params = optax.apply_updates(params, updates)

Where `accept` is False, parameters and state stay as they were.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array

from loka_jax.tails import Written


@struct.dataclass
class Replaced:
    """An update that replaces what it is added to: `old + Replaced(new)` is `new`.

    Attributes:
        value: the new value.
        copy: its FP8 forms; None if none were asked for.
    """

    value: Array
    copy: Written | None = None

    __array_ufunc__ = None  # numpy would look for elements to add

    def __radd__(self, old: Any) -> Array:
        """Returns the new value."""
        return self.value


class Skipping(optax.GradientTransformationExtraArgs):
    """An optax transformation whose `update` takes `accept` and `lr_scale`.

    `accept`, bool `[]`: whether to update; None does. If given, updates are `Replaced`.
    `lr_scale`, float32 `[]`: a factor on the updates; None for 1.
    """


def skipping(optimizer: optax.GradientTransformation) -> Skipping:
    """Returns an optimizer with the same state that may skip an update."""
    if isinstance(optimizer, Skipping):
        return optimizer
    inner = optax.with_extra_args_support(optimizer)

    def update(
        updates, state, params: Any = None, *, accept=None, lr_scale=None, **how
    ) -> tuple[Any, Any]:
        updates, after = inner.update(updates, state, params, **how)
        if lr_scale is not None:
            updates = jax.tree.map(lambda u: u * lr_scale, updates)
        if accept is None:
            return updates, after
        choose = functools.partial(jnp.where, accept)
        values = jax.tree.map(choose, optax.apply_updates(params, updates), params)
        return jax.tree.map(Replaced, values), jax.tree.map(choose, after, state)

    return Skipping(inner.init, update)
