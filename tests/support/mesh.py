"""A mesh of virtual devices by `vmap` on one device, and a step that tells much on one.

The step has dropout, batch norm, FP8, clipping, several tasks with missing labels,
examples and lists with weights, Adam for rows and padding on at once.
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from loka_jax import nn, scaling
from loka_jax.data import Batch
from loka_jax.data.batch import Bag
from loka_jax.dispatch.gradient_wire import GradientSum
from loka_jax.ops.row_order import Order, places_of
from loka_jax.ops.tables import TableSpec
from loka_jax.optim.clip import clip_by_global_norm
from loka_jax.optim.rows import Adam
from loka_jax.recipe import get_recipe
from loka_jax.train import metrics, tasks
from loka_jax.train import step as step_lib
from loka_jax.train.gradients import Gradients, gradients_of
from loka_jax.train.mesh.devices import AXES, BATCH, REPLICA, SHARD
from loka_jax.train.mesh.placement import placement_of
from loka_jax.train.placement import Placement, one_after_another
from loka_jax.train.state import TrainState, init_state
from loka_jax.train.step import make_train_step
from loka_jax.train.tables.update import RowUpdate

SIZE, DELAYED = 64, "fp8_tensorwise_delayed"
TABLES = TableSpec(rows=(7, 6), dim=4, pooling=("mean",))  # the second of lists
ROWS, PADDING_ROWS = TABLES.total_rows, (6, 12)
OPTIMIZER = optax.chain(clip_by_global_norm(0.05), optax.adam(0.01))
ROW_UPDATE = RowUpdate(Adam(eps=1e-3), optax.exponential_decay(0.1, 1, 0.5), 0.0)
OPTIONS = dict(dropout_seed=7, objective=tasks.Objective((1.0, 3.0)))


class Model(linen.Module):
    """Two logits by all that the parts of a batch must share or keep apart."""

    @linen.compact
    def __call__(self, dense, embeddings, *, train=False):
        x = jnp.concatenate([dense, embeddings.reshape(len(dense), -1)], axis=1)
        x = nn.Dense(16, recipe=DELAYED, name="site")(x)
        x = x.astype(jnp.float32)
        x = linen.BatchNorm(use_running_average=not train, momentum=0.8)(x)
        x = linen.Dropout(0.3, deterministic=not train)(x)
        return linen.Dense(2)(x)


MODEL = Model()


def batch_of(seed=0) -> Batch:
    """Examples with weights, of two tasks with missing labels; the last are padding."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 5, (SIZE, 3)).astype(np.int32)
    ids[np.arange(3) >= rng.integers(0, 4, (SIZE, 1))] = -1
    weights = rng.uniform(0.5, 2, ids.shape).astype(np.float32)
    labels = rng.integers(0, 2, (SIZE, 2)).astype(np.float32)
    labels[rng.random(labels.shape) < 0.2] = np.nan
    batch = Batch(
        dense=rng.normal(size=(SIZE, 8)).astype(np.float32),
        ids=rng.integers(0, 6, (SIZE, 1)).astype(np.int32),
        labels=labels,
        weights=rng.uniform(0.5, 2, SIZE).astype(np.float32),
        bags=(Bag(ids, weights * (ids >= 0)),),
    )
    batch.weights[-5:] = 0
    batch.ids[-5:], batch.bags[0].ids[-5:] = 6, 5  # rows of padding alone
    batch.ids[3] = 99  # no row's
    return batch


@functools.cache
def start():
    """The state of one device before its step, on the host; a step was skipped."""

    def init(key):
        state = init_state(
            key,
            model=MODEL,
            tables=TABLES,
            num_dense=8,
            optimizer=OPTIMIZER,
            row_optimizer=ROW_UPDATE.optimizer,
            init_stddev=0.5,
        )
        # Else each device would cast by the amaxes of its own part.
        recipe, amaxes = get_recipe(DELAYED), jnp.float32([4.0, 1.0, 0.1])
        scales = scaling.update_delayed(scaling.init_delayed(recipe), amaxes, recipe)
        return dataclasses.replace(state, fp8={"site": {"fp8_scaling": scales.table}})

    parts = jax.device_get(vars(jax.jit(init)(jax.random.key(0))))
    table = parts["table"].copy()
    table[[*PADDING_ROWS]] = 0.0  # a mesh, which fetches none for padding, reads zeros
    parts |= dict(
        table=table,
        step=np.int32(3),
        skipped=np.int32(1),
        skipped_in_a_row=np.int32(1),
        bad_ids=np.int32(5),
        lr_scale=np.float32(0.5),
        metrics=jax.tree.map(jnp.ones_like, metrics.init(weighted=True, tasks=2)),
    )
    return TrainState(**jax.device_put(parts))


def step_by_parts(devices):
    """Returns the step of one device, with dropout and batch norm as of several."""
    with pytest.MonkeyPatch.context() as patch:
        by_parts = functools.partial(gradients_by_parts, devices)
        patch.setattr(step_lib, "gradients_of", by_parts)
        parts = MODEL, Placement(TABLES), OPTIMIZER, ROW_UPDATE
        return one_after_another(make_train_step(*parts, **OPTIONS))


def gradients_by_parts(devices, network, weights, state, batch, rows, key, _):
    """Returns gradients as of devices with a part of the batch each."""
    one = functools.partial(gradients_of, network, weights)
    total_weight = jnp.sum(tasks.labels_and_weights(batch)[1], axis=0)
    size = len(batch.weights)
    parts = jax.tree.map(
        lambda x: jnp.reshape(x, (devices, size // devices, *x.shape[1:])),
        (batch, rows),
    )
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(devices))
    loss, logits, stats, grads = jax.vmap(
        lambda part, key: one(state, *part, key, total_weight)
    )(parts, keys)
    stats = jax.tree.map(lambda x: jnp.mean(x, axis=0), stats)
    logits, rows = jax.tree.map(
        lambda x: x.reshape(size, *x.shape[2:]), (logits, grads.rows)
    )
    params = jax.tree.map(lambda x: jnp.sum(x, axis=0), grads.params)
    fp8 = jax.tree.map(lambda x: jnp.max(x, axis=0), grads.fp8)
    return jnp.sum(loss), logits, stats, Gradients(params, rows, fp8)


def placement(config, gradients="f32", tables=TABLES):
    """Returns a placement whose part of a step runs on virtual devices."""
    one = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), AXES)
    made = placement_of(one, config, tables)
    how = GradientSum(gradients, "as asked", 0)
    return dataclasses.replace(made, gradient_sum=how)


def in_order_of_mesh(parts, rows):
    """Returns the parts of a state with tables in the order of a mesh, on the host."""
    order = Order(rows, 256)

    def moved(x):
        out = np.zeros((order.places, *x.shape[1:]), x.dtype)
        out[places_of(np.arange(rows), order)] = x
        return out

    return _moved(moved, parts)


def in_order_of_rows(parts, rows):
    """Returns the parts of a state of a mesh with tables as those of one device."""
    at = places_of(np.arange(rows), Order(rows, 256))
    return _moved(lambda x: np.asarray(x)[at], parts)


def _moved(move, parts):
    moved = {name: jax.tree.map(move, parts[name]) for name in ("table", "row_state")}
    return parts | moved


def on_virtual_devices(function, replicas, shards, in_specs, out_specs):
    """Returns what `shard_map` does over M x L devices, compiled for one device.

    Collectives work as over devices. Results that all devices, or all replicas, are to
    have alike are checked to be so, bit for bit.
    """
    split = {P(): (1, 1), P(SHARD): (1, shards), BATCH: (replicas, shards)}

    def parts(spec, x):
        shape = x.shape if spec == P() else (-1, *x.shape[1:])
        if spec != P():
            shape = (len(x) // np.prod(split[spec]), *shape[1:])
        x = np.reshape(x, (*split[spec], *shape))
        return np.broadcast_to(x, (replicas, shards, *shape))

    def whole(spec, x):
        bits = x.view(f"V{x.dtype.itemsize}") if x.size else x
        held = bits[: split[spec][0], : split[spec][1]]
        assert (bits == held).all()
        x = x[: split[spec][0], : split[spec][1]]
        return x[0, 0] if spec == P() else x.reshape(-1, *x.shape[3:])

    inner = jax.vmap(function, axis_name=SHARD)
    program = jax.jit(jax.vmap(inner, axis_name=REPLICA))

    def run(*arguments):
        given = _by_spec(parts, in_specs, jax.device_get(arguments))
        return _by_spec(whole, out_specs, jax.device_get(program(*given)))

    return run


def _by_spec(function, specs, tree):
    """Returns the leaves of a tree after a function of their specs, a tree's prefix."""
    return jax.tree.map(
        lambda spec, part: jax.tree.map(lambda x: function(spec, np.asarray(x)), part),
        specs,
        tree,
        is_leaf=lambda x: isinstance(x, P),
    )


def collectives(text):
    """Yields kind, dtype, elements and axes of each collective of a compiled step."""
    kinds = "all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute"
    for line in text.splitlines():
        if found := re.search(rf"= (.*) ({kinds})(?:-start)?\(", line):
            axes = re.search(r"replica_groups=mesh\[.*?\] \{(.*?)\}", line)
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", found[1]):
                size = math.prod(int(d) for d in dims.split(",") if d)
                yield found[2], dtype, size, axes and axes[1]


def assert_devices_agree(tree):
    """Asserts that devices with the same part of an array have its bits alike."""
    for leaf in jax.tree.leaves(tree):
        by_index = {}
        for shard in leaf.addressable_shards:
            data = np.asarray(shard.data)
            first = by_index.setdefault(str(shard.index), data)
            np.testing.assert_array_equal(data, first)
