"""Adam that updates all parameters in few kernels, with their FP8 forms.

As an optax transformation its state is that of `optax.chain(clip_by_global_norm(c),
optax.adam(r))`, and so are its updates. On Hopper, of float32 parameters, a kernel runs
where `accept` or `copies` is given, and differs in rounding:

    tx = adam(1e-3, max_norm=1.0)
    updates, opt_state = tx.update(grads, opt_state, params, accept=True)
    params = optax.apply_updates(params, updates)

The updates then are the new parameters themselves (`Replaced`).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from loka_jax import triton, xla
from loka_jax.nn.overwriting import Replaced
from loka_jax.ops.group_sites import cast
from loka_jax.optim.clip import clip_by_global_norm, clip_factor
from loka_jax.optim.skipping import Skipping, skipping
from loka_jax.tails import Scaled, Written
from loka_jax.triton import adam as kernel
from loka_jax.triton.adam import Copy, Factors


def adam(
    learning_rate: float | optax.Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    max_norm: float | None = None,
    implementation: triton.Implementation | None = None,
) -> Skipping:
    """Returns Adam (Kingma and Ba, arXiv:1412.6980), by kernels where these run.

    Its `update` also takes `copies`: a tree with the structure of the parameters, of
    the forms (`Copy`) in which to write a matrix too, or None. The updates are then
    `Replaced`, with the copies of the very values that they hold.

    Args:
        learning_rate: or a schedule of it.
        max_norm: of the gradients, which are scaled down to it; None for no limit.
        implementation: "triton" requires the kernels; None is Triton if it is installed
            and the GPU is a Hopper, else XLA.
    """
    rule = optax.adam(learning_rate, b1, b2, eps)
    whole = (
        rule if max_norm is None else optax.chain(clip_by_global_norm(max_norm), rule)
    )
    plain = skipping(whole)

    def update(
        updates, state, params=None, *, accept=None, lr_scale=None, copies=None
    ) -> tuple[Any, Any]:
        grads = jax.tree.leaves(updates)
        leaves, tree = jax.tree.flatten(params)
        wanted = [None] * len(leaves) if copies is None else _leaves(copies)
        if copies is not None and accept is None:
            accept = True
        is_plain = accept is None  # of which further transformations may follow
        if is_plain or _provider(implementation, leaves, grads) == "xla":
            options = dict(accept=accept, lr_scale=lr_scale)
            updates, state = plain.update(updates, state, params, **options)
            return (updates if copies is None else _with(updates, wanted)), state
        clip, (moments, rate) = (None, state) if max_norm is None else state
        count: Any = optax.safe_increment(moments.count)
        factors = Factors(
            clip=1.0 if max_norm is None else clip_factor(updates, max_norm),
            mu_correction=1 - b1**count,
            nu_correction=1 - b2**count,
            rate=-_rate(learning_rate, rate),
            rate_scale=1.0 if lr_scale is None else lr_scale,
            is_accepted=accept,
        )
        mu, nu = jax.tree.leaves(moments.mu), jax.tree.leaves(moments.nu)
        constants = dict(b1=b1, b2=b2, eps=eps)
        updated = kernel.adam(leaves, grads, mu, nu, factors, wanted, **constants)
        moments = moments._replace(
            mu=tree.unflatten([x.mu for x in updated]),
            nu=tree.unflatten([x.nu for x in updated]),
        )
        if callable(learning_rate):
            rate = _counted(rate, accept)
        after = _counted(moments, accept), rate
        updates = tree.unflatten([Replaced(u.param, u.copy) for u in updated])
        return updates, after if max_norm is None else (clip, after)

    return Skipping(plain.init, update)


def _provider(
    implementation: triton.Implementation | None,
    params: Sequence[Array],
    grads: Sequence[Array],
) -> triton.Implementation:
    if not params:
        return "xla"
    refusal = kernel.why_not(params, grads)
    return triton.chosen(implementation, refusal, "adam")


def _rate(learning_rate: float | optax.Schedule, state: Any) -> Any:
    return learning_rate(state.count) if callable(learning_rate) else learning_rate


def _counted(state: Any, accept: Array | bool) -> Any:
    """Returns a state with one update more, if it was not refused."""
    count = optax.safe_increment(state.count)
    return state._replace(count=jnp.where(accept, count, state.count))


def _leaves(copies: Any) -> list[Copy | None]:
    return jax.tree.leaves(copies, is_leaf=lambda x: x is None or isinstance(x, Copy))


def _with(updates: Any, wanted: Sequence[Copy | None]) -> Any:
    """Returns updates of XLA with the forms of their values."""
    leaves, tree = jax.tree.flatten(updates, is_leaf=lambda x: isinstance(x, Replaced))
    return tree.unflatten(
        [
            x.replace(copy=None if copy is None else _cast(x.value, copy))
            for x, copy in zip(leaves, wanted, strict=True)
        ]
    )


def _cast(value: Array, copy: Copy) -> Written:
    return cast(xla.tails, Scaled(value), copy.forms, copy.scale_inv)
