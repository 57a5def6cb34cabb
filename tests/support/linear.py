"""A model whose logits are linear in all inputs, so that NumPy has its gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen

from loka_jax.data import Batch
from loka_jax.ops.tables import TableSpec
from loka_jax.train import metrics
from loka_jax.train.placement import Placement, one_after_another
from loka_jax.train.state import TrainState, init_state
from loka_jax.train.step import make_train_step

TABLES = TableSpec(rows=(20, 10, 5), dim=4)
FIRST_ROWS = np.array([0, 20, 30])
SIZE, NUM_DENSE = 32, 5


class Linear(linen.Module):
    """Dense features times `w`, embeddings times `v`, and `b`; [B, T] of T tasks."""

    tasks: int = 1

    @linen.compact
    def __call__(self, dense, embeddings, *, train=False):
        inputs = jnp.concatenate([dense, embeddings.reshape(len(dense), -1)], axis=1)
        normal, zeros = linen.initializers.normal(0.3), linen.initializers.zeros
        kernel = self.param("kernel", normal, (inputs.shape[1], self.tasks))
        logits = inputs @ kernel + self.param("bias", zeros, (1, self.tasks))
        return logits if self.tasks > 1 else logits[:, 0]


def make_batch(seed=0, *, tasks=1, size=SIZE) -> Batch:
    """Returns a batch of equal weights."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, (size, tasks)).astype(np.float32)
    return Batch(
        dense=rng.normal(size=(size, NUM_DENSE)).astype(np.float32),
        ids=rng.integers(0, TABLES.rows, (size, 3)).astype(np.int32),
        labels=labels if tasks > 1 else labels[:, 0],
        weights=np.ones(size, np.float32),
    )


def make_state(model, optimizer, row_optimizer, *, weighted=False) -> TrainState:
    """Returns a state before its first step, its metrics of the model's tasks."""
    how = dict(optimizer=optimizer, row_optimizer=row_optimizer, init_stddev=0.5)
    sizes = dict(tables=TABLES, num_dense=NUM_DENSE)
    state = init_state(jax.random.key(0), model=model, **sizes, **how)
    seen = metrics.init(weighted=weighted, tasks=getattr(model, "tasks", 1))
    return dataclasses.replace(state, metrics=seen)


def expected(state: TrainState, batch: Batch, task_weights=(1.0,)):
    """Returns the logits, and the gradients of `Linear`'s parameters and of all rows.

    Of the sum over tasks of the weighted means of their losses; a label that is NaN is
    missing, and has no weight.
    """
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), state.params)
    rows = np.asarray(state.table, np.float64)[batch.ids + FIRST_ROWS]
    inputs = np.concatenate([batch.dense, rows.reshape(len(rows), -1)], axis=1)
    logits = inputs @ params["kernel"] + params["bias"]
    labels = batch.labels.reshape(logits.shape)
    weights = np.where(np.isnan(labels), 0, batch.weights[:, None])
    errors = 1 / (1 + np.exp(-logits)) - np.nan_to_num(labels)
    slopes = weights * errors / weights.sum(0) * np.asarray(task_weights)
    of_inputs = slopes @ params["kernel"].T
    of_rows = np.zeros(state.table.shape)
    by_id = of_inputs[:, NUM_DENSE:].reshape(rows.shape)
    np.add.at(of_rows, batch.ids + FIRST_ROWS, by_id)
    gradients = {"kernel": inputs.T @ slopes, "bias": slopes.sum(0, keepdims=True)}
    return logits, gradients, of_rows


def step_of(model, *parts, tables=TABLES, **options):
    """Returns the training step of one device, from a state and a batch to a state."""
    step = make_train_step(model, Placement(tables), *parts, **options)
    return jax.jit(one_after_another(step))


def sgd() -> optax.GradientTransformation:
    """Returns plain gradient descent with a rate of 0.1."""
    return optax.sgd(0.1)
