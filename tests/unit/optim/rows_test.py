import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from loka_jax.ops import embedding, row_rounding
from loka_jax.ops.row_order import Order
from loka_jax.optim.rows import (
    Adam,
    LaggedRowwiseAdagrad,
    RowwiseAdagrad,
    Sgd,
    whole_table_update,
)

update_rows = jax.jit(embedding.update_rows, static_argnums=4)
TRUE, FALSE = jnp.asarray(True), jnp.asarray(False)
ROWS, DIM = 12, 4


@functools.partial(jax.jit, static_argnums=4)
def update_whole(table, state, ids, grads, optimizer, lr, l2, *, enabled):
    summed = embedding.sum_by_row(ids, grads, table.shape[0])
    return whole_table_update(table, state, summed, optimizer, lr, l2, enabled=enabled)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def batches(steps=5, n=20):
    """Yields ids with duplicates, some rows in no batch, and their gradients."""
    for step in range(steps):
        ids = np.random.default_rng(step).integers(0, ROWS - 2, n)
        yield jnp.asarray(ids, jnp.int32), normal(step + 10, n, DIM)


def summed(ids, grads):
    out = np.zeros((ROWS, DIM))
    np.add.at(out, np.asarray(ids), np.asarray(grads, np.float64))
    return out


def optax_update(optimizer, grads, state):
    with jax.numpy_dtype_promotion("standard"):  # optax's adam: float ** int32
        return jax.jit(optimizer.update)(grads, state)


def train(optimizer, table, lr):
    state = optimizer.init(table)
    for ids, grads in batches():
        table, state = update_rows(
            table, state, ids, grads, optimizer, lr, enabled=TRUE
        )
    return table, state


def test_rowwise_adagrad_follows_torchrecs_formula():
    table, lr, eps = np.asarray(normal(0, ROWS, DIM), np.float64), 0.1, 1e-3
    acc = np.full(ROWS, 0.5)
    optimizer = RowwiseAdagrad(eps=eps, initial_accumulator=0.5)
    new, state = train(optimizer, jnp.asarray(table, jnp.float32), lr)
    for ids, grads in batches():
        total = summed(ids, grads)  # duplicates first, then the square
        acc += (total**2).mean(axis=1)
        table -= lr * total / (np.sqrt(acc) + eps)[:, None]
    np.testing.assert_allclose(state.sum_of_squares, acc, rtol=1e-5)
    np.testing.assert_allclose(new, table, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [RowwiseAdagrad, LaggedRowwiseAdagrad])
def test_rowwise_adagrad_divides_by_its_scaled_sums(kind):
    table, lr, eps, c = np.asarray(normal(0, ROWS, DIM), np.float64), 0.1, 1e-3, 4.0
    new, state = train(kind(eps=eps, c=c), jnp.asarray(table, jnp.float32), lr)
    acc = np.zeros(ROWS)
    for ids, grads in batches():
        total = summed(ids, grads)
        squares = (total**2).mean(axis=1)
        after = acc + squares
        used = np.maximum(acc, squares) if kind is LaggedRowwiseAdagrad else after
        table -= lr * total / (np.sqrt(used / c) + eps)[:, None]
        acc = after
    np.testing.assert_allclose(state.sum_of_squares, acc, rtol=1e-5)
    np.testing.assert_allclose(new, table, rtol=1e-5, atol=1e-5)


def test_a_first_rowwise_adagrad_step_has_the_size_of_the_learning_rate():
    table, _ = update_rows(
        jnp.zeros((3, 2)),
        RowwiseAdagrad().init(jnp.zeros((3, 2))),
        jnp.asarray([1], jnp.int32),
        jnp.asarray([[1e-12, -1e-12]]),
        RowwiseAdagrad(eps=1e-16),
        0.1,
        enabled=TRUE,
    )
    np.testing.assert_allclose(table[1], [-0.1, 0.1], rtol=1e-3)


def test_no_lagged_step_is_longer_than_the_first():
    optimizer, lr, c = LaggedRowwiseAdagrad(c=4.0), 0.1, 4.0
    table = jnp.zeros((1, 2))
    state = optimizer.init(table)
    for size in (1e-6, 1.0, 1e-3, 10.0, 0.5):
        new, state = optimizer.update(table, state, jnp.asarray([[size, -size]]), lr)
        assert np.max(np.abs(new - table)) <= 1.001 * lr * np.sqrt(c)
        table = new


def test_sgd_follows_its_formula():
    table = np.asarray(normal(0, ROWS, DIM), np.float64)
    new, state = train(Sgd(), jnp.asarray(table, jnp.float32), 0.1)
    for ids, grads in batches():
        table -= 0.1 * summed(ids, grads)
    assert state == ()
    np.testing.assert_allclose(new, table, rtol=1e-5, atol=1e-5)


def test_lazy_adam_is_optax_adam_of_each_row_on_its_own_steps():
    table = normal(0, ROWS, DIM)
    new, state = train(Adam(), table, 0.1)
    adam = optax.adam(0.1)
    for row in range(ROWS):
        value, inner, count = table[row], adam.init(table[row]), 0
        for ids, grads in batches():
            if row not in np.asarray(ids):
                continue
            grad = jnp.asarray(summed(ids, grads)[row], jnp.float32)
            update, inner = optax_update(adam, grad, inner)
            value, count = value + update, count + 1
        assert int(state.count[row]) == count
        np.testing.assert_allclose(new[row], value, rtol=1e-4, atol=1e-5)


def test_a_row_seen_late_takes_a_first_adam_step_of_the_learning_rate():
    table = jnp.zeros((2, 2))
    state = Adam().init(table)
    for row in [0] * 50 + [1]:
        ids = jnp.asarray([row], jnp.int32)
        table, state = update_rows(
            table, state, ids, jnp.ones((1, 2)), Adam(), 0.1, enabled=TRUE
        )
    np.testing.assert_allclose(table[1], [-0.1, -0.1], rtol=1e-4)


def test_whole_table_adam_with_l2_is_optax_adam_on_the_dense_gradient():
    table, lr, l2 = normal(0, ROWS, DIM), 0.01, 0.1
    adam, optimizer = optax.adam(lr), Adam()
    expected, inner = table, adam.init(table)
    state = optimizer.init(table)
    for ids, grads in batches():

        def loss(table, ids=ids, grads=grads):
            return jnp.sum(table[ids] * grads) + l2 / 2 * jnp.sum(table**2)

        update, inner = optax_update(adam, jax.grad(loss)(expected), inner)
        expected = expected + update
        table, state = update_whole(
            table, state, ids, grads, optimizer, lr, l2, enabled=TRUE
        )
    np.testing.assert_allclose(table, expected, rtol=1e-5, atol=1e-6)


def test_l2_moves_rows_that_no_batch_names():
    table = jnp.ones((ROWS, DIM))
    ids, grads = next(batches())
    new, _ = update_whole(table, (), ids, grads, Sgd(), 0.5, 0.1, enabled=TRUE)
    np.testing.assert_allclose(new[-1], np.full(DIM, 1 - 0.5 * 0.1), rtol=1e-6)


def test_l2_shrinks_bfloat16_rows_in_the_mean():
    table = jnp.full((4096, DIM), 1.5, jnp.bfloat16)
    ids, grads = jnp.zeros(1, jnp.int32), jnp.zeros((1, DIM))
    rounding = row_rounding.of_step(0, jnp.asarray(0), Order(len(table), 1), DIM)
    shrink, unit = 2.0**-11, 2.0**-7

    def updated(optimizer):
        summed = embedding.sum_by_row(ids, grads, len(table))
        operands = table, (), summed, optimizer, 1.0, shrink
        return np.asarray(whole_table_update(*operands, enabled=TRUE)[0], np.float64)

    np.testing.assert_array_equal(updated(Sgd()), np.asarray(table, np.float64))
    found = updated(embedding.Rounded(Sgd(), rounding))
    # A value goes down with the probability f, by a unit.
    f = 1.5 * shrink / unit
    deviation = np.sqrt(f * (1 - f) / found.size) * unit
    assert abs(found.mean() - 1.5 * (1 - shrink)) <= 5 * deviation
    assert deviation < 1.5 * shrink / 25


def test_whole_table_without_l2_is_update_rows_for_adagrad():
    table, optimizer = normal(0, ROWS, DIM), RowwiseAdagrad()
    state = optimizer.init(table)
    ids, grads = next(batches())
    ids = ids.at[0].set(embedding.BAD_ID).at[1].set(-1)
    some = update_rows(table, state, ids, grads, optimizer, 0.1, enabled=TRUE)
    whole = update_whole(table, state, ids, grads, optimizer, 0.1, 0.0, enabled=TRUE)
    chex.assert_trees_all_close(some, whole, rtol=1e-6)


@pytest.mark.parametrize("optimizer", [RowwiseAdagrad(), Sgd(), Adam()], ids=str)
def test_a_disabled_whole_table_update_leaves_no_trace(optimizer):
    table = normal(0, ROWS, DIM)
    state = optimizer.init(table)
    ids, grads = next(batches())
    new = update_whole(
        table, state, ids, grads * jnp.nan, optimizer, 0.1, 0.1, enabled=FALSE
    )
    chex.assert_trees_all_equal(new, (table, state))


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: RowwiseAdagrad(eps=0.0), "eps=0.0"),
        (lambda: RowwiseAdagrad(eps=float("nan")), "eps=nan"),
        (lambda: RowwiseAdagrad(c=0.0), "c=0.0"),
        (lambda: LaggedRowwiseAdagrad(c=float("nan")), "c=nan"),
        (lambda: LaggedRowwiseAdagrad(eps=-1.0), "eps=-1.0"),
        (lambda: RowwiseAdagrad(initial_accumulator=-1.0), "initial_accumulator=-1"),
        (lambda: Adam(b1=1.0), "b1=1.0"),
        (lambda: Adam(b2=float("nan")), "b2=nan"),
        (lambda: Adam(eps=-1.0), "eps=-1.0"),
    ],
)
def test_settings_out_of_range_are_refused(make, reason):
    with pytest.raises(ValueError, match=reason):
        make()
