"""The state of a training run: one pytree, saved and restored whole."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array

from loka_jax.nn import OVERWRITE_WITH_GRADIENT, PROBE, Model, probing
from loka_jax.ops import embedding
from loka_jax.ops.tables import MixedTables, Tables
from loka_jax.ops.tap import Observer
from loka_jax.train import metrics
from loka_jax.train.tables.stacks import by_stack, project


@struct.dataclass
class TrainState:
    """Everything that a step reads and writes.

    Attributes:
        step: int32, steps taken, including skipped ones.
        params: dense parameters, which optax updates.
        fp8: scaling state of the sites; replaced every step, never optimized.
        batch_stats: running moments of batch norms.
        probe: Probe's statistics of the sites; empty without Probe.
        opt_state: state of the optax optimizer.
        table: float, [rows, dim], all embedding tables, stacked; not differentiated. A
            tuple of stacks if there are several dims, see `stacks`.
        row_state: state of the row optimizer, likewise.
        lr_scale: float32, factor on the learning rates, lowered on plateaus.
        skipped: int32, number of skipped steps.
        skipped_in_a_row: int32, number of skipped steps since the last that was not.
        bad_ids: int32, number of ids out of range; they read zeros and update nothing.
        grad_norm: float32, global norm of the dense gradients, before clipping, of the
            newest step that was not skipped.
        metrics: metrics of the training examples since the last log line.
    """

    # JAX makes it of types too, as it lowers a step; so no field is of arrays only.
    step: Any
    params: Any
    fp8: Any
    batch_stats: Any
    probe: Any
    opt_state: Any
    table: Any
    row_state: Any
    lr_scale: Any
    skipped: Any
    skipped_in_a_row: Any
    bad_ids: Any
    grad_norm: Any
    metrics: metrics.MetricState

    @classmethod
    def at_start(cls, **parts: Any) -> "TrainState":
        """Returns a state of these parts that has seen no step."""
        counters = ("step", "skipped", "skipped_in_a_row", "bad_ids")
        start: dict[str, Any] = {x: jnp.zeros((), jnp.int32) for x in counters}
        start["metrics"] = metrics.init()
        start["lr_scale"] = jnp.ones((), jnp.float32)
        start["grad_norm"] = jnp.zeros((), jnp.float32)
        return cls(**start | parts)


def init_state(
    key: Array, *, tables: Tables, row_optimizer: Any, init_stddev: float, **parts: Any
) -> TrainState:
    """Returns the state before the first step.

    Args:
        parts: the further arguments of `init_without_tables`.
    """
    state = init_without_tables(key, tables=tables, **parts)
    made = init_tables(key, tables, row_optimizer, init_stddev)
    return dataclasses.replace(state, **made)


def init_without_tables(
    key: Array,
    *,
    model: Model,
    tables: Tables,
    num_dense: int,
    optimizer: optax.GradientTransformation,
    log_inputs: tuple[Any, ...] | None = None,
    probe: Observer | None = None,
) -> TrainState:
    """Returns the state before the first step, without what `init_tables` returns.

    Args:
        log_inputs: shapes of the model's inputs of an event log.
    """
    model_key, _ = jax.random.split(key)
    with probing(probe):
        inputs: Any = (
            jnp.zeros((1, num_dense)),
            by_stack(lambda spec: jnp.zeros((1, len(spec.rows), spec.dim)), tables),
        )
        if log_inputs is not None:
            inputs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), log_inputs)
        variables = project(model, tables).init(model_key, *inputs)
    params = variables["params"]
    return TrainState.at_start(
        params=params,
        fp8=variables.get(OVERWRITE_WITH_GRADIENT, {}),
        batch_stats=variables.get("batch_stats", {}),
        probe=variables.get(PROBE, {}),
        opt_state=optimizer.init(params),
        table=(),
        row_state=(),
    )


def init_tables(
    key: Array, tables: Tables, row_optimizer: Any, stddev: float
) -> dict[str, Any]:
    """Returns the tables of a state before the first step, and `row_state`."""
    _, key = jax.random.split(key)
    table = by_stack(
        lambda spec, key: embedding.init_table(key, spec, stddev),
        tables,
        table_keys(key, tables),
    )
    row_state = by_stack(lambda _, x: row_optimizer.init(x), tables, table)
    return {"table": table, "row_state": row_state}


def table_keys(key: Array, tables: Tables) -> Any:
    """Returns the random key of each stack, from the second half of the state's."""
    if isinstance(tables, MixedTables):
        return tuple(jax.random.split(key, len(tables.stacks)))
    return key
