"""The step of one GPU that a configuration describes, from shapes alone.

Unless it was measured, the dense part's time is estimated from the sites: the longer of
their products and their traffic, and a constant for each site. For the small DLRM it is
a quarter less than the 562 us measured on an H200 at 65,536.
"""

import dataclasses
import math
import types
from typing import Any

import jax

from loka_jax import nn
from loka_jax.data import Schema
from loka_jax.data.planted import ZIPF, expected_distinct
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.ops.row_order import VIRTUAL_SHARDS
from loka_jax.ops.tables import Tables, TableSpec
from loka_jax.optim import make_dense_optimizer, make_row_optimizer
from loka_jax.train.config import Config
from loka_jax.train.model import model_of
from loka_jax.train.state import init_state

SPARE = 1.05  # capacity over distinct ids
_FLOPS_US = 400e6  # of a site's three products
_TRAFFIC_US = 3e6  # bytes of HBM
_SITE_US = 50.0  # what a site takes however small it is
_ACTIVATION_BYTES = 2  # bfloat16
_SHARDS = tuple(2**i for i in range(VIRTUAL_SHARDS.bit_length()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """A stack of tables, and its part in a step of one GPU.

    Attributes:
        rows: R.
        dim: D.
        row_bytes: of a row and its optimizer's state.
        value_bytes: of a value of a row.
        lookups: N.
        distinct: U.
        averaged: rows of a shard that a group touches from one average of groups to the
            next, with 1, 2, 4, ... shards; empty if groups do not average.
    """

    rows: int
    dim: int
    row_bytes: int
    lookups: int
    distinct: float
    value_bytes: int = 4
    averaged: tuple[float, ...] = ()

    @property
    def sent_ids(self) -> float:
        """K, the ids in this GPU's lists for the owners."""
        return SPARE * self.distinct

    @property
    def state_bytes(self) -> int:
        """What the optimizer keeps of a row."""
        return self.row_bytes - self.value_bytes * self.dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A training step of one GPU.

    Attributes:
        batch: examples of a GPU.
        gradient_bytes: of the dense gradients, float32.
        state_bytes: of dense parameters, optimizer state and gradients.
        activation_bytes: estimate of what the backward pass keeps.
        dense_us: time of the step without tables.
        steps_per_call: steps that share a call of the host.
        average_every: steps from one average of groups that update rows alone to the
            next; 0 if all groups get all gradients.
    """

    name: str
    batch: int
    stacks: tuple[Stack, ...]
    gradient_bytes: int
    state_bytes: int
    activation_bytes: int
    dense_us: float
    steps_per_call: int = 1
    average_every: int = 0


def workload_of(
    config: Config, schema: Schema, batch: int, dense_us: float | None = None
) -> Workload:
    """Returns the step of one GPU.

    Args:
        dense_us: the measured time of a step without its tables; None to estimate it.

    Raises:
        ValueError: for an event log, whose rows are not predicted.
    """
    if config.data.is_log:
        raise ValueError(
            f"--config {config.name} trains on an event log, whose rows the planner "
            "does not predict: try meshes with --mesh.shards."
        )
    tables, list_sites, *_ = model_of(config, schema)
    state = _state(config, schema, tables)
    sites = [site.spec for site in list_sites(DispatchPlan())]
    scale = batch / (config.loop.batch_size // config.loop.microbatches)
    values = scale * sum(spec.m * (spec.k + spec.n) for spec in sites)
    if dense_us is None:
        flops = scale * sum(6 * spec.m * spec.k * spec.n for spec in sites)
        # Forward and backward passes touch inputs and outputs about three times.
        traffic = 3 * values * _ACTIVATION_BYTES
        dense_us = max(flops / _FLOPS_US, traffic / _TRAFFIC_US)
        dense_us += _SITE_US * len(sites)
    every = config.mesh.sync_every if config.mesh.sync == "weights" else 0
    return Workload(
        name=config.name,
        batch=batch,
        stacks=_stacks(config, schema, tables, state, batch, every),
        gradient_bytes=_bytes(state.params),
        state_bytes=2 * _bytes(state.params) + _bytes(state.opt_state),
        activation_bytes=round(values * _ACTIVATION_BYTES),
        dense_us=dense_us,
        steps_per_call=config.loop.steps_per_call,
        average_every=every,
    )


def _state(config: Config, schema: Schema, tables: Tables) -> Any:
    """Returns the shapes of a state on one device."""

    def init() -> dict[str, Any]:
        state = init_state(
            jax.random.key(0),
            model=nn.Planned(config.model, DispatchPlan().choices).by_xla(),
            tables=tables,
            num_dense=len(schema.dense),
            optimizer=make_dense_optimizer(config.optim, 1),
            row_optimizer=make_row_optimizer(config.optim),
            init_stddev=config.embedding.init_stddev,
        )
        return vars(state)

    return types.SimpleNamespace(**jax.eval_shape(init))


def _stacks(
    config: Config, schema: Schema, tables: Tables, state: Any, batch: int, every: int
) -> tuple[Stack, ...]:
    if isinstance(tables, TableSpec):
        stacks = [(tables, range(len(tables.rows)), state.table, state.row_state)]
    else:
        parts = tables.stacks, tables.fields, state.table, state.row_state
        stacks = list(zip(*parts, strict=True))
    slots = (1,) * len(schema.categorical) + schema.slots
    zipf = ZIPF if config.data.kind == "generated" else None

    def stack_of(spec: TableSpec, fields: Any, table: Any, row_state: Any) -> Stack:
        lookups = [batch * slots[field] for field in fields]

        def distinct(batches: int) -> float:
            return sum(
                expected_distinct(rows, batches * count, zipf)
                for rows, count in zip(spec.rows, lookups, strict=True)
            )

        return Stack(
            rows=spec.total_rows,
            dim=spec.dim,
            row_bytes=_bytes((table, row_state)) // spec.total_rows,
            value_bytes=table.dtype.itemsize,
            lookups=sum(lookups),
            distinct=distinct(1),
            averaged=tuple(distinct(every * n) / n for n in _SHARDS if every),
        )

    return tuple(stack_of(*parts) for parts in stacks)


def _bytes(tree: Any) -> int:
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
    )
