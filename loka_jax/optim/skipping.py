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

from loka_jax.nn.overwriting import Replaced


class Skipping(optax.GradientTransformationExtraArgs):
    """An optax transformation whose `update` takes `accept` and `lr_scale`.

    `accept`, bool `[]`: whether to update; None does. If it is given, updates are
    `Replaced`, which `optax.apply_updates` takes, and no further transformation.
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
