"""The step of one GPU that a configuration describes, from shapes alone.

Unless it was measured, the dense part's time is estimated from the sites: the longer of
their products and their traffic, and a constant for each site. For the small DLRM it is
a quarter less than the 562 us measured on an H200 at 65,536.
"""

import math
from typing import Any, NamedTuple

import jax
from jaxtyping import Array

from loka_jax import nn
from loka_jax.data import Schema
from loka_jax.data.planted import ZIPF, expected_distinct
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.ops.row_order import VIRTUAL_SHARDS
from loka_jax.ops.tables import Tables, TableSpec
from loka_jax.optim import make_dense_optimizer, make_row_optimizer
from loka_jax.train.config import Config
from loka_jax.train.model import model_of
from loka_jax.train.planner.step_sizes import Stack, Workload
from loka_jax.train.state import init_state

_FLOPS_US = 400e6  # of a site's three products
_TRAFFIC_US = 3e6  # bytes of HBM
_SITE_US = 50.0  # what a site takes however small it is
_ACTIVATION_BYTES = 2  # bfloat16
_SHARDS = tuple(2**i for i in range(VIRTUAL_SHARDS.bit_length()))


def workload_of(
    config: Config, schema: Schema, batch: int, dense_us: float | None = None
) -> Workload:
    """Returns the step of one GPU.

    Args:
        dense_us: the measured time of a step without its tables; None to estimate it.
    """
    tables, list_sites, *_ = model_of(config, schema)
    state = _shapes(config, schema, tables)
    sites = [site.spec for site in list_sites(DispatchPlan())]
    scale = batch / (config.loop.batch_size // config.loop.microbatches)
    values = scale * sum(spec.m * (spec.k + spec.n) for spec in sites)
    if dense_us is None:
        flops = scale * sum(6 * spec.m * spec.k * spec.n for spec in sites)
        # Forward and backward passes touch inputs and outputs about three times.
        traffic = 3 * values * _ACTIVATION_BYTES
        dense_us = max(flops / _FLOPS_US, traffic / _TRAFFIC_US)
        dense_us += _SITE_US * len(sites)
    return Workload(
        name=config.name,
        batch=batch,
        stacks=_stacks(config, schema, tables, state, batch),
        gradient_bytes=_bytes(state.params),
        state_bytes=2 * _bytes(state.params) + _bytes(state.opt_state),
        activation_bytes=round(values * _ACTIVATION_BYTES),
        dense_us=dense_us,
        steps_per_call=config.loop.steps_per_call,
        average_every=_average_every(config),
    )


def _average_every(config: Config) -> int:
    """Returns the steps between averages of groups; 0 if there are none."""
    return config.mesh.sync_every if config.mesh.sync == "weights" else 0


class _Shapes(NamedTuple):
    """Shapes of the parts of the state that take memory."""

    params: Any
    opt_state: Any
    table: Any
    row_state: Any


def _shapes(config: Config, schema: Schema, tables: Tables) -> _Shapes:
    def init(key: Array) -> _Shapes:
        state = init_state(
            key,
            model=nn.Planned(config.model, DispatchPlan().choices).by_xla(),
            tables=tables,
            num_dense=len(schema.dense),
            optimizer=make_dense_optimizer(config.optim, 1),
            row_optimizer=make_row_optimizer(config.optim),
            init_stddev=config.embedding.init_stddev,
        )
        return _Shapes(state.params, state.opt_state, state.table, state.row_state)

    return jax.eval_shape(init, jax.random.key(0))


def _stacks(
    config: Config, schema: Schema, tables: Tables, state: _Shapes, batch: int
) -> tuple[Stack, ...]:
    if isinstance(tables, TableSpec):
        specs, fields = (tables,), (tuple(range(len(tables.rows))),)
        states: Any = (state.table,), (state.row_state,)
    else:
        specs, fields = tables.stacks, tables.fields
        states = state.table, state.row_state
    slots = (1,) * len(schema.categorical) + schema.slots
    zipf = ZIPF if config.data.kind == "generated" else None
    every = _average_every(config)

    def distinct(spec: TableSpec, members: tuple[int, ...], batches: int = 1) -> float:
        return sum(
            expected_distinct(rows, batches * batch * slots[field], zipf)
            for rows, field in zip(spec.rows, members, strict=True)
        )

    return tuple(
        Stack(
            rows=spec.total_rows,
            dim=spec.dim,
            row_bytes=_bytes((table, row_state)) // spec.total_rows,
            value_bytes=table.dtype.itemsize,
            lookups=batch * sum(slots[field] for field in members),
            distinct=distinct(spec, members),
            averaged=tuple(
                distinct(spec, members, every * shards) / shards
                for shards in (_SHARDS if every else ())
            ),
        )
        for spec, members, table, row_state in zip(specs, fields, *states, strict=True)
    )


def _bytes(tree: Any) -> int:
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
    )
