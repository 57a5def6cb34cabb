"""Multi-valued fields in a training step, against a whole-table gradient."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from loka_jax.data import Batch
from loka_jax.data.batch import Bag
from loka_jax.models import Dcnv2, Dlrm
from loka_jax.ops.tables import Tables, TableSpec
from loka_jax.optim import Sgd
from loka_jax.optim.rows import Adam
from loka_jax.train import metrics
from loka_jax.train.state import init_state
from loka_jax.train.step import RowUpdate, make_eval_step, make_train_step

ROWS = (7, 5, 6, 4)  # two fields with one id, then two with lists
TABLES = TableSpec(rows=ROWS, dim=8, pooling=("mean", "sum"))
MODELS = {
    "dlrm": Dlrm(bottom_mlp=(8,), top_mlp=(8,), recipe="f32"),
    "dcnv2": Dcnv2(num_cross_layers=1, deep_mlp=(8,), recipe="f32"),
}
SIZE, OFFSETS = 32, (0, 7, 12, 18)


def make_batch(size=SIZE) -> Batch:
    rng = np.random.default_rng(0)
    bags = []
    for rows, slots, weighted in ((6, 5, False), (4, 3, True)):
        ids = rng.integers(0, rows, (size, slots)).astype(np.int32)
        ids[np.arange(slots) >= rng.integers(0, slots + 1, (size, 1))] = -1
        weights = rng.uniform(0.5, 2, ids.shape).astype(np.float32) * (ids >= 0)
        bags.append(Bag(ids, weights if weighted else None))
    return Batch(
        dense=rng.normal(size=(size, 3)).astype(np.float32),
        ids=rng.integers(0, ROWS[:2], (size, 2)).astype(np.int32),
        labels=rng.integers(0, 2, size).astype(np.float32),
        weights=np.ones(size, np.float32),
        bags=tuple(bags),
    )


SGD = Sgd()


def make_state(model, rows=SGD, tables: Tables = TABLES, num_dense=3):
    return init_state(
        jax.random.key(0),
        model=model,
        tables=tables,
        num_dense=num_dense,
        optimizer=optax.sgd(0.1),
        row_optimizer=rows,
        init_stddev=0.5,
    )


def make_step(model, rows=SGD, tables: Tables = TABLES, **options):
    update = RowUpdate(rows, optax.constant_schedule(0.1), 0.0)
    return jax.jit(make_train_step(model, tables, optax.sgd(0.1), update, **options))


def dense_embeddings(table, batch):
    """The oracle: each list as a row of a matrix of weights over the whole table."""
    out = [table[jnp.asarray(batch.ids[:, f]) + OFFSETS[f]] for f in range(2)]
    for f, bag in enumerate(batch.bags, 2):
        weights = np.ones(bag.ids.shape) if bag.weights is None else bag.weights
        matrix = np.zeros((len(bag.ids), len(table)), np.float32)
        for b, (ids, ws) in enumerate(zip(bag.ids, weights, strict=True)):
            for i, w in zip(ids[ids >= 0], ws[ids >= 0], strict=True):
                matrix[b, i + OFFSETS[f]] += w
        if TABLES.pooling[f - 2] == "mean":
            matrix /= np.maximum(matrix.sum(1, keepdims=True), 1e-30)
        out.append(jnp.asarray(matrix) @ table)
    return jnp.stack(out, axis=1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_step_equals_the_gradient_of_the_whole_table(name, microbatches):
    model, batch = MODELS[name], make_batch()
    batch.weights[-5:] = 0
    state, dense = make_state(model), jnp.asarray(batch.dense)

    def loss(table):
        rows = dense_embeddings(table, batch)
        logits = model.apply({"params": state.params}, dense, rows, train=True)
        losses = optax.sigmoid_binary_cross_entropy(logits, batch.labels)
        return jnp.sum(losses * batch.weights) / batch.weights.sum()

    want = state.table - 0.1 * jax.grad(loss)(state.table)
    after = make_step(model, microbatches=microbatches)(state, batch)
    chex.assert_trees_all_close(after.table, want, rtol=1e-5, atol=1e-6)
    assert int(after.bad_ids) == 0 and int(after.skipped) == 0
    if microbatches == 1:
        _, logits = jax.jit(make_eval_step(model, TABLES))(state, metrics.init(), batch)
        want = model.apply(
            {"params": state.params}, dense, dense_embeddings(state.table, batch)
        )
        chex.assert_trees_all_close(logits, want, rtol=1e-5, atol=1e-6)


def test_rows_that_no_list_names_keep_their_bytes():
    batch = make_batch()
    for bag in batch.bags:
        bag.ids[bag.ids == 1] = -1
    batch.bags[0].ids[-1] = 1
    batch.weights[-1] = 0  # a padding row touches nothing
    state = make_state(MODELS["dlrm"], Adam())
    after = make_step(MODELS["dlrm"], Adam())(state, batch)
    untouched = np.flatnonzero((after.table == state.table).all(axis=1))
    assert untouched.tolist() == [13, 19]
    assert np.asarray(after.row_state.count)[[12, 13, 18, 19]].tolist() == [1, 0, 1, 0]


def test_empty_lists_read_zeros():
    batch = make_batch()
    batch.bags[0].ids[:] = -1
    state = make_state(MODELS["dlrm"])
    other = dataclasses.replace(state, table=state.table.at[12:18].add(1.0))
    step = jax.jit(make_eval_step(MODELS["dlrm"], TABLES))
    logits = [step(x, metrics.init(), batch)[1] for x in (state, other)]
    chex.assert_trees_all_equal(*logits)


def test_an_owner_of_a_shared_table_owns_it_itself():
    with pytest.raises(ValueError, match="own its table itself"):
        TableSpec(rows=(5, 5), dim=4, owners=(1, 0))


def test_fields_that_share_a_table_train_its_rows_together():
    spec = TableSpec(rows=(7, 7), dim=8, owners=(0, 0))
    assert (spec.offsets, spec.total_rows) == ((0, 0), 7)
    batch = make_batch()._replace(bags=())
    batch.ids[:] = 1
    state = make_state(MODELS["dlrm"], tables=spec)
    twice = dataclasses.replace(state, table=jnp.tile(state.table, (2, 1)))
    apart = dataclasses.replace(spec, owners=())
    shared = make_step(MODELS["dlrm"], tables=spec)(state, batch)
    own = make_step(MODELS["dlrm"], tables=apart)(twice, batch)
    moved = (own.table - twice.table)[1] + (own.table - twice.table)[8]
    chex.assert_trees_all_close(
        (shared.table - state.table)[1], moved, rtol=1e-4, atol=1e-6
    )
    assert np.flatnonzero((shared.table != state.table).any(axis=1)).tolist() == [1]


def test_ids_out_of_range_in_lists_are_counted_and_padding_is_not():
    batch = make_batch()
    batch.bags[0].ids[0, :3] = (6, -2, 2**31 - 1)
    state = make_state(MODELS["dlrm"])
    assert int(make_step(MODELS["dlrm"])(state, batch).bad_ids) == 3


def test_data_without_lists_lower_to_a_plain_lookup():
    """The one-hot program holds one gather of the table and no pooling."""
    spec = TableSpec(rows=ROWS[:2], dim=8)
    batch = make_batch()._replace(bags=())
    state = make_state(MODELS["dlrm"], tables=spec)
    step = make_step(MODELS["dlrm"], tables=spec)
    text = str(step.trace(state, batch).jaxpr)
    table = f"f32[{sum(ROWS[:2])},8]"
    gathers = [line for line in text.splitlines() if " gather[" in line]
    looked_up = [line for line in gathers if f"f32[{SIZE},2,8]" in line]
    assert len(looked_up) == 1 and table in text
    lists = str(
        make_step(MODELS["dlrm"]).trace(make_state(MODELS["dlrm"]), make_batch()).jaxpr
    )
    assert f"f32[{SIZE},1,5,8]" in lists and f"f32[{SIZE},1,5,8]" not in text
