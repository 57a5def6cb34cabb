"""One training step, and one evaluation step, over the devices of a mesh.

Each device runs the step of `step.py` on its part of the batch, with rows fetched from
their owners. What must be equal everywhere then is, in two collectives:

    sum         dense gradients, loss, metrics of the batch, moments of batch norms,
                how many devices have a number that is not finite, and what is counted
                of the batch that the step routes
    maximum     FP8 state, where a model has any

so that all devices skip the same steps. Gradients that travel in fewer bits have a sum
of their own (`ops.collectives`), which keeps what is not finite; the rest is exact. The
loss of a part is over the weight of the whole batch, found when it was routed. FP8
state is merged by the maximum as over microbatches. In the steps before scales are
initialized, and with current scaling, each device casts by the amaxes of its own part.

A step whose lists were too short for its ids (`exchange`) is skipped too.

Replicas get the row gradients of all of them, or update rows alone (`row_sync`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float

from loka_jax.data import Batch
from loka_jax.nn import Model, ProbeConfig, merge_stats
from loka_jax.ops import exchange
from loka_jax.ops.collectives import Wire, sum_gradients
from loka_jax.ops.embedding import BAD_ID
from loka_jax.ops.exchange import Routed
from loka_jax.ops.mesh_axes import merging_over_devices
from loka_jax.ops.swap import swapped
from loka_jax.ops.tables import Tables, TableSpec
from loka_jax.optim.clip import global_norm
from loka_jax.train import metrics, tasks
from loka_jax.train.gradients import (
    Gradients,
    accumulated,
    gradients_of,
    variables_of,
)
from loka_jax.train.mesh import few_numbers
from loka_jax.train.mesh.devices import AXES, REPLICA, SHARD, MeshConfig, order_of
from loka_jax.train.mesh.routing import RoutedBatch
from loka_jax.train.mesh.row_sync import update_alone
from loka_jax.train.state import TrainState
from loka_jax.train.step import (
    RowUpdate,
    accepted,
    all_finite,
    count_step,
    optimized,
    rows_lr,
    update_table,
)
from loka_jax.train.tables import lookup
from loka_jax.train.tables.stacks import by_stack, projected, regrouped, split
from loka_jax.triton import Implementation
from loka_jax.unbiased import words_of

_ROUNDING = 2**31 - 1  # folded into the key of a step, as no device's number is


class StepOptions(NamedTuple):
    """Arguments of `make_train_step` that have defaults there."""

    microbatches: int = 1
    dropout_seed: int = 0
    probe: ProbeConfig | None = None
    task_weights: tuple[float, ...] = ()


class _Merged(NamedTuple):
    """What all devices have of a step."""

    loss: Float[Array, ""]
    params: Any  # the gradients
    batch_stats: Any
    fp8: Any
    seen: metrics.MetricState  # of the batch
    parts_are_finite: Bool[Array, ""]
    few: Any  # numbers of each device, along axis 0


def make_mesh_train_step(
    model: Model,
    tables: Tables,
    optimizer: optax.GradientTransformation,
    row_update: RowUpdate,
    wire: MeshConfig,
    options: StepOptions,
    gradients_wire: Wire = "f32",
) -> Callable[
    [TrainState, Batch, RoutedBatch, Any, Any], tuple[TrainState, Any, Any, Any]
]:
    """Returns the training step of a device, to be run under a `shard_map`.

    Its last arguments are trees of a few 32-bit numbers, and of arrays [L, ...] with
    what this device sends to each shard. Beside the state it returns what
    `RowSync.after` takes, the numbers of all devices, along axis 0, and what all shards
    have sent to this device.

    Args:
        model, tables, optimizer, row_update: as of `make_train_step`.
        wire: how rows and their gradients travel.
        options: the other arguments of `make_train_step`.
        gradients_wire: how dense gradients travel.
    """
    network = projected(model, tables)
    probe = options.probe
    gradients = functools.partial(gradients_of, network, probe, options.task_weights)
    if options.microbatches > 1:
        gradients = functools.partial(
            accumulated, gradients, options.microbatches, probe is not None
        )

    def step(state: TrainState, batch: Batch, routed: RoutedBatch, few, to_send):
        with jax.named_scope("lookup"):
            how = wire, row_update.implementation
            parts = network, tables, state, batch, routed
            rows, arrived = _fetch(*parts, how, to_send)
        of_step = jax.random.fold_in(jax.random.key(options.dropout_seed), state.step)
        key = jax.random.fold_in(of_step, jax.lax.axis_index(AXES))
        of_sum, of_rows = jax.random.split(jax.random.fold_in(of_step, _ROUNDING))
        with merging_over_devices():
            loss, logits, batch_stats, grads = gradients(
                state, batch, rows, key, routed.total_weight
            )
        with jax.named_scope("metrics"):
            seen = _seen(state, logits, batch)
        with jax.named_scope("merge"):
            merged = _merge(
                *((loss, batch_stats, seen, few), grads, batch, gradients_wire),
                of_sum,
            )

        grad_norm = global_norm(merged.params)
        is_finite = (
            merged.parts_are_finite
            & jnp.isfinite(merged.loss)
            & jnp.isfinite(grad_norm)
            & jnp.all(jnp.stack(routed.missing) <= 0)
        )
        with jax.named_scope("optimizer"):
            params, opt_state = optimized(optimizer, state, merged.params)
        proposed = {
            "params": params,
            "opt_state": opt_state,
            "fp8": merged.fp8,
            "batch_stats": merged.batch_stats,
            "grad_norm": grad_norm,
            "metrics": metrics.merge(state.metrics, merged.seen),
        }
        if probe is not None:
            stats = _merge_stats(grads.probe)
            proposed["probe"] = merge_stats(state.probe, stats, probe)
        with jax.named_scope("update_rows"):
            table, row_state, before = _update_tables(
                *(tables, state, batch, routed, grads.rows),
                (row_update, wire, is_finite, words_of(of_rows, AXES, 2)),
            )
        after = dataclasses.replace(
            state,
            **accepted(is_finite, proposed, state),
            table=table,
            row_state=row_state,
            **count_step(is_finite, state),
            bad_ids=state.bad_ids + routed.bad_ids,
        )
        return after, before, merged.few, arrived

    return step


def make_mesh_eval_step(
    model: Model,
    tables: Tables,
    wire: MeshConfig,
    implementation: Implementation | None = None,
) -> Callable[
    [TrainState, metrics.MetricState, Batch, RoutedBatch],
    tuple[metrics.MetricState, Array],
]:
    """Returns the evaluation step of a device: see `make_eval_step`.

    The metrics are those of all devices, the logits those of its own examples.

    Args:
        model, tables: as of `make_eval_step`.
        wire: how rows travel.
        implementation: as of `RowUpdate`.
    """
    network = projected(model, tables)

    def step(state, seen, batch: Batch, routed: RoutedBatch):
        how = wire, implementation
        rows, _ = _fetch(network, tables, state, batch, routed, how)
        logits = network.apply(variables_of(state), batch.dense, rows)
        logits = jnp.asarray(logits).astype(jnp.float32)
        (batch_seen,) = _sum((_seen(state, logits, batch),))
        return metrics.merge(seen, batch_seen), logits

    return step


def look_up_everywhere(
    model: Any, tables: Tables, state: TrainState, batch: Batch
) -> Any:
    """Returns the fields' embeddings of a batch that all devices have, on all."""
    dtype = getattr(model, "compute_dtype", jnp.float32)

    def look_up(spec: TableSpec, table: Array, part: Batch):
        order = order_of(spec)
        places, _ = lookup.places(spec, part, order)
        rows = exchange.fetch_everywhere(table, places, order, SHARD)
        slots = jnp.arange(len(rows), dtype=jnp.int32)
        is_row = places.v < order.shards
        ids = lookup.at_slots(part, jnp.where(is_row, slots, BAD_ID))
        return lookup.embeddings(spec, rows, ids, dtype)

    return by_stack(look_up, tables, state.table, split(tables, batch))


def _fetch(
    model: Any,
    tables: Tables,
    state: TrainState,
    batch: Batch,
    routed: RoutedBatch,
    how: tuple[MeshConfig, Implementation | None],
    to_send: Any = (),
) -> tuple[Any, Any]:
    """Returns the fields' embeddings of this device's part of a batch, by stack.

    And what arrives of what all shards have `to_send`, by the collective of the rows.
    """
    wire, implementation = how
    # The model would cast them first of all: as in a step without a mesh.
    dtype = getattr(model, "compute_dtype", jnp.float32)
    codec = wire.wire_rows

    def offered(_, table: Array, route: Routed):
        return exchange.offered(table, route, codec, implementation=implementation)

    def received(spec: TableSpec, part: Batch, route: Routed, payload: Array):
        if part.bags:
            rows = exchange.received_lists(payload, codec, spec.dim)
            ids = lookup.at_slots(part, route.slots)
            return lookup.embeddings(spec, rows, ids, dtype)
        rows = exchange.received(
            payload, route, codec, spec.dim, implementation=implementation
        )
        return rows.reshape(*part.ids.shape, -1).astype(dtype)

    payloads = by_stack(offered, tables, state.table, routed.routes)
    payloads, arrived = swapped((payloads, to_send), SHARD)
    parts = split(tables, batch), routed.routes, payloads
    return by_stack(received, tables, *parts), arrived


def _update_tables(tables: Tables, state, batch: Batch, routed, row_grads, how):
    """Returns the parts of tables and optimizer states after a step, and before it.

    Before it only what groups have yet to average, None without.
    """
    row_update, wire, enabled, words = how
    lr = rows_lr(row_update, state)
    weights = jnp.asarray(batch.weights)
    has_replicas = jax.lax.axis_size(REPLICA) > 1
    is_alone = has_replicas and wire.sync == "weights"

    def summed(spec: TableSpec, part: Batch, route: Routed, grads):
        ids = lookup.at_slots(part, route.slots)
        _, grads = lookup.row_gradients(spec, ids, grads, weights)
        return exchange.summed(
            route,
            grads.reshape(-1, spec.dim),
            wire.wire_gradients,
            words[0],
            implementation=row_update.implementation,
        )

    def update(spec: TableSpec, table, row_state, route: Routed, payload):
        touched = exchange.arrived(
            *(payload, route, wire.wire_gradients, spec.dim),
            REPLICA if has_replicas and not is_alone else None,
        )
        if is_alone:
            how = row_update, wire, enabled, words[1]
            return update_alone(table, row_state, touched, how, lr)
        order = order_of(spec)
        shards = order.shards // jax.lax.axis_size(SHARD)
        first = jax.lax.axis_index(SHARD) * shards
        rounded = row_update.at_step(state.step, order, spec.dim, first)
        parts = table, row_state, touched, rounded, lr, enabled
        return *update_table(*parts, ascending=True), None

    parts = split(tables, batch), routed.routes, row_grads
    payloads = swapped(by_stack(summed, tables, *parts), SHARD)
    parts = state.table, state.row_state, routed.routes, payloads
    return regrouped(tables, by_stack(update, tables, *parts))


def _seen(state: TrainState, logits: Array, batch: Batch) -> metrics.MetricState:
    """Returns the metrics of this device's part of a batch."""
    labels, weights = tasks.labels_and_weights(batch)
    return metrics.update(metrics.init_like(state.metrics), logits, labels, weights)


def _merge(
    parts: tuple, grads: Gradients, batch: Batch, wire: Wire, key: Array
) -> _Merged:
    """Returns what the devices have together, by one sum and one maximum.

    By two sums if gradients do not travel in float32.

    Args:
        parts: loss, running moments, metrics of the batch, and a few numbers.
        grads: of the examples of this device.
        batch: its part of the batch.
        wire: how dense gradients travel.
        key: of the step, for those that are rounded.
    """
    loss, batch_stats, seen, few = parts
    count = jax.lax.axis_size(AXES)
    batch_stats = jax.tree.map(lambda x: x / count, batch_stats)
    # The loss and the dense gradients of all devices are looked at after the sum.
    is_finite = all_finite(0.0, 0.0, grads.rows, batch.dense)
    bad = 1.0 - is_finite.astype(jnp.float32)
    rest = loss, batch_stats, seen, bad, few_numbers.to_sum(few)
    params = grads.params
    if wire == "f32":
        rest, params = _sum((rest, params))
    else:
        rest, params = _sum(rest), sum_gradients(params, AXES, wire, key)
    loss, batch_stats, seen, bad, total = rest
    few = few_numbers.from_sum(total, few)
    fp8 = _maximum(grads.fp8) if jax.tree.leaves(grads.fp8) else grads.fp8
    return _Merged(loss, params, batch_stats, fp8, seen, bad == 0, few)


def _sum(tree: Any) -> Any:
    """Returns the sum of trees over all devices, by one collective of float32.

    Whole numbers are exact below 2^24.
    """
    floats = jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    flat, unflatten = ravel_pytree(floats)
    total = unflatten(jax.lax.psum(flat, AXES))
    return jax.tree.map(lambda x, like: x.astype(like.dtype), total, tree)


def _maximum(tree: Any) -> Any:
    """Returns the element-wise maximum of float32 trees over all devices."""
    flat, unflatten = ravel_pytree(tree)
    return unflatten(jax.lax.pmax(flat, AXES))


def _merge_stats(stats: Any) -> Any:
    """Returns Probe's statistics of all devices, merged as those of microbatches."""
    flat, unflatten = ravel_pytree(stats)
    parts = jax.lax.all_gather(flat, AXES)

    def add(merged, part):
        return merge_stats(merged, unflatten(part), ProbeConfig()), None

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, stats), parts)[0]
