"""The model of a run without its data: its tables, and the GEMMs of a step."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from loka_jax import nn
from loka_jax.data import Schema
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.ops.tables import Tables, TableSpec, with_dims
from loka_jax.train import tasks
from loka_jax.train.config import Config


class RunModel(NamedTuple):
    """The model of a run without its data.

    Attributes:
        tables: the embedding tables.
        list_sites: from a plan to every GEMM of the model at the training batch size,
            or for other `rows`, in a first step, or if `scales_initialized` in those
            after it.
        inputs: from a number of rows to the shapes of the model's inputs.
    """

    tables: Tables
    list_sites: Callable[..., tuple[nn.Site, ...]]
    inputs: Callable[[int], tuple[jax.ShapeDtypeStruct, ...]]


def model_of(config: Config, schema: Schema, devices: int = 1) -> RunModel:
    """Returns the tables and sites of the model for data of this schema.

    Raises:
        ValueError: if the data have other tasks than the model, or a batch has too
            many ids.
    """
    tasks.check_tasks(schema.labels, config.model, config.optim)
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
    )
    dims = config.embedding.dims_of(schema.fields, schema.owners)
    tables = with_dims(stack, tuple(dims.values()) or (dim,))

    def inputs(rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        shapes = (len(schema.dense),), (len(schema.table_rows), dim)
        return tuple(jax.ShapeDtypeStruct((rows, *x), jnp.float32) for x in shapes)

    def list_sites(
        plan: DispatchPlan,
        rows: int = size // config.loop.microbatches // devices,
        *,
        scales_initialized: bool = False,
    ) -> tuple[nn.Site, ...]:
        planned = nn.Planned(config.model, plan.choices, scales_initialized)
        return nn.list_sites(planned, *inputs(rows))

    return RunModel(tables, list_sites, inputs)
