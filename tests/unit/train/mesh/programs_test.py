"""Programs and initial states of a mesh of one device: which batch each step routes."""

import dataclasses
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from loka_jax.data import Batch
from loka_jax.ops.joint_collectives import swap
from loka_jax.ops.tables import TableSpec
from loka_jax.train.mesh.devices import AXES, SHARD, MeshConfig
from loka_jax.train.mesh.placement import placement_of
from tests.support.loop import start_state

ONE = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), AXES)
TABLES = TableSpec(rows=(300, 5), dim=4)


def batch_of(number):
    """Returns a batch of that many distinct ids, which its labels name."""
    ids = np.zeros((16, 2), np.int32)
    ids[:, 0] = np.arange(16) % number
    ones = np.ones(16, np.float32)
    return Batch(ones[:, None], ids, number * ones, ones)


def test_steps_of_a_call_route_the_batches_of_later_ones():
    """The state's table is what each step has seen: its batch, and what it routed."""
    placement = placement_of(ONE, MeshConfig(), TABLES, "xla", steps_per_call=2)

    def step(state, batch, routed):
        seen = jnp.stack([batch.labels[0].astype(jnp.int32), routed.batch.counts.need])
        table = jnp.roll(state.table, -1, axis=0).at[-1].set(seen)
        each = jax.tree.map(lambda x: x[None], routed.counts)
        arrived = swap(routed.asked, SHARD)
        state = dataclasses.replace(state, table=table)
        return state, routed._replace(counts=each, asked=arrived)

    run = placement.train_program(step, 2, {})
    numbers = [3, 5, 2, 7, 4, 6, 1, 8, 9, 10]
    route = mock.Mock(wraps=placement.router._run)
    placement.router._run = route
    table = jnp.zeros((len(numbers), 2), jnp.int32)
    state = dataclasses.replace(jax.tree.map(jnp.copy, start_state()), table=table)
    taken = placement.router.look_ahead(enumerate(map(batch_of, numbers)))
    # The first two calls route their own, and the first what they write over.
    for routed_alone in (4, 6, 6, 6, 6):
        state = run(state, *(batch for _, batch in itertools.islice(taken, 2)))
        assert route.call_count == routed_alone
    # Of the second field all examples have one row.
    want = [[number, number + 1] for number in numbers]
    np.testing.assert_array_equal(state.table, want)
