"""Statistics of the sites in training steps."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from loka_jax.nn import ProbeConfig
from loka_jax.train import build as build_lib
from loka_jax.train.logs import log_lines
from loka_jax.train.observe import probe_step
from tests.support import train as support

SIZE = 64


def test_probe_sees_the_rows_of_each_batch():
    config = support.config(batch_size=SIZE)
    model = config.model.clone(dropout_rate=0.0)
    probe = dataclasses.replace(config.probe, every=1)
    config = dataclasses.replace(config, model=model, probe=probe, plan="off")
    run = build_lib.build(config, None, lambda line: None)
    observe, state = probe_step(run, ProbeConfig()), run.init()
    batches = [run.read(run.splits.train, i) for i in range(3)]
    for batch in batches:
        state = dataclasses.replace(state, probe=observe(state, batch))
        state = run.train_step()(state, batch)
    for stats in jax.tree.leaves(state.probe, is_leaf=lambda x: hasattr(x, "lhs")):
        assert stats.lhs.moments.count == stats.g.moments.count == 3 * SIZE
        assert stats.rhs.normal.steps == 3
    rows = np.concatenate([batch.dense for batch in batches])
    found = state.probe["bottom_mlp"]["dense_0"]["stats"].lhs.moments.covariance[0]
    np.testing.assert_allclose(found[:13, :13], np.cov(rows.T), rtol=0.05, atol=0.02)
    # Log lines have the amaxes of the newest batch, and the scales by name.
    amaxes, scales = log_lines.amaxes(state), log_lines.scales(state)
    largest = np.abs(batches[-1].dense).max()  # which is cast to bfloat16
    assert amaxes["bottom_mlp/dense_0/lhs"] == pytest.approx(largest, rel=2**-8)
    assert all(scale > 0 for scale in scales.values())
    assert {name.rpartition("/")[2] for name in scales} == {"lhs", "rhs", "g"}

    # A batch that is not finite changes no statistics of its rows.
    bad = batches[0]._replace(dense=batches[0].dense * np.float32(np.nan))
    chex.assert_trees_all_equal(_rows(state.probe), _rows(observe(state, bad)))


def _rows(probe):
    stats = jax.tree.leaves(probe, is_leaf=lambda x: hasattr(x, "lhs"))
    return [x.lhs.moments for x in stats]
