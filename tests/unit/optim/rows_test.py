"""Row optimizers against their formulas, in numpy and float64."""

import dataclasses
import functools
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.ops import embedding, row_rounding
from loka_jax.ops.row_order import Order
from loka_jax.optim import Adam, LaggedRowwiseAdagrad, RowwiseAdagrad, Sgd
from loka_jax.optim import rows as rows_lib
from tests import support

TRUE, FALSE = jnp.asarray(True), jnp.asarray(False)
ROWS, DIM, LR = 12, 4, 0.1
# An epsilon that shows where it is added.
OPTIMIZERS = [
    RowwiseAdagrad(eps=0.3, initial_accumulator=0.5),
    RowwiseAdagrad(eps=0.3, c=4.0),
    LaggedRowwiseAdagrad(eps=0.3, c=4.0),
    Sgd(),
    Adam(b1=0.8, b2=0.9, eps=0.3),
]
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)


@functools.partial(jax.jit, static_argnums=0)
def update_some(how, table, state, ids, grads):
    """Returns table and state after an update of the rows of ids."""
    return embedding.update_rows(table, state, ids, grads, how, LR)


@functools.partial(jax.jit, static_argnums=0)
def update_whole(optimizer, table, state, summed, l2, enabled=TRUE):
    """Returns table and state after an update of every row."""
    return rows_lib.whole_table_update(
        table, state, summed, optimizer, LR, l2, enabled=enabled
    )


def batches(steps=4, n=8):
    """Yields ids with duplicates, and gradients; row 1 comes last, 0 and 2 never."""
    for step in range(steps):
        ids = np.random.default_rng(step).integers(3, ROWS - 3, n)
        ids[:2] = 1 if step == steps - 1 else ids[:2]
        grads = support.normal(n, DIM, seed=step + 10)
        yield jnp.asarray(ids, jnp.int32), grads * 2.0**-step


class Reference:
    """The formulas of a row optimizer, with its state, in float64."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        start = getattr(optimizer, "initial_accumulator", 0.0)
        self.acc, self.count = np.full(ROWS, start), np.zeros(ROWS, int)
        self.m, self.v = np.zeros((2, ROWS, DIM))
        self.state = (self.acc,)
        if isinstance(optimizer, Adam):
            self.state = self.m, self.v, self.count
        if isinstance(optimizer, Sgd):
            self.state = ()

    def step(self, rows, g):
        """Returns what to subtract from some rows with these summed gradients."""
        how = self.optimizer
        if isinstance(how, Sgd):
            return LR * g
        if isinstance(how, Adam):
            self.count[rows] += 1
            self.m[rows] = how.b1 * self.m[rows] + (1 - how.b1) * g
            self.v[rows] = how.b2 * self.v[rows] + (1 - how.b2) * g**2
            t = self.count[rows, None]
            m, v = self.m[rows] / (1 - how.b1**t), self.v[rows] / (1 - how.b2**t)
            return LR * m / (np.sqrt(v) + how.eps)
        squares, before = (g**2).mean(axis=1), self.acc[rows].copy()
        self.acc[rows] += squares
        used = self.acc[rows]
        if isinstance(how, LaggedRowwiseAdagrad):
            used = np.maximum(before, squares)
        return LR * g / (np.sqrt(used / how.c) + how.eps)[:, None]


@pytest.mark.parametrize("l2", [None, 0.5], ids=["some rows", "whole table"])
@each_optimizer
def test_rows_follow_the_formula(optimizer, l2):
    reference, table = Reference(optimizer), support.normal(ROWS, DIM)
    exact, state = np.asarray(table, np.float64).copy(), optimizer.init(table)
    for ids, grads in batches():
        # Duplicates are summed first, then squared.
        total, rows = np.zeros((ROWS, DIM)), np.unique(ids)
        np.add.at(total, np.asarray(ids), np.asarray(grads, np.float64))
        if l2 is None:  # rows in no batch do not move
            table, state = update_some(optimizer, table, state, ids, grads)
            exact[rows] -= reference.step(rows, total[rows])
            continue
        # What is in unused entries is arbitrary.
        unused = ROWS - len(rows)
        unique = embedding.UniqueRows(
            np.int32([*rows, *[embedding.BAD_ID] * unused]),
            np.float32(np.pad(total[rows], ((0, unused), (0, 0)), "edge")),
        )
        table, state = update_whole(optimizer, table, state, unique, l2)
        exact -= reference.step(np.arange(ROWS), total + l2 * exact)
    np.testing.assert_allclose(table, exact, rtol=1e-5, atol=1e-5)
    for found, expected in zip(state, reference.state, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    if l2 is not None:  # a step that is not enabled leaves no trace
        new = update_whole(optimizer, table, state, unique, l2, FALSE)
        chex.assert_trees_all_equal(new, (table, state))


def test_l2_shrinks_bfloat16_rows_in_the_mean():
    table = jnp.full((4096, DIM), 1.5, jnp.bfloat16)
    shrink, unit = 2.0**-11, 2.0**-7

    @jax.jit
    def updated(table):
        unique = embedding.UniqueRows(jnp.zeros(1, jnp.int32), jnp.zeros((1, DIM)))
        order = Order(len(table), 1)
        rounding = row_rounding.of_step(0, jnp.asarray(0), order, DIM)
        how = embedding.Rounded(Sgd(), rounding)
        return rows_lib.whole_table_update(
            table, (), unique, how, 1.0, shrink, enabled=TRUE
        )[0]

    found = np.asarray(updated(table), np.float64)
    # A value goes down with the probability f, by a unit.
    f = 1.5 * shrink / unit
    deviation = np.sqrt(f * (1 - f) / found.size) * unit
    assert abs(found.mean() - 1.5 * (1 - shrink)) <= 5 * deviation


@pytest.mark.parametrize("optimizer", [RowwiseAdagrad(eps=0.5, c=4.0), Sgd()], ids=str)
def test_triton_gets_the_rate_the_epsilon_and_the_rounding(optimizer, monkeypatch):
    kernel = mock.Mock(side_effect=lambda table, *operands, **options: (table,) * 2)
    for name in ("rowwise_adagrad", "sgd"):
        monkeypatch.setattr(f"loka_jax.optim.rows.row_update.{name}", kernel)
    rounding = row_rounding.Rounding(jnp.zeros(3, jnp.uint32), 7, 1)
    table = jnp.zeros((3, 2))
    operands = table, optimizer.init(table), jnp.arange(1), jnp.arange(1), table[:1]
    for how in ((), (rounding,)):
        optimizer.update_in_place(*operands, LR, *how)
    plain, rounded = (call.kwargs for call in kernel.call_args_list)
    # In place c is a factor of its root on the rate and on epsilon.
    is_sgd = isinstance(optimizer, Sgd)
    expected = {"lr": LR} if is_sgd else {"lr": 2 * LR, "eps": 2 * 0.5}
    assert plain == expected | {"noise": None}
    assert (rounded["noise"].depth, rounded["noise"].shards) == (7, 1)


@pytest.mark.parametrize(
    "kind, name, value",
    [
        (RowwiseAdagrad, "eps", 0.0),
        (RowwiseAdagrad, "c", 0.0),
        (RowwiseAdagrad, "initial_accumulator", float("inf")),
        (LaggedRowwiseAdagrad, "eps", -1.0),
        (Adam, "b1", 1.0),
        (Adam, "b2", float("nan")),
    ],
)
def test_settings_out_of_range_are_refused(kind, name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        dataclasses.replace(kind(), **{name: value})
