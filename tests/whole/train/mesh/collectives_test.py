"""What devices have together: a few numbers, sums, statistics and averages of groups.

The devices are virtual (`tests.support.mesh`).
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from loka_jax.ops import row_average
from loka_jax.ops.embedding import BAD_ID
from loka_jax.ops.exchange import Routed
from loka_jax.optim import LaggedRowwiseAdagrad, RowwiseAdagrad
from loka_jax.train import metrics
from loka_jax.train.gradients import Gradients
from loka_jax.train.mesh.devices import BATCH, REPLICA, SHARD, MeshConfig
from loka_jax.train.mesh.routing import Counts, RoutedBatch, Routing
from loka_jax.train.mesh.row_sync import update_alone
from loka_jax.train.placement import Outcome
from loka_jax.train.tables.update import RowUpdate
from tests.support.mesh import on_virtual_devices, placement

GROUPS, SHARDS = 3, 2
DEVICES = GROUPS * SHARDS
ROUNDED = placement(MeshConfig(), "bf16")
KEY, WORDS = jax.random.key(0), jnp.zeros(2, jnp.uint32)


def test_a_gradient_of_one_device_that_is_not_finite_is_seen_on_all():
    params = np.ones((DEVICES, 3), np.float32)
    rows = np.ones((DEVICES, 2), np.float32)
    scales = np.arange(DEVICES, dtype=np.float32)[:, None]

    lists = Routed(jnp.zeros((1, 4)), *4 * (None,))
    routed = RoutedBatch(lists, Counts(jnp.asarray(4), 0, 2.0))

    def merge(params, rows, scales):
        grads = Gradients({"a": params[0]}, rows, {"x": scales[0]})
        is_finite = jnp.all(jnp.isfinite(rows))
        stats = {"moment": scales[0]}
        own = Outcome(jnp.ones(()), grads, stats, metrics.init(), is_finite)
        merged, found = ROUNDED.merge(own, Routing(routed, scales[0]), KEY)
        alike = merged.grads._replace(rows=())
        return merged._replace(grads=alike)._asdict() | {"few": found.counts}

    run = on_virtual_devices(merge, GROUPS, SHARDS, (BATCH,) * 3, P())
    found = run(params, rows, scales)
    np.testing.assert_array_equal(found["grads"].params["a"], np.full(3, DEVICES))
    np.testing.assert_array_equal(found["few"], scales)
    assert found["loss"] == DEVICES and found["is_finite"]
    assert found["grads"].fp8["x"] == DEVICES - 1  # the maximum
    assert found["batch_stats"]["moment"] == np.mean(scales)
    rows[4, 1] = np.nan
    assert not run(params, rows, scales)["is_finite"]
    params[5, 1] = np.inf
    assert np.isinf(run(params, rows, scales)["grads"].params["a"][1])


ROWS, DIM, LENGTH, LR, STEPS = 20, 4, 24, 0.1, 3  # rows of a shard; updates of a device


def updates():
    """Rows and gradients of each device, [M L, steps, updates]."""
    rng = np.random.default_rng(1)
    # No group has rows 16 and above; rows are there twice, too.
    rows = rng.integers(0, 16, (DEVICES, STEPS, LENGTH)).astype(np.int32)
    rows[..., ::5] = BAD_ID
    return rows, rng.normal(size=(*rows.shape, DIM)).astype(np.float32)


TABLE = np.random.default_rng(0).normal(size=(SHARDS * ROWS, DIM)).astype(np.float32)


def trained(optimizer, every, taken):
    """Returns tables and states of shards after the steps; the same in all groups."""
    config = MeshConfig(wire_gradients="f32", sync="weights", sync_every=every)
    row_update = RowUpdate(optimizer, optax.constant_schedule(LR), 0.0)

    def part(table, rows, grads, taken):
        def one(state, step):
            rows, grads, is_taken = step
            parts = *state, (rows, grads), row_update, LR, is_taken
            table, row_state, before = update_alone(*parts, config, WORDS)
            return (table, row_state), before

        steps = rows[0], grads[0], taken
        state, log = jax.lax.scan(one, (table, optimizer.init(table)), steps)
        if every > 1:
            log = [jax.tree.map(lambda x, k=k: x[k], log) for k in range(STEPS)]
            before, _ = row_average.distinct(log, len(table))
            state = row_average.average(*state, before, "f32", REPLICA, WORDS)
        return state

    specs = P(SHARD), BATCH, BATCH, P()
    run = on_virtual_devices(part, GROUPS, SHARDS, specs, P(SHARD))
    return run(TABLE, *updates(), np.array(taken))


def reference(optimizer, every, taken):
    """The same by the equations, in float64."""
    rows, grads = (x.reshape(GROUPS, SHARDS, *x.shape[1:]) for x in updates())
    w = np.tile(TABLE.reshape(SHARDS, ROWS, DIM).astype(np.float64), (GROUPS, 1, 1, 1))
    v = np.zeros(w.shape[:-1])
    for step in range(STEPS):
        for at in np.ndindex(GROUPS, SHARDS) if taken[step] else ():
            is_row = rows[at][step] != BAD_ID
            g = np.zeros((ROWS, DIM))
            np.add.at(g, rows[at][step][is_row], GROUPS * grads[at][step][is_row])
            squares = np.mean(g**2, axis=-1)
            used = v[at] + squares
            if isinstance(optimizer, LaggedRowwiseAdagrad):
                used = np.maximum(v[at], squares)
            v[at] += squares
            w[at] -= LR * g / (np.sqrt(used / optimizer.c) + 1e-3)[:, None]
        if (step + 1) % every == 0:
            w[:], v[:] = w.mean(axis=0), v.mean(axis=0)
    return w[0].reshape(-1, DIM), v[0].ravel()


@pytest.mark.parametrize(
    "optimizer, every, taken",
    [
        (RowwiseAdagrad(eps=1e-3, c=2.0), 3, (True, True, True)),
        (LaggedRowwiseAdagrad(eps=1e-3, c=4.0), 1, (True, False, True)),
    ],
)
def test_rows_of_groups_follow_the_equations(optimizer, every, taken):
    table, state = trained(optimizer, every, taken)
    w, v = reference(optimizer, every, taken)
    # Three steps, each of sums of at most 6 x 24 products of numbers below 40.
    np.testing.assert_allclose(table, w, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state.sum_of_squares, v, rtol=1e-5)
    untouched = np.tile(np.arange(ROWS) >= 16, SHARDS)
    np.testing.assert_array_equal(table[untouched], TABLE[untouched])
