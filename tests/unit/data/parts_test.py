"""The parts of a batch that processes read are together the whole batch."""

import chex
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from loka_jax.data import WHOLE, DataConfig, Part, Position, open_data
from loka_jax.data.placement import placed
from tests.unit.data.reader_test import dataset

SIZE = 32


@pytest.fixture(scope="module")
def generated():
    data = DataConfig(examples=100, eval_examples=40, rows=(50, 20, 9))
    return open_data(data, seed=1)


def together(data, position, count, *, shuffle=True):
    """Returns the parts of a batch, one after another."""
    parts = [
        data.batch(position, SIZE, shuffle=shuffle, part=Part(i, count))
        for i in range(count)
    ]
    assert {len(part.labels) for part in parts} == {SIZE // count}
    return jax.tree.map(lambda *rows: np.concatenate(rows), *parts)


# The last batch of 100 rows is padded: its rows lie in the first of two parts.
@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("shuffle", [False, True])
def test_parts_of_files_are_the_whole_batch(step, count, shuffle):
    data, position = dataset(), Position(1, step, 7)
    whole = data.batch(position, SIZE, shuffle=shuffle)
    chex.assert_trees_all_equal(together(data, position, count, shuffle=shuffle), whole)


@pytest.mark.parametrize("split", ["train", "valid"])
@pytest.mark.parametrize("count", [2, 4])
def test_parts_of_generated_data_are_the_whole_batch(generated, split, count):
    data = getattr(generated, split)
    for step in range(data.num_batches(SIZE)):
        position = Position(1, step, 7)
        whole = data.batch(position, SIZE, shuffle=True)
        chex.assert_trees_all_equal(together(data, position, count), whole)


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="batch-size 32 .* of the 3 processes"):
        dataset().batch(Position(0, 0, 0), SIZE, shuffle=True, part=Part(2, 3))


def test_a_part_lies_on_its_own_devices_in_order():
    # One process has all devices here, so that its part is the whole batch.
    mesh = Mesh(np.asarray(jax.devices()[:4]), "batch")
    sharding = NamedSharding(mesh, P("batch"))
    batch = dataset().batch(Position(0, 0, 0), SIZE, shuffle=True)
    spread = placed(batch, sharding, WHOLE)
    chex.assert_trees_all_equal(jax.device_get(spread), batch)
    for i, shard in enumerate(spread.ids.addressable_shards):
        assert shard.device == jax.devices()[i]
        np.testing.assert_array_equal(shard.data, batch.ids[8 * i : 8 * i + 8])
