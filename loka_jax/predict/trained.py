"""The model of a trained run as its final evaluation judged it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from loka_jax import nn
from loka_jax.data import Schema
from loka_jax.data.crosses import crosses_of, with_crosses
from loka_jax.optim.rows import Sgd
from loka_jax.train.checkpoints.row_layout import read_state
from loka_jax.train.config import Config
from loka_jax.train.folder.source_run import SourceRun
from loka_jax.train.mesh.devices import MeshConfig, mesh_of
from loka_jax.train.mesh.placement import placement_of
from loka_jax.train.model import RunModel, model_of
from loka_jax.train.placement import Placement
from loka_jax.train.state import TrainState, init_state

_READ = ("params", "fp8", "batch_stats", "table")  # of a checkpoint's state


class Trained(NamedTuple):
    """A trained model.

    Attributes:
        schema: of rows as they are stored, without crosses.
        placement: the device or devices that the tables are on.
        source: the name of the run's operands in tables; none before training.
    """

    config: Config
    schema: Schema
    model: RunModel
    state: TrainState
    step: int
    placement: Placement
    source: str = ""


def read_trained(source: SourceRun, schema: Schema, shards: int = 1) -> Trained:
    """Returns the model of a run's checkpoint.

    Args:
        shards: devices over which the rows of the tables are spread, and the examples
            of a batch.

    Raises:
        ValueError: if there are fewer devices, they cannot share a batch, as of an
            event log, or the rows of the tables are too many for them.
    """
    config = source.config
    if config.data.is_log and shards > 1:
        raise ValueError(
            f"{source.workdir} is a run on an event log, whose candidates one device "
            "scores: leave out --mesh.shards."
        )
    wire = MeshConfig(replicas=1, shards=shards, wire_rows=config.mesh.wire_rows)
    mesh = mesh_of(wire, config.loop.batch_size, 1)
    crosses = crosses_of(config.embedding.crosses, schema)
    net = model_of(config, with_crosses(schema, crosses), shards)
    rows_by = config.embedding.implementation
    placement = placement_of(mesh, wire, net.tables, rows_by)
    shapes = jax.eval_shape(lambda: vars(initial_state(config, net, schema)))
    template = placement.template({name: shapes.pop(name) for name in _READ})
    layout = placement.layout
    read = read_state(source.checkpoints, source.saved.only(_READ), template, layout)
    # Scores depend on nothing else.
    rest = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    state = TrainState(**read, **rest)
    name = config.source(source.saved.meta.get("data", {}))
    return Trained(config, schema, net, state, source.saved.step, placement, name)


def make_untrained(config: Config, schema: Schema) -> Trained:
    """Returns the model of a configuration as it is before training."""
    net = model_of(config, schema)
    state = initial_state(config, net, schema)
    return Trained(config, schema, net, state, 0, Placement(net.tables))


def initial_state(config: Config, net: RunModel, schema: Schema) -> TrainState:
    """Returns a state before training, without those of optimizers."""
    return init_state(
        jax.random.key(config.seed),
        model=nn.Planned(config.model, ()).by_xla(),
        tables=net.tables,
        num_dense=len(schema.dense),
        log_inputs=net.log_inputs,
        optimizer=optax.identity(),
        row_optimizer=Sgd(),
        init_stddev=config.embedding.init_stddev,
    )
