"""Tables of several dims: each field as if its table held the projected vectors."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen

from loka_jax.data import Batch
from loka_jax.data.batch import Bag
from loka_jax.ops.tables import TableSpec, with_dims
from loka_jax.optim import Sgd
from loka_jax.train.placement import Placement
from loka_jax.train.state import init_state
from loka_jax.train.step import make_train_step
from loka_jax.train.tables.stacks import PROJECTIONS
from loka_jax.train.tables.update import RowUpdate

ROWS, DIMS, SIZE = (7, 5, 6, 4), (8, 4, 3, 4), 16  # the model's dim is 8
ONE = TableSpec(rows=ROWS, dim=8, pooling=("mean", "sum"))
MIXED = with_dims(ONE, DIMS)


def batch_of() -> Batch:
    rng = np.random.default_rng(0)
    lists = [rng.integers(0, rows, (SIZE, 2)).astype(np.int32) for rows in ROWS[2:]]
    batch = Batch(
        dense=rng.normal(size=(SIZE, 3)).astype(np.float32),
        ids=rng.integers(0, ROWS[:2], (SIZE, 2)).astype(np.int32),
        labels=rng.integers(0, 2, SIZE).astype(np.float32),
        weights=np.ones(SIZE, np.float32),
        bags=tuple(Bag(ids, None) for ids in lists),
    )
    batch.weights[-3:] = 0
    return batch


class Model(linen.Module):
    """A logit by all values, each with a weight of its own."""

    compute_dtype = jnp.float32

    @linen.compact
    def __call__(self, dense, embeddings, *, train=False):
        x = jnp.concatenate([dense, embeddings.reshape(len(dense), -1)], axis=1)
        return linen.Dense(1)(x)[:, 0]


def as_one_table(params, parts):
    """The oracle: one table of the model's dim, which holds the projected rows."""
    three, four, eight = parts
    (of_three,), (first, last) = (params[PROJECTIONS][dim] for dim in "34")
    return jnp.concatenate([eight, four[:5] @ first, three @ of_three, four[5:] @ last])


def test_a_step_equals_the_gradient_through_the_projections():
    batch, optimizer = batch_of(), optax.sgd(0.1)
    update = RowUpdate(Sgd(), optax.constant_schedule(0.2), 0.0)
    parts = Model(), Placement(MIXED), optimizer, update
    step = make_train_step(*parts, microbatches=2)
    options = dict(num_dense=3, row_optimizer=Sgd(), init_stddev=0.5)

    def loss(params, parts):
        table = as_one_table(params, parts)
        one, two = batch.ids.T
        means, sums = (bag.ids for bag in batch.bags)
        fields = [table[one], table[7 + two]]
        fields += [table[12 + means].mean(axis=1), table[18 + sums].sum(axis=1)]
        vectors = jnp.stack(fields, axis=1)
        logits = Model().apply({"params": params}, jnp.asarray(batch.dense), vectors)
        losses = optax.sigmoid_binary_cross_entropy(logits, batch.labels)
        return jnp.sum(losses * batch.weights) / batch.weights.sum()

    @jax.jit
    def both(key):
        made = dict(model=Model(), tables=MIXED, optimizer=optimizer, **options)
        state = init_state(key, **made)
        grads = jax.grad(loss, argnums=(0, 1))(state.params, state.table)
        moved = [
            jax.tree.map(lambda x, g, rate=rate: x - rate * g, old, of_old)
            for old, of_old, rate in zip(
                (state.params, state.table), grads, (0.1, 0.2), strict=True
            )
        ]
        return state, step(state, batch)[0], moved

    before, after, want = both(jax.random.key(0))
    chex.assert_trees_all_close([after.params, after.table], want, rtol=1e-5, atol=1e-6)
    for old, new in zip(before.table, after.table, strict=True):
        assert np.abs(new - old).max() > 1e-3
    assert int(after.skipped) == 0 and after.row_state == ((), (), ())
