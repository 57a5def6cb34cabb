"""Tables of several dims: each field as if its table held the projected vectors."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pyarrow import csv

import loka_jax
from loka_jax.ops.tables import MixedTables, TableSpec, with_dims
from loka_jax.optim.rows import Adam, RowwiseAdagrad
from loka_jax.train import metrics
from loka_jax.train.config import EmbeddingConfig
from loka_jax.train.step import make_eval_step
from loka_jax.train.tables.stacks import PROJECTIONS
from loka_jax.train.watch.guard import poisoned
from tests.support import predict as support
from tests.unit.train.tables import lookup_test
from tests.unit.train.tables.lookup_test import (
    MODELS,
    TABLES,
    dense_embeddings,
    make_batch,
)

DIMS = (8, 4, 3, 4)  # of two fields with one id and two with lists; the model's is 8
MIXED = with_dims(TABLES, DIMS)


def make_state(model, rows=lookup_test.SGD):
    return lookup_test.make_state(model, rows, tables=MIXED)


def make_step(model, rows=lookup_test.SGD, **options):
    return lookup_test.make_step(model, rows, tables=MIXED, **options)


def test_fields_are_grouped_by_their_dim():
    assert isinstance(MIXED, MixedTables) and MIXED.dim == 8
    assert MIXED.fields == ((2,), (1, 3), (0,))
    assert [(spec.dim, spec.rows, spec.pooling) for spec in MIXED.stacks] == [
        (3, (6,), ("mean",)),
        (4, (5, 4), ("sum",)),
        (8, (7,), ()),
    ]


def test_one_dim_for_all_is_the_one_stack():
    assert with_dims(TABLES, (8,) * 4) is TABLES


def test_columns_that_share_a_table_stay_together():
    spec = TableSpec(rows=(7, 5, 7), dim=8, owners=(0, 1, 0))
    mixed = with_dims(spec, (4, 8, 4))
    assert isinstance(mixed, MixedTables)
    assert mixed.stacks[0].offsets == (0, 0) and mixed.stacks[0].total_rows == 7


def as_one_table(params, stacks):
    """The oracle: one table of the model's dim, which holds the projected rows."""
    three, four, eight = stacks
    projections = params[PROJECTIONS]
    return jnp.concatenate(
        [
            eight,
            four[:5] @ projections["4"][0],
            three @ projections["3"][0],
            four[5:] @ projections["4"][1],
        ]
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_step_equals_the_gradient_through_the_projections(name, microbatches):
    model, batch = MODELS[name], make_batch()
    batch.weights[-5:] = 0
    state, dense = make_state(model), jnp.asarray(batch.dense)
    assert not poisoned(state)

    def logits_of(params, stacks, **options):
        rows = dense_embeddings(as_one_table(params, stacks), batch)
        return model.apply({"params": params}, dense, rows, **options)

    def loss(params, stacks):
        logits = logits_of(params, stacks, train=True)
        losses = optax.sigmoid_binary_cross_entropy(logits, batch.labels)
        return jnp.sum(losses * batch.weights) / batch.weights.sum()

    old = (state.params, state.table)
    grads = jax.grad(loss, argnums=(0, 1))(*old)
    want = jax.tree.map(lambda x, g: x - 0.1 * g, old, grads)
    assert all(float(jnp.abs(g).max()) > 1e-3 for g in jax.tree.leaves(grads[1]))
    after = make_step(model, microbatches=microbatches)(state, batch)
    chex.assert_trees_all_close((after.params, after.table), want, rtol=1e-5, atol=1e-6)
    _, logits = jax.jit(make_eval_step(model, MIXED))(state, metrics.init(), batch)
    chex.assert_trees_all_close(logits, logits_of(*old), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [Adam(), RowwiseAdagrad()], ids=["adam", "adagrad"])
def test_each_stack_has_its_optimizer_state(rows):
    batch = make_batch()
    batch.ids[0] = (-1, 99)  # bad ids of two stacks
    state = make_state(MODELS["dlrm"], rows)
    step = make_step(MODELS["dlrm"], rows)
    after = step(step(state, batch), batch)
    assert int(after.bad_ids) == 4 and int(after.skipped) == 0
    for table, row_state, old in zip(
        after.table, after.row_state, state.table, strict=True
    ):
        changed = np.asarray((table != old).any(axis=1))
        first = np.asarray(jax.tree.leaves(row_state)[-1])
        assert changed.any() and np.array_equal(first > 0, changed)


def test_vectors_keep_their_spread():
    tables = with_dims(TableSpec(rows=(2000,) * 2, dim=256), (16, 256))
    state = lookup_test.make_state(MODELS["dlrm"], tables=tables)
    (narrow, wide), projections = state.table, state.params[PROJECTIONS]
    vectors = narrow @ projections["16"][0]
    # 4096 entries of the projection: its variance is right within a few percent.
    assert float(vectors.std() / wide.std()) == pytest.approx(1, rel=0.05)


def test_a_run_scores_with_the_dims_it_was_trained_with(tmp_path):
    support.write(tmp_path / "train.csv", support.rows(200))
    test = support.write(tmp_path / "test.csv", support.rows(75, seed=1))
    config = support.config(tmp_path, test=str(test))
    embedding = EmbeddingConfig(dim=16, dims=("item=4",))
    trained = support.train(tmp_path, dataclasses.replace(config, embedding=embedding))
    expected = 1 / (1 + np.exp(-trained.logits.astype(np.float64)))
    model = loka_jax.load(trained.workdir)
    assert [table.shape[1] for table in model._state.table] == [4, 16]
    scores = model.scores(csv.read_csv(test))
    assert np.array_equal(scores, expected.astype(np.float32))


def test_dims_are_those_of_the_table():
    config = EmbeddingConfig(dim=16, dims=("user=4", "a=b=32"))
    assert config.dims_of(("user", "item", "a=b")) == {"user": 4, "item": 16, "a=b": 32}
    shared = config.dims_of(("user", "last", "a=b"), ("user", "user", "a=b"))
    assert shared == {"user": 4, "last": 4, "a=b": 32}


@pytest.mark.parametrize(
    "entry, sentence",
    [
        ("user=0", "--embedding.dims user 0 must be in 1..4096"),
        ("user=x", "--embedding.dims user x must be in 1..4096"),
        ("price=8", "'price=8' must be COLUMN=VALUE; the columns are user, item."),
        ("last=8", "'last=8' must be COLUMN=VALUE; the columns are user, item."),
    ],
)
def test_other_dims_are_refused(entry, sentence):
    config = EmbeddingConfig(dims=(entry,))
    with pytest.raises(ValueError, match=sentence.replace(".", "[.]")):
        config.dims_of(("user", "item", "last"), ("user", "item", "user"))
