"""The model of a trained run as its final evaluation judged it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from loka_jax import nn
from loka_jax.data import Schema
from loka_jax.ops.tables import require_one_array
from loka_jax.optim.rows import Sgd
from loka_jax.train import metrics
from loka_jax.train.checkpoints.row_layout import RowLayout, read_state
from loka_jax.train.config import Config
from loka_jax.train.folder.source_run import SourceRun
from loka_jax.train.network import Network, network
from loka_jax.train.state import TrainState, init_state

_READ = ("params", "fp8", "batch_stats", "table")  # of a checkpoint's state


class Trained(NamedTuple):
    """A trained model.

    Attributes:
        config: the run's configuration.
        schema: of its data.
        network: its tables and sites.
        state: what scores depend on.
        step: the training step of the weights.
    """

    config: Config
    schema: Schema
    network: Network
    state: TrainState
    step: int


def read_trained(source: SourceRun, schema: Schema) -> Trained:
    """Returns the model of a run's checkpoint.

    Raises:
        ValueError: if its tables do not fit in an array on one device.
    """
    net = network(source.config, schema)
    require_one_array(net.tables)
    state = _read_state(source, net, len(schema.dense))
    return Trained(source.config, schema, net, state, source.saved.step)


def untrained(config: Config, schema: Schema) -> Trained:
    """Returns the model of a configuration as it is before training."""
    net = network(config, schema)
    state = _as_state(_initial(config, net, len(schema.dense)))
    return Trained(config, schema, net, state, 0)


def _read_state(source: SourceRun, net: Network, num_dense: int) -> TrainState:
    """Returns the part of a checkpoint's state that scores depend on."""
    saved = source.saved.only(_READ)
    template = jax.eval_shape(lambda: _initial(source.config, net, num_dense))
    layout = RowLayout(net.tables, 1)
    return _as_state(read_state(source.checkpoints, saved, template, layout))


def _initial(config: Config, net: Network, num_dense: int) -> dict[str, Any]:
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
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        **parts,
        step=zero,
        probe={},
        opt_state=(),
        row_state=(),
        lr_scale=jnp.ones((), jnp.float32),
        skipped=zero,
        skipped_in_a_row=zero,
        bad_ids=zero,
        grad_norm=jnp.zeros((), jnp.float32),
        metrics=metrics.init(),
    )
