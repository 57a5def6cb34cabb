"""The model of a trained run as its final evaluation judged it."""

from typing import Any, NamedTuple

import jax
import optax

from loka_jax import nn
from loka_jax.data import Schema
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
        ValueError: if there are fewer devices, they cannot share a batch, or the rows
            of the tables are too many for them.
    """
    config = source.config
    wire = MeshConfig(replicas=1, shards=shards, wire_rows=config.mesh.wire_rows)
    mesh = mesh_of(wire, config.loop.batch_size, 1)
    net = model_of(config, schema, shards)
    rows_by = config.embedding.implementation
    placement = placement_of(mesh, wire, net.tables, rows_by)
    saved = source.saved.only(_READ)
    shapes = jax.eval_shape(lambda: _initial(config, net, len(schema.dense)))
    template, layout = placement.template(shapes), placement.layout
    state = _as_state(read_state(source.checkpoints, saved, template, layout))
    name = config.source(source.saved.meta.get("data", {}))
    return Trained(config, schema, net, state, source.saved.step, placement, name)


def make_untrained(config: Config, schema: Schema) -> Trained:
    """Returns the model of a configuration as it is before training."""
    net = model_of(config, schema)
    state = _as_state(_initial(config, net, len(schema.dense)))
    return Trained(config, schema, net, state, 0, Placement(net.tables))


def _initial(config: Config, net: RunModel, num_dense: int) -> dict[str, Any]:
    state = init_state(
        jax.random.key(config.seed),
        model=nn.Planned(config.model, ()).by_xla(),
        tables=net.tables,
        num_dense=num_dense,
        optimizer=optax.identity(),
        row_optimizer=Sgd(),
        init_stddev=config.embedding.init_stddev,
    )
    return {name: getattr(state, name) for name in _READ}


def _as_state(parts: dict[str, Any]) -> TrainState:
    """Returns a state with these parts; scores depend on nothing else."""
    return TrainState.at_start(**parts, probe={}, opt_state=(), row_state=())
