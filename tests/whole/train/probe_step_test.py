"""Statistics of the sites in training steps."""

import functools

import chex
import jax
import numpy as np
import optax
import pytest

from loka_jax.data import Batch
from loka_jax.models import Dlrm
from loka_jax.nn import ProbeConfig
from loka_jax.ops.tables import TableSpec
from loka_jax.optim import Sgd
from loka_jax.train.state import init_state
from loka_jax.train.step import RowUpdate, make_train_step
from loka_jax.train.watch import operands

TABLES, SIZE, CONFIG = TableSpec(rows=(20, 10, 5), dim=16), 64, ProbeConfig()
FP8 = Dlrm(bottom_mlp=(16,), top_mlp=(16,), recipe="fp8_tensorwise_delayed")


def batch_of(seed=0) -> Batch:
    rng = np.random.default_rng(seed)
    return Batch(
        dense=rng.normal(size=(SIZE, 13)).astype(np.float32),
        ids=rng.integers(0, TABLES.rows, (SIZE, 3)).astype(np.int32),
        labels=rng.integers(0, 2, SIZE).astype(np.float32),
        weights=np.ones(SIZE, np.float32),
    )


def state_of(probe=CONFIG):
    init = functools.partial(
        init_state,
        model=FP8,
        tables=TABLES,
        num_dense=13,
        optimizer=optax.sgd(0.1),
        row_optimizer=Sgd(),
        init_stddev=0.5,
        probe=probe,
    )
    return jax.jit(init)(jax.random.key(0))


@functools.cache
def step_of(probe=CONFIG):
    rows = RowUpdate(Sgd(), optax.constant_schedule(0.1), 0.0)
    return jax.jit(make_train_step(FP8, TABLES, optax.sgd(0.1), rows, probe=probe))


def test_an_observed_step_trains_as_any_other_and_sees_all_rows():
    state, plain = state_of(), state_of(None)
    batches = [batch_of(seed) for seed in range(3)]
    for batch in batches:
        state, plain = step_of()(state, batch), step_of(None)(plain, batch)
    for name in ("params", "fp8", "table"):
        chex.assert_trees_all_close(
            getattr(state, name), getattr(plain, name), rtol=1e-5, atol=1e-6
        )
    assert plain.probe == {}
    for stats in jax.tree.leaves(state.probe, is_leaf=lambda x: hasattr(x, "lhs")):
        assert stats.lhs.moments.count == stats.g.moments.count == 3 * SIZE
        assert stats.rhs.normal.steps == 3
    rows = np.concatenate([batch.dense for batch in batches])
    bottom = state.probe["bottom_mlp"]["dense_0"]["stats"]
    np.testing.assert_allclose(
        bottom.lhs.moments.covariance[0][:13, :13], np.cov(rows.T), rtol=0.05, atol=0.02
    )
    # Log lines have the amaxes of the newest batch, and the scales by name.
    amaxes, scales = operands.amaxes(state), operands.scales(state)
    largest = np.abs(batches[-1].dense).max()  # which is cast to bfloat16
    assert amaxes["bottom_mlp/dense_0/lhs"] == pytest.approx(largest, rel=2**-8)
    assert all(scale > 0 for scale in scales.values())
    assert {name.rpartition("/")[2] for name in scales} == {"lhs", "rhs", "g"}

    bad = batch_of(4)
    skipped = step_of()(state, bad._replace(dense=bad.dense * np.nan))
    assert skipped.skipped == 1
    chex.assert_trees_all_equal(skipped.probe, state.probe)
