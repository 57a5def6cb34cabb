"""Generated logs over several devices."""

import chex
import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from loka_jax.data import DataConfig, Position, generated, open_data

CONFIG = DataConfig(rows=(50, 40, 30, 20), examples=1000, eval_examples=500)
START = Position(0, 0, 0)


def sharding():
    axes = ("replica", "shard")
    mesh = jax.make_mesh((2, 4), axes, axis_types=(AxisType.Auto,) * 2)
    return NamedSharding(mesh, PartitionSpec(axes))


def test_devices_make_their_own_examples():
    splits = open_data(CONFIG, seed=0)
    spread = splits.over(sharding())
    for name in ("train", "valid", "test"):
        whole = getattr(splits, name).batch(START, 64, shuffle=True)
        parts = getattr(spread, name).batch(START, 64, shuffle=True)
        for part in jax.tree.leaves(parts):
            assert part.sharding.is_equivalent_to(sharding(), part.ndim)
        chex.assert_trees_all_equal(whole.ids, parts.ids)
        chex.assert_trees_all_equal(whole.labels, parts.labels)
        chex.assert_trees_all_close(whole.dense, parts.dense, rtol=1e-6, atol=2e-6)
    place = np.zeros(5, np.uint32)
    world = spread.train._world
    program = generated._make.lower(CONFIG, world, 64, place, sharding())
    text = program.compile().as_text()
    assert "all-" not in text and "collective" not in text  # each makes its own
