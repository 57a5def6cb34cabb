"""Programs and initial states of a mesh of one device: which batch each step routes."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from loka_jax.data import Batch
from loka_jax.ops.swap import swapped
from loka_jax.ops.tables import TableSpec
from loka_jax.train.mesh.devices import AXES, SHARD, MeshConfig
from loka_jax.train.mesh.spread import Spread, layout_of, spread_of
from loka_jax.train.state import TrainState

ONE = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), AXES)
TABLES = TableSpec(rows=(300, 5), dim=4)
PARTS = [field.name for field in dataclasses.fields(TrainState)]


def state_of(**parts):
    return TrainState(**dict.fromkeys(PARTS, ()) | parts)


def batch_of(number):
    """Returns a batch of that many distinct ids, which its labels name."""
    ids = np.zeros((16, 2), np.int32)
    ids[:, 0] = np.arange(16) % number
    ones = np.ones(16, np.float32)
    return Batch(ones[:, None], ids, number * ones, ones)


def test_steps_of_a_call_route_the_batches_of_later_ones():
    """The state is what each step has seen: its batch, and what was routed for it."""
    spread = Spread(ONE, MeshConfig(), TABLES, "xla", steps_per_call=2)

    def step(state, batch, routed, few, to_send):
        number = batch.labels[0].astype(jnp.int32)
        seen = jnp.stack([number, routed.need])
        table = jnp.roll(state.table, -1, axis=0).at[-1].set(seen)
        each = jax.tree.map(lambda x: x[None], few)
        state = dataclasses.replace(state, table=table)
        return state, (), each, swapped(to_send, SHARD)

    run = spread.train_program(step, 2)
    numbers = [3, 5, 2, 7, 4, 6, 1, 8, 9, 10]
    batches = list(map(batch_of, numbers))
    alone, plain = [], spread.router._run
    spread.router._run = lambda *given: alone.append(given) or plain(*given)
    state = state_of(table=jnp.zeros((len(numbers), 2), jnp.int32))
    taken = spread.router.ahead(enumerate(batches))
    for call in range(5):
        alone.clear()
        pair = [batch for _, batch in itertools.islice(taken, 2)]
        state = run(state, *pair)
        # The first two calls route their own, and the first what they write over.
        assert len(alone) == {0: 4, 1: 2}.get(call, 0)
    # Of the second field all examples have one row.
    want = [[number, number + 1] for number in numbers]
    np.testing.assert_array_equal(state.table, want)


def test_without_a_mesh_rows_lie_as_they_are_and_parts_of_a_state_on_it():
    assert spread_of(None, MeshConfig(), TABLES) is None
    assert (layout_of(TABLES, None).shards, layout_of(TABLES, "any").shards) == (1, 256)
    spread = Spread(ONE, MeshConfig(), TABLES)
    shapes = {name: jax.ShapeDtypeStruct((4,), "f4") for name in ("table", "params")}
    placed = spread.placed(shapes)
    found = {name: part.sharding.spec for name, part in placed.items()}
    assert found == {"table": P(SHARD), "params": P()}
    everywhere = jax.jit(spread.everywhere(lambda state, x: state.step + x))
    assert int(everywhere(state_of(step=jnp.int32(2)), jnp.int32(3))) == 5
