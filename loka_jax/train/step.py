"""One training step, and one evaluation step, as pure functions of state and batch.

    rows             <- tables[ids], pooled for lists     gathered, not differentiated
    loss, gradients  <- with respect to (params, rows, FP8 state)
    params           <- optax, which sees nothing but them
    tables           <- one update for each touched row
    FP8 state        <- its "gradient", which is its next value
    Probe            <- merged with its "gradient", the statistics of this batch

A step whose loss, gradients or dense features are not finite changes only counters.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from loka_jax import scaling
from loka_jax.data import Batch
from loka_jax.nn import (
    PROBE,
    Model,
    Planned,
    ProbeConfig,
    merge_stats,
    probing,
)
from loka_jax.nn.scale_state import SCALES
from loka_jax.ops import embedding, row_rounding
from loka_jax.ops.row_order import Order
from loka_jax.ops.tables import Tables
from loka_jax.ops.tap import Observer
from loka_jax.optim import whole_table_update
from loka_jax.optim.clip import global_norm
from loka_jax.probe.capture import at_step
from loka_jax.train import metrics, tasks
from loka_jax.train.gradients import accumulated, gradients_of, variables_of
from loka_jax.train.state import TrainState
from loka_jax.train.tables import lookup
from loka_jax.train.tables.stacks import by_stack, projected, regrouped, split

# Of evaluation and inference: roundings that the model makes are made, so that weights
# may be rounded ahead, as in an exported model. By default XLA leaves some out.
INFERENCE_OPTIONS = {"xla_allow_excess_precision": False}


class RowUpdate(NamedTuple):
    """How embedding rows are updated.

    Attributes:
        optimizer: a row optimizer of `loka_jax.optim`.
        learning_rate: schedule of the learning rate, before `TrainState.lr_scale`.
        l2: weight of the squared norm of the whole table in the loss; if positive,
            every row is updated every step.
        implementation: "xla" to use XLA only; None to use kernels where they apply.
        rounding_seed: of the stochastic rounding of bfloat16 tables; None rounds to the
            nearest.
    """

    optimizer: Any
    learning_rate: optax.Schedule
    l2: float
    implementation: Literal["xla"] | None = None
    rounding_seed: int | None = None

    def at_step(
        self, step: Array, order: Order, dim: int, first_shard: Array | int = 0
    ) -> "RowUpdate":
        """Returns the update of a stack in a step, with the rounding of its rows.

        Args:
            step: the number of the step.
            order: of the rows.
            dim: of the stack.
            first_shard: the first virtual shard of this device's part of it.
        """
        if self.rounding_seed is None:
            return self
        rounding = row_rounding.of_step(
            self.rounding_seed, step, order, dim, first_shard
        )
        return self._replace(optimizer=embedding.Rounded(self.optimizer, rounding))


def make_train_step(
    model: Model,
    tables: Tables,
    optimizer: optax.GradientTransformation,
    row_update: RowUpdate,
    *,
    microbatches: int = 1,
    dropout_seed: int = 0,
    probe: ProbeConfig | None = None,
    task_weights: tuple[float, ...] = (),
) -> Callable[[TrainState, Batch], TrainState]:
    """Returns the training step; jit it with the state donated.

    Args:
        model: maps dense features and embeddings to logits. A model with a
            `compute_dtype` gets embeddings of that dtype.
        tables: the embedding tables.
        optimizer: optimizer of the dense parameters.
        row_update: how the tables' rows are updated.
        microbatches: parts of the batch whose gradients are accumulated. Except for
            batch norm, the result equals that of the whole batch up to rounding; FP8
            state is merged by the maximum.
        dropout_seed: seed of the dropout masks, which also depend on the step.
        probe: how Probe observes the sites in this step; None if it does not.
        task_weights: weights of the losses of several tasks; 1 for each if empty.
    """
    network = projected(model, tables)
    gradients = functools.partial(gradients_of, network, probe, task_weights)
    if microbatches > 1:
        gradients = functools.partial(
            accumulated, gradients, microbatches, probe is not None
        )

    def step(state: TrainState, batch: Batch) -> TrainState:
        with jax.named_scope("lookup"):
            ids, rows = _look_up(network, tables, state, batch)
        key = jax.random.fold_in(jax.random.key(dropout_seed), state.step)
        loss, logits, batch_stats, grads = gradients(state, batch, rows, key)

        grad_norm = global_norm(grads.params)
        is_finite = all_finite(loss, grad_norm, grads.rows, batch.dense)
        with jax.named_scope("optimizer"):
            params, opt_state = optimized(optimizer, state, grads.params)
        proposed = {
            "params": params,
            "opt_state": opt_state,
            "fp8": grads.fp8,
            "batch_stats": batch_stats,
            "grad_norm": grad_norm,
        }
        if probe is not None:
            proposed["probe"] = merge_stats(state.probe, grads.probe, probe)
        kept = accepted(is_finite, proposed, state)
        weights = jnp.asarray(batch.weights)
        touched = by_stack(
            functools.partial(lookup.row_gradients, weights=weights),
            tables,
            ids,
            grads.rows,
        )
        with jax.named_scope("update_rows"):
            table, row_state = _update_tables(
                tables, state, touched, row_update, is_finite
            )
        labels, weights = tasks.labels_and_weights(batch)
        weights = jnp.where(is_finite, weights, 0.0)
        with jax.named_scope("metrics"):
            seen = metrics.update(state.metrics, logits, labels, weights)
        new = kept | {"table": table, "row_state": row_state, "metrics": seen}
        return dataclasses.replace(
            state, **new, **_counted(is_finite, tables, ids, batch, state)
        )

    return step


def one_after_another(
    step: Callable[[TrainState, Batch], TrainState],
) -> Callable[..., TrainState]:
    """Returns a function of a state and batches that takes a step on each.

    Bit for bit the same as a call for each.
    """

    def steps(state: TrainState, *batches: Batch) -> TrainState:
        for i, batch in enumerate(batches):
            state = step(apart(state) if i else state, batch)
        return state

    return steps


def apart(state: Any) -> Any:
    """Returns the state between two steps, across which XLA is to compute nothing."""
    return jax.lax.optimization_barrier(state)


def make_eval_step(
    model: Model, tables: Tables
) -> Callable[
    [TrainState, metrics.MetricState, Batch],
    tuple[metrics.MetricState, Array],
]:
    """Returns the evaluation step: it adds a batch to the metrics, and has its logits.

    The logits are float32, [B] of one task and [B, T] of several.
    """

    def step(state: TrainState, seen: metrics.MetricState, batch: Batch):
        logits = logits_of(model, tables, state, batch).astype(jnp.float32)
        labels, weights = tasks.labels_and_weights(batch)
        return metrics.update(seen, logits, labels, weights), logits

    return step


def compiled_eval_step(model: Model, tables: Tables) -> jax.stages.Wrapped:
    """Returns the evaluation step, compiled, its metrics donated."""
    return jax.jit(
        make_eval_step(model, tables),
        donate_argnums=1,
        compiler_options=INFERENCE_OPTIONS,
    )


def logits_of(
    model: Model, tables: Tables, state: TrainState, batch: Batch
) -> Float[Array, "B"] | Float[Array, "B T"]:
    """Returns the logits of a batch in evaluation mode."""
    network = projected(model, tables)
    _, rows = _look_up(network, tables, state, batch)
    return jnp.asarray(network.apply(variables_of(state), batch.dense, rows))


def look_up(model: Any, tables: Tables, state: TrainState, batch: Batch) -> Any:
    """Returns the fields' embeddings of a batch."""
    return _look_up(model, tables, state, batch)[1]


def make_observe_step(
    model: Model,
    tables: Tables,
    observer: Observer,
    task_weights: tuple[float, ...],
    look_up=look_up,
) -> Callable[..., Any]:
    """Returns a step that returns an observer's result of every site, not training.

    It takes a state, a batch, and the weight of all examples of the training step if
    the batch is a part of them: gradients are as large as in that step.

    Args:
        model, tables, task_weights: as in `make_train_step`.
        observer: of the sites.
        look_up: gives the fields' embeddings.
    """
    network = projected(model, tables)

    def step(state: TrainState, batch: Batch, total_weight: Array | None = None):
        rows = look_up(network, tables, state, batch)
        with probing(observer):
            init = functools.partial(network.init, jax.random.key(0))
            shapes = jax.eval_shape(init, batch.dense, rows)[PROBE]
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        state = dataclasses.replace(state, probe=at_step(empty, state.step))
        inputs = state, batch, rows, jax.random.key(0), total_weight
        return gradients_of(network, observer, task_weights, *inputs)[-1].probe

    return step


def named_sites(state: TrainState) -> dict[str, scaling.DelayedScaling]:
    """Returns the delayed-scaling states of a model by the paths of their sites."""
    tables = jax.tree_util.tree_leaves_with_path(state.fp8)
    return {
        "/".join(str(key.key) for key in path[:-1]): scaling.DelayedScaling(table)
        for path, table in tables
        if path[-1].key == SCALES
    }


def scales_initialized(state: TrainState) -> bool:
    """Returns whether the delayed scales of all sites are initialized."""
    return all(jax.device_get(_each_initialized(list(named_sites(state).values()))))


def past_first_steps(model: Planned, state: TrainState) -> Planned:
    """Returns the model as it runs after the first steps, if `state` is past them.

    With initialized scales no site looks for others, and more sites run with their
    neighbours. Evaluation, prediction and exported programs decide so by the state
    alone, and so have equal logits.
    """
    if not model.is_delayed or not scales_initialized(state):
        return model
    return model.with_initialized_scales()


@jax.jit
def _each_initialized(sites: list[scaling.DelayedScaling]):
    return [scaling.scales_initialized(site) for site in sites]


def _look_up(
    model: Any, tables: Tables, state: TrainState, batch: Batch
) -> tuple[Any, PyTree[Float[Array, "B _ _"]]]:
    """Returns the ids of a batch in the stacked tables, and the fields' embeddings."""
    ids = by_stack(lookup.find, tables, split(tables, batch))
    # The model would cast them first of all. Cast here, the rows' gradients have that
    # dtype too, and half the bytes to write and to gather.
    dtype = getattr(model, "compute_dtype", jnp.float32)
    look_up = functools.partial(lookup.embeddings, dtype=dtype)
    return ids, by_stack(look_up, tables, state.table, ids)


def all_finite(loss, grad_norm, row_grads, features) -> Array:
    """Returns whether all numbers of a step are finite."""
    # Features too: an infinite feature saturates in a cast with a delayed scale, and if
    # all roles of the first layer are FP8, no gradient reveals it.
    values = (loss, grad_norm, optax.tree.norm(row_grads), features)
    return functools.reduce(jnp.logical_and, (jnp.all(jnp.isfinite(x)) for x in values))


def accepted(is_finite, proposed: dict[str, Any], state: TrainState):
    """Returns proposed fields of the state, or the old ones if the step is skipped."""
    kept = {name: getattr(state, name) for name in proposed}
    return jax.tree.map(functools.partial(jnp.where, is_finite), proposed, kept)


def _counted(
    is_finite, tables: Tables, ids, batch: Batch, state: TrainState
) -> dict[str, Any]:
    """Returns the counters of the state after a step."""
    bad_ids = by_stack(
        lambda _, *part: lookup.count_bad_ids(*part),
        tables,
        ids,
        split(tables, batch),
    )
    return {
        **count_step(is_finite, state),
        "bad_ids": jax.tree.reduce(jnp.add, bad_ids, state.bad_ids),
    }


def count_step(is_finite: Array, state: TrainState) -> dict[str, Any]:
    """Returns the counters of steps after one, which is skipped unless finite."""
    return {
        "step": state.step + 1,
        "skipped": state.skipped + jnp.where(is_finite, 0, 1),
        "skipped_in_a_row": jnp.where(is_finite, 0, state.skipped_in_a_row + 1),
    }


def optimized(optimizer: optax.GradientTransformation, state: TrainState, gradients):
    """Returns the dense parameters and the optimizer's state after a step."""
    with jax.numpy_dtype_promotion("standard"):  # optax.adam relies on it
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    updates = jax.tree.map(lambda u: u * state.lr_scale, updates)
    return optax.apply_updates(state.params, updates), opt_state


def _update_tables(tables, state: TrainState, touched, row_update: RowUpdate, enabled):
    """Returns the tables and the row optimizer's state after a step."""
    lr = rows_lr(row_update, state)

    def update(spec, table, row_state, touched):
        how = row_update.at_step(state.step, Order(spec.total_rows, 1), spec.dim)
        return update_table(table, row_state, touched, how, lr, enabled)

    updated = by_stack(update, tables, state.table, state.row_state, touched)
    return regrouped(tables, updated)


def rows_lr(row_update: RowUpdate, state: TrainState) -> Array:
    """Returns the learning rate of the rows in a step."""
    lr = row_update.learning_rate(state.step - state.skipped)
    return jnp.asarray(lr) * state.lr_scale


def update_table(
    table, row_state, touched, row_update: RowUpdate, lr, enabled, ascending=False
):
    """Returns a table and its optimizer's state after a step."""
    ids, row_grads = touched
    optimizer, implementation = row_update.optimizer, row_update.implementation
    if row_update.l2 > 0:
        summed = embedding.sum_by_row(
            ids, row_grads, table.shape[0], implementation=implementation
        )
        return whole_table_update(
            table, row_state, summed, optimizer, lr, row_update.l2, enabled=enabled
        )
    return embedding.update_rows(
        table,
        row_state,
        ids,
        row_grads,
        optimizer,
        lr,
        enabled=enabled,
        ascending=ascending,
        implementation=implementation,
    )
