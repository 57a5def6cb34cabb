"""The loss of a batch and its gradients, also accumulated over parts of the batch."""

import contextlib
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from loka_jax import nn, scaling
from loka_jax.nn import OVERWRITE_WITH_GRADIENT, PROBE, probing
from loka_jax.train import tasks
from loka_jax.train.state import TrainState


class Gradients(NamedTuple):
    """Gradients; that of FP8 state is its next value."""

    params: Any
    rows: PyTree[Float[Array, "B _ _"]]
    fp8: Any


def inputs_of(batch: Any, rows: Any) -> tuple[Any, ...]:
    """Returns what the model is called with: events, too, of an event log."""
    if batch.events is None:
        return batch.dense, rows
    return batch.dense, rows, batch.events


def variables_of(state: TrainState) -> dict[str, Any]:
    """Returns the variables of the model in a state."""
    return {
        "params": state.params,
        OVERWRITE_WITH_GRADIENT: state.fp8,
        "batch_stats": state.batch_stats,
    }


def gradients_of(
    model, objective, state: TrainState, batch, rows, key, total_weight=None
):
    """Returns the loss, the logits, the new batch statistics, and the gradients.

    The loss is the sum over the batch of the weighted losses, over `total_weight`: the
    weight of the batch, or of a larger one of which this is a part.
    """

    def loss_of(params, rows, fp8):
        changed = {"params": params, OVERWRITE_WITH_GRADIENT: fp8}
        variables = variables_of(state) | changed
        return _loss_of(
            model, objective, state, variables, batch, rows, key, total_weight
        )

    grad = jax.value_and_grad(loss_of, argnums=(0, 1, 2), has_aux=True)
    (loss, (logits, batch_stats)), grads = grad(state.params, rows, state.fp8)
    return loss, logits, batch_stats, Gradients(*grads)


def seen_by(
    observer, model, objective, state: TrainState, batch, rows, total_weight=None
):
    """Returns what an observer tells of each site in a step that does not train.

    It is the "gradient" of its statistics, `state.probe`.
    """
    key = jax.random.key(0)

    def loss_of(stats):
        variables = variables_of(state) | {PROBE: stats}
        return _loss_of(
            model, objective, state, variables, batch, rows, key, total_weight
        )[0]

    with probing(observer):
        return jax.grad(loss_of)(state.probe)


def _loss_of(
    model, objective, state: TrainState, variables, batch, rows, key, total_weight
):
    labels, weights = tasks.labels_and_weights(batch)
    if total_weight is None:
        total_weight = jnp.sum(weights, axis=0)
    seeing = nn.seeing_blocks() if objective.tweo else contextlib.nullcontext()
    with seeing:
        logits, updated = model.apply(
            variables,
            *inputs_of(batch, rows),
            train=True,
            rngs={"dropout": key},
            mutable=["batch_stats"] + [nn.BLOCKS] * bool(objective.tweo),
        )
    losses = objective.loss(logits, labels, weights)
    losses = jnp.where(weights > 0, losses * weights, 0.0)
    means = jnp.sum(losses, axis=0) / _divisor(state, total_weight)
    loss = tasks.total_loss(means, objective.task_weights)
    if objective.tweo:
        share = jnp.sum(weights) / jnp.sum(_divisor(state, total_weight))
        loss += objective.tweo * share * nn.penalty(updated.get(nn.BLOCKS))
    return loss, (logits, updated.get("batch_stats", {}))


def _divisor(state: TrainState, total_weight: Array) -> Array:
    """Returns the batch's total weight, or 1 if that is 0; of each task, if several."""
    if state.metrics.weight is None:  # a total of whole numbers
        return jnp.maximum(total_weight, 1.0)
    return jnp.where(total_weight > 0, total_weight, 1.0)


def accumulate(
    gradients, count, state: TrainState, batch, rows, key, total_weight=None
):
    """Returns the result of `gradients`, accumulated over parts of the batch."""
    if total_weight is None:
        total_weight = jnp.sum(tasks.labels_and_weights(batch)[1], axis=0)
    size = len(batch.weights) // count  # not -1: without columns arrays are empty
    parts = jax.tree.map(lambda x: x.reshape(count, size, *x.shape[1:]), (batch, rows))

    def add(carry, part):
        (part_batch, part_rows), key = part
        loss, params, fp8, batch_stats = carry
        part_loss, logits, batch_stats, grads = gradients(
            dataclasses.replace(state, batch_stats=batch_stats),
            part_batch,
            part_rows,
            key,
            total_weight,
        )
        carry = (
            loss + part_loss,
            jax.tree.map(jnp.add, params, grads.params),
            scaling.merge_delayed(fp8, grads.fp8),
            batch_stats,
        )
        return carry, (logits, grads.rows)

    start = (
        jnp.zeros(()),
        jax.tree.map(jnp.zeros_like, state.params),
        jax.tree.map(jnp.zeros_like, state.fp8),
        state.batch_stats,
    )
    carry, (logits, row_grads) = jax.lax.scan(
        add, start, (parts, jax.random.split(key, count))
    )
    loss, params, fp8, batch_stats = carry
    row_grads = jax.tree.map(lambda x, like: x.reshape(like.shape), row_grads, rows)
    logits = logits.reshape(-1, *logits.shape[2:])
    return loss, logits, batch_stats, Gradients(params, row_grads, fp8)
