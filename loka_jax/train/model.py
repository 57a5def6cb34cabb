"""The model of a run without its data: its tables, and the GEMMs of a step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loka_jax import nn
from loka_jax.data import Events, Schema
from loka_jax.data.capacities import most_rows
from loka_jax.data.events import layout_of
from loka_jax.data.sequences import Layout, Shape, candidate_shape
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.ops.tables import Tables, TableSpec, with_dims
from loka_jax.train import tasks
from loka_jax.train.config import Config


class RunModel(NamedTuple):
    """The model of a run without its data.

    Attributes:
        list_sites: from a plan to every GEMM of the model at the training batch size,
            or for other `rows`, in a first step, or if `scales_initialized` in those
            after it.
        inputs: from a number of rows to the shapes of the model's inputs; of an event
            log from a number of sequences, or of rows as of `candidate_shape`.
        log_inputs: those of one sequence of an event log; None for other data.
    """

    tables: Tables
    list_sites: Callable[..., tuple[nn.Site, ...]]
    inputs: Callable[[int], tuple[Any, ...]]
    log_inputs: tuple[Any, ...] | None = None


def model_of(
    config: Config, schema: Schema, devices: int = 1, *, scores_candidates: bool = False
) -> RunModel:
    """Returns the tables and sites of the model for data of this schema.

    Args:
        scores_candidates: of an event log, inputs are those of exported programs.

    Raises:
        ValueError: if the data have other tasks than the model, or a batch has too
            many ids.
    """
    tasks.check_tasks(schema.labels, config.model, config.optim)
    _check_log(config, schema)
    size, ids = config.loop.batch_size, len(schema.categorical) + sum(schema.slots)
    if not size * ids < 2**31:
        raise ValueError(
            f"--loop.batch-size {size} times {ids} ids an example do not fit in int32: "
            "lower it, or --data.max-values."
        )
    dim = config.embedding.dim
    stack = TableSpec(
        rows=schema.table_rows,
        dim=dim,
        pooling=config.embedding.pooling_of(schema.multi),
        owners=schema.tables if schema.owners else (),
        storage=config.embedding.dtype,
        wide=len(config.embedding.crosses),
    )
    dims = config.embedding.dims_of(schema.fields, schema.owners)
    tables = with_dims(stack, tuple(dims.values()) or (dim,))
    if stack.wide and tables is not stack:
        raise ValueError(
            "--embedding.crosses are for tables of one dim: leave out --embedding.dims."
        )

    def inputs(rows: int) -> tuple[Any, ...]:
        if config.data.is_log:
            layout = layout_of(config.data, schema)
            capacity = most_rows(layout, rows, devices)
            shape = Shape(capacity, rows, layout.targets(rows, capacity))
            if scores_candidates:
                shape = candidate_shape(rows)
            has_candidates = scores_candidates or not layout.is_all
            return _event_inputs(config, schema, shape, has_candidates)
        fields = len(stack.rows) - stack.wide
        shapes = (len(schema.dense),), (fields, dim)
        return tuple(jax.ShapeDtypeStruct((rows, *x), jnp.float32) for x in shapes)

    def list_sites(
        plan: DispatchPlan,
        rows: int = size // config.loop.microbatches // devices,
        *,
        scales_initialized: bool = False,
    ) -> tuple[nn.Site, ...]:
        planned = nn.Planned(config.model, plan.choices, scales_initialized)
        return nn.list_sites(planned, *inputs(rows))

    log_inputs = inputs(1) if config.data.is_log else None
    return RunModel(tables, list_sites, inputs, log_inputs)


def _event_inputs(
    config: Config, schema: Schema, shape: Shape, has_candidates: bool
) -> tuple[Any, ...]:
    """Returns the shapes of a model's inputs of a batch of an event log."""
    layout, dim = layout_of(config.data, schema), config.embedding.dim
    count, sequences, targets = shape
    contexts, tasks = layout.contexts, len(schema.labels)
    fields = len(schema.fields) - contexts

    def ints(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def floats(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    events = Events(
        ids=ints(count, fields),
        answers=ints(count, tasks),
        positions=ints(count),
        ages=floats(count),
        offsets=ints(sequences + 1),
        targets=ints(targets),
        contextual=None if layout.is_all or not contexts else ints(sequences),
        candidates=ints(sequences) if has_candidates else None,
    )
    rows = floats(sequences, contexts, dim), floats(count, fields, dim)
    return floats(sequences, 0), rows, events


def candidate_layout(config: Config, schema: Schema) -> Layout:
    """Returns the layout of the sequences of candidates that a model scores."""
    alone = getattr(config.model, "one_candidate", False)
    return layout_of(config.data, schema)._replace(one_candidate=alone)


def _check_log(config: Config, schema: Schema) -> None:
    """Raises ValueError if the model is not for data with, or without, histories."""
    model, kind = config.model, type(config.model).__name__
    takes_events = getattr(model, "takes_events", False)
    if config.data.is_log and not takes_events:
        raise ValueError(
            f"the {kind} takes no event log: use --config fp8_hstu, or leave out "
            "--data.user."
        )
    if takes_events and not config.data.is_log:
        raise ValueError(
            f"the {kind} takes an event log: name --data.user and --data.time, or use "
            "another --config."
        )
    if not config.data.is_log:
        return
    longest = layout_of(config.data, schema).longest
    length = getattr(model, "max_length", longest)
    if longest > length:
        raise ValueError(
            f"--max-length {length} is less than the {longest} rows of a sequence: "
            "raise it, or lower --data.history."
        )
    if getattr(model, "oldest", None) is not None and model.window is None:
        raise ValueError(
            "--oldest are rows that are seen beside those of a window: add --window."
        )
    if not schema.fields:
        raise ValueError("events need at least one column: name --data.categorical.")
    if getattr(model, "first_order", False):
        raise ValueError("--first-order is not for event logs: leave it out.")
    if config.embedding.dims:
        raise ValueError("--embedding.dims are not for event logs: leave them out.")
