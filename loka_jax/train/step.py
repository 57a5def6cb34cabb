"""One training step, and one evaluation step, as pure functions of state and batch.

    rows             <- tables[ids], pooled for lists     gathered, not differentiated
    loss, gradients  <- with respect to (params, rows, FP8 state)
    params           <- optax, which sees nothing but them
    tables           <- one update for each touched row
    FP8 state        <- its "gradient", which is its next value

A step whose loss, gradients or dense features are not finite changes only counters.

Over a mesh each device runs the step on its part of the batch. The placement fetches
rows from their owners, brings together what must be equal everywhere, so that all
devices skip the same steps, and sends row gradients back (`mesh.placement`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from loka_jax import scaling
from loka_jax.data import Batch
from loka_jax.measure.compiling import Ahead
from loka_jax.nn import PROBE, Model, Planned, probing
from loka_jax.nn.scale_state import tables_by_path
from loka_jax.ops.mesh_axes import merging_over_devices
from loka_jax.ops.tables import Tables
from loka_jax.ops.tap import Observer
from loka_jax.optim.clip import global_norm
from loka_jax.train import metrics, tasks
from loka_jax.train.gradients import (
    accumulate,
    gradients_of,
    inputs_of,
    seen_by,
    variables_of,
)
from loka_jax.train.placement import Outcome, Placement
from loka_jax.train.state import TrainState
from loka_jax.train.tables.stacks import project
from loka_jax.train.tables.update import RowUpdate


def make_train_step(
    model: Model,
    placement: Placement,
    optimizer: optax.GradientTransformation,
    row_update: RowUpdate,
    *,
    microbatches: int = 1,
    dropout_seed: int = 0,
    objective: tasks.Objective = tasks.LOG_LOSS,
) -> Callable[..., tuple[TrainState, Any]]:
    """Returns the training step of a device, for `Placement.train_program`.

    It takes the state, a batch, and what a mesh has routed of it, and returns the next
    state and what the placement leaves for later steps.

    Args:
        model: maps dense features and embeddings to logits. A model with a
            `compute_dtype` gets embeddings of that dtype.
        microbatches: parts of the batch whose gradients are accumulated. Except for
            batch norm, the result equals that of the whole batch up to rounding; FP8
            state is merged by the maximum.
        dropout_seed: seed of the dropout masks, which also depend on the step.
        objective: what is minimized.
    """
    projected = project(model, placement.tables)
    gradients = functools.partial(gradients_of, projected, objective)
    if microbatches > 1:
        gradients = functools.partial(accumulate, gradients, microbatches)

    def step(state: TrainState, batch: Batch, routed: Any = None):
        with jax.named_scope("lookup"):
            rows, found = placement.look_up(projected, state, batch, routed)
        key = jax.random.fold_in(jax.random.key(dropout_seed), state.step)
        key_of_part = placement.key_of_part(key)
        with merging_over_devices():
            loss, logits, batch_stats, grads = gradients(
                state, batch, rows, key_of_part, found.total_weight
            )
        with jax.named_scope("metrics"):
            seen = _seen(state.metrics, logits, batch)
        # Features too: an infinite one saturates in a cast with a delayed scale, and if
        # all roles of the first layer are FP8, no gradient reveals it.
        is_finite = all_finite(optax.tree.norm(grads.rows), batch.dense)
        with jax.named_scope("merge"):
            own = Outcome(loss, grads, batch_stats, seen, is_finite)
            merged, found = placement.merge(own, found, key)
        with jax.named_scope("optimizer"):
            proposed = _proposed(optimizer, state, merged)
        is_finite = merged.is_finite & all_finite(merged.loss, proposed["grad_norm"])
        with jax.named_scope("update_rows"):
            table, row_state, left = placement.update_rows(
                state, batch, grads.rows, found, row_update, is_finite, key
            )
        after = dataclasses.replace(
            state,
            **_accepted(is_finite, proposed, state),
            table=table,
            row_state=row_state,
            bad_ids=state.bad_ids + found.bad_ids,
        )
        return after, left

    return step


def make_eval_step(
    model: Model, placement: Placement
) -> Callable[..., tuple[metrics.MetricState, Array]]:
    """Returns the evaluation step of a device, for `Placement.eval_program`.

    It takes the state, metrics, a batch, and what a mesh has routed of it. It returns
    the metrics with those of the whole batch added, and the logits of the device's own
    examples, float32, [B] of one task and [B, T] of several.
    """
    projected = project(model, placement.tables)

    def step(state: TrainState, seen: Any, batch: Batch, routed: Any = None):
        rows, _ = placement.look_up(projected, state, batch, routed)
        logits = projected.apply(variables_of(state), *inputs_of(batch, rows))
        logits = jnp.asarray(logits).astype(jnp.float32)
        return metrics.merge(seen, placement.sum(_seen(seen, logits, batch))), logits

    return step


def compiled_eval_step(model: Model, placement: Placement) -> Any:
    """Returns the evaluation step, compiled, its metrics donated."""
    return placement.eval_program(make_eval_step(model, placement))


def logits_of(
    model: Model, tables: Tables, state: TrainState, batch: Batch
) -> Float[Array, "B"] | Float[Array, "B T"]:
    """Returns the logits of a batch in evaluation mode, on one device."""
    projected = project(model, tables)
    rows = Placement(tables).look_up_alike(projected, state, batch)
    return jnp.asarray(projected.apply(variables_of(state), *inputs_of(batch, rows)))


def make_observe_step(
    model: Model,
    placement: Placement,
    observer: Observer,
    objective: tasks.Objective,
) -> Callable[..., Any]:
    """Returns a step that returns what an observer tells of every site, not training.

    It takes a state, a batch that all devices have, and the weight of all examples of
    the training step if the batch is a part of them: gradients are as large as in that
    step. All devices return the same. The observer goes on from `TrainState.probe`; if
    that is empty, from no statistics at the number of the step.
    """
    projected = project(model, placement.tables)

    def step(state: TrainState, batch: Batch, total_weight: Array | None = None):
        rows = placement.look_up_alike(projected, state, batch)
        if not state.probe:
            inputs = inputs_of(batch, rows)
            start = _at_step(state.step, projected, observer, inputs)
            state = dataclasses.replace(state, probe=start)
        return seen_by(observer, projected, objective, state, batch, rows, total_weight)

    return placement.everywhere(step)


def _at_step(number: Array, model: Model, observer: Observer, inputs: tuple) -> Any:
    """Returns statistics of which only the number of steps is read.

    By it the elements of products are chosen that are computed.
    """
    with probing(observer):
        init = functools.partial(model.init, jax.random.key(0))
        shapes = jax.eval_shape(init, *inputs)[PROBE]
    return jax.tree.map(lambda x: jnp.full(x.shape, number, x.dtype), shapes)


class TrainStep:
    """A compiled training step, or several by one call.

    It neither takes nor returns Probe's statistics, whose many small arrays would cost
    the host more time than a step of a small model.
    """

    def __init__(self, program: Any):
        """Takes a compiled step."""
        self._program = Ahead(program)

    @property
    def has_run(self) -> bool:
        """True once it was called."""
        return self._program.has_run

    @property
    def is_begun(self) -> bool:
        """True once it was called, or a job compiles it."""
        return self._program.is_begun

    def ahead(self, state: TrainState, *batches: Batch) -> Callable[[], None]:
        """Returns a job that compiles the step on one device, see `Ahead`."""
        return self._program.ahead(_unobserved(state), *batches)

    def lowered(self, state: TrainState, *batches: Batch) -> Callable[[], None]:
        """Lowers the step, and returns a job that compiles it, see `Ahead`."""
        return self._program.lowered(_unobserved(state), *batches)

    def __call__(self, state: TrainState, *batches: Batch) -> TrainState:
        """Returns the state after a step on each batch; the old state is donated."""
        after = self._program(_unobserved(state), *batches)
        return dataclasses.replace(after, probe=state.probe)

    def lower(self, state: TrainState, *batches: Batch) -> jax.stages.Lowered:
        """Returns the step lowered; over a mesh the batches must be real."""
        return self._program.lower(_unobserved(state), *batches)


def _unobserved(state: TrainState) -> TrainState:
    return dataclasses.replace(state, probe={})


def named_sites(state: TrainState) -> dict[str, scaling.DelayedScaling]:
    """Returns the delayed-scaling states of a model by the paths of their sites."""
    tables = tables_by_path(state.fp8)
    return {path: scaling.DelayedScaling(table) for path, table in tables.items()}


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
    return dataclasses.replace(model, scales_initialized=True)


@jax.jit
def _each_initialized(sites: list[scaling.DelayedScaling]):
    return [scaling.scales_initialized(site) for site in sites]


def _seen(like: metrics.MetricState, logits: Array, batch: Batch):
    """Returns the metrics of a batch, of the weights and tasks of others."""
    labels, weights = tasks.labels_and_weights(batch)
    return metrics.update(metrics.init_like(like), logits, labels, weights)


def all_finite(*values: Any) -> Array:
    """Returns whether all numbers are finite."""
    return functools.reduce(jnp.logical_and, (jnp.all(jnp.isfinite(x)) for x in values))


def _proposed(
    optimizer: optax.GradientTransformation, state: TrainState, merged: Outcome
) -> dict[str, Any]:
    """Returns what a step makes of a state, but for its tables and counters."""
    with jax.numpy_dtype_promotion("standard"):  # optax.adam relies on it
        updates, opt_state = optimizer.update(
            merged.grads.params, state.opt_state, state.params
        )
    updates = jax.tree.map(lambda u: u * state.lr_scale, updates)
    return {
        "params": optax.apply_updates(state.params, updates),
        "opt_state": opt_state,
        "fp8": merged.grads.fp8,
        "batch_stats": merged.batch_stats,
        "grad_norm": global_norm(merged.grads.params),
        "metrics": metrics.merge(state.metrics, merged.seen),
    }


def _accepted(is_finite, proposed: dict[str, Any], state: TrainState) -> dict[str, Any]:
    """Returns what a step proposes, or what was if it is skipped, and its counters."""
    old = {name: getattr(state, name) for name in proposed}
    kept = jax.tree.map(functools.partial(jnp.where, is_finite), proposed, old)
    return kept | {
        "step": state.step + 1,
        "skipped": state.skipped + jnp.where(is_finite, 0, 1),
        "skipped_in_a_row": jnp.where(is_finite, 0, state.skipped_in_a_row + 1),
    }
