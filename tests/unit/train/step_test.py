"""One training step: what it reads, what it replaces, what it leaves alone."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from loka_jax.data import Batch
from loka_jax.models import Dlrm
from loka_jax.nn import OVERWRITE_WITH_GRADIENT, Planned
from loka_jax.ops import embedding
from loka_jax.optim import Sgd
from loka_jax.train import metrics
from loka_jax.train.state import init_state
from loka_jax.train.step import (
    RowUpdate,
    make_eval_step,
    make_train_step,
    named_sites,
    scales_initialized,
)
from tests.support.train import digest

TABLES = embedding.TableSpec(rows=(20, 10, 5), dim=16)
FP8 = Dlrm(bottom_mlp=(16,), top_mlp=(16,), recipe="fp8_tensorwise_delayed")
F32 = FP8.clone(recipe="f32")
INITIALIZED = FP8.clone(recipe="fp8_tensorwise_delayed:initialized")
COUNTERS = ("step", "skipped", "skipped_in_a_row")


def make_batch(seed=0, size=64) -> Batch:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, TABLES.rows, (size, len(TABLES.rows)))
    return Batch(
        dense=rng.normal(size=(size, 13)).astype(np.float32),
        ids=ids.astype(np.int32),
        labels=rng.integers(0, 2, size).astype(np.float32),
        weights=np.ones(size, np.float32),
    )


def make_state(model=F32, optimizer=None, num_dense=13):
    return init_state(
        jax.random.key(0),
        model=model,
        tables=TABLES,
        num_dense=num_dense,
        optimizer=optimizer or optax.sgd(0.1),
        row_optimizer=Sgd(),
        init_stddev=0.5,
    )


@functools.cache
def make_step(model=F32, *, l2=0.0, microbatches=1, rows_lr=0.1, dropout_seed=0):
    rows = RowUpdate(Sgd(), optax.constant_schedule(rows_lr), l2)
    step = make_train_step(
        model,
        TABLES,
        optax.sgd(0.1),
        rows,
        microbatches=microbatches,
        dropout_seed=dropout_seed,
    )
    return jax.jit(step)


@pytest.fixture(scope="module")
def warm():
    """An FP8 state after two steps."""
    state = make_step(FP8)(make_state(FP8), make_batch())
    return make_step(FP8)(state, make_batch(1))


def without(state, *names):
    return {k: v for k, v in vars(state).items() if k not in names}


def test_optax_sees_parameters_only():
    seen = []

    def update(grads, opt_state, params=None):
        seen.extend((grads, params))
        return grads, opt_state

    spy = optax.GradientTransformation(lambda params: (), update)
    rows = RowUpdate(Sgd(), optax.constant_schedule(0.1), 0.0)
    step = make_train_step(FP8, TABLES, spy, rows)
    state = make_state(FP8, spy)
    jax.jit(step).trace(state, make_batch())
    structure = jax.tree.structure(state.params)
    assert [jax.tree.structure(tree) for tree in seen] == [structure, structure]
    assert OVERWRITE_WITH_GRADIENT not in state.params


@pytest.mark.parametrize(
    "model, dtype", [(FP8, jnp.bfloat16), (F32, jnp.float32)], ids=["fp8", "f32"]
)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_of_rows_have_the_models_dtype(
    monkeypatch, model, dtype, microbatches
):
    seen = []

    def update(table, row_state, ids, grads, *args, **options):
        seen.append((grads.dtype, options["implementation"]))
        return table, row_state

    monkeypatch.setattr(embedding, "update_rows", update)
    rows = RowUpdate(Sgd(), optax.constant_schedule(0.1), 0.0, implementation="xla")
    planned = Planned(model)
    step = make_train_step(
        planned, TABLES, optax.sgd(0.1), rows, microbatches=microbatches
    )
    jax.jit(step).trace(make_state(model), make_batch())
    assert seen == [(dtype, "xla")]


def test_every_scale_and_history_moves_in_every_step(warm):
    first = make_step(FP8)(make_state(FP8), make_batch())
    assert set(named_sites(warm)) == {"bottom_mlp/dense_1", "top_mlp/dense_0"}
    for path, site in named_sites(warm).items():
        assert np.all(np.asarray(site.scale_inv) > 0), path
        assert np.all(np.asarray(site.amax_history[:, :2]) > 0), path
        before = named_sites(first)[path].amax_history[:, 0]
        assert np.array_equal(site.amax_history[:, 1], before), path
        assert np.all(np.asarray(site.amax_history[:, 0] != before)), path


@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_gradient_norm_is_that_of_the_dense_gradients(microbatches):
    state = make_state()
    after = make_step(microbatches=microbatches)(state, make_batch())
    moved = jax.tree.map(lambda a, b: a - b, state.params, after.params)
    np.testing.assert_allclose(after.grad_norm, optax.tree.norm(moved) / 0.1, rtol=1e-4)


def test_a_model_scales_initialized_once_every_operand_was_seen(warm):
    assert not scales_initialized(make_state(FP8))
    assert scales_initialized(warm)


def test_a_model_without_delayed_scales_is_always_initialized():
    assert scales_initialized(make_state(F32))


@pytest.mark.parametrize("model", [FP8, INITIALIZED], ids=["first", "initialized"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_non_finite_feature_changes_nothing_but_counters(warm, model, value):
    batch = make_batch(2)
    batch.dense[3, 5] = value
    after = make_step(model)(warm, batch)
    assert digest(without(after, *COUNTERS)) == digest(without(warm, *COUNTERS))
    assert [int(getattr(after, name)) for name in COUNTERS] == [3, 1, 1]


@pytest.mark.slow
def test_an_infinite_feature_is_seen_by_a_first_layer_all_in_fp8():
    # 16 columns: no role of the first layer runs in bfloat16, and the cast saturates.
    batch = make_batch()
    batch = batch._replace(dense=np.resize(batch.dense, (64, 16)))
    state = make_step(FP8)(make_state(FP8, num_dense=16), batch)
    # A copy: the first step may still read the array it was given.
    poisoned = batch._replace(dense=batch.dense.copy())
    poisoned.dense[3, 5] = np.inf
    after = make_step(INITIALIZED)(state, poisoned)
    assert digest(without(after, *COUNTERS)) == digest(without(state, *COUNTERS))
    assert [int(x.skipped) for x in (state, after)] == [0, 1]


@pytest.mark.parametrize("what", ["params", "table"])
def test_a_poisoned_value_changes_nothing_but_counters(warm, what):
    value = jax.tree.map(lambda x: x.at[0].set(jnp.nan), getattr(warm, what))
    poisoned = dataclasses.replace(warm, **{what: value})
    batch = make_batch(2)
    batch.ids[0, 0] = 0
    after = make_step(FP8)(poisoned, batch)
    assert digest(without(after, *COUNTERS)) == digest(without(poisoned, *COUNTERS))
    assert int(after.skipped) == 1


def test_a_good_step_ends_the_row_of_skipped_ones(warm):
    bad = make_batch()
    bad.dense[0, 0] = np.nan
    state = make_step(FP8)(make_step(FP8)(warm, bad), bad)
    assert int(state.skipped_in_a_row) == 2
    state = make_step(FP8)(state, make_batch())
    assert (int(state.skipped), int(state.skipped_in_a_row)) == (2, 0)


@pytest.mark.slow
def test_a_skipped_step_does_not_advance_the_rows_schedule():
    rows = RowUpdate(Sgd(), lambda step: 0.1 * step.astype(jnp.float32), 0.0)
    step = jax.jit(make_train_step(F32, TABLES, optax.sgd(0.1), rows))
    state = dataclasses.replace(
        make_state(), step=jnp.asarray(5, jnp.int32), skipped=jnp.asarray(4, jnp.int32)
    )
    after, want = step(state, make_batch()), make_step()(state, make_batch())
    chex.assert_trees_all_close(after.table, want.table, rtol=1e-6, atol=1e-7)


def test_microbatches_give_the_update_of_the_whole_batch():
    state, batch = make_state(), make_batch()
    batch.weights[50:] = 0  # so that the parts weigh differently
    whole, parts = (make_step(microbatches=n)(state, batch) for n in (1, 4))
    moved = ("params", "table")
    assert digest(whole.params) != digest(state.params)
    chex.assert_trees_all_close(
        {name: getattr(parts, name) for name in moved},
        {name: getattr(whole, name) for name in moved},
        rtol=1e-5,
        atol=1e-6,
    )


def test_microbatches_count_every_example_once():
    state, batch = make_state(), make_batch()
    whole, parts = (make_step(microbatches=n)(state, batch) for n in (1, 4))
    a, b = metrics.compute(whole.metrics), metrics.compute(parts.metrics)
    assert a["count"] == b["count"] == 64
    assert b["logloss"] == pytest.approx(a["logloss"], rel=1e-5)


def test_microbatches_merge_fp8_state_by_the_maximum():
    state, batch = make_state(FP8), make_batch()
    whole, parts = (make_step(FP8, microbatches=n)(state, batch) for n in (1, 4))
    for path, site in named_sites(parts).items():
        want = np.asarray(named_sites(whole)[path].table)
        got = np.asarray(site.table)
        assert got[1, 1] == want[1, 1], path  # the weight is that of every part
        # A sum over the parts would be 4 times as large, a mean far smaller.
        np.testing.assert_allclose(got[:, 1], want[:, 1], rtol=0.2, err_msg=path)


def test_padding_rows_do_not_matter():
    batch, other = make_batch(), make_batch()
    other.dense[48:], other.labels[48:] = 7.0, 1.0
    other.ids[48:] = 0
    for x in (batch, other):
        x.weights[48:] = 0
    step = make_step()
    a, b = step(make_state(), batch), step(make_state(), other)
    chex.assert_trees_all_close(a.params, b.params, rtol=1e-6, atol=1e-7)
    assert digest(without(a, "params")) == digest(without(b, "params"))


def test_weights_count_like_repeated_examples():
    batch, repeated = make_batch(), make_batch()
    batch.weights[:] = np.where(np.arange(64) < 16, 0.75, 0)
    for column in repeated[:3]:
        column[16:] = np.tile(column[:16], (3, *[1] * (column.ndim - 1)))
    weighted = dataclasses.replace(make_state(), metrics=metrics.init(weighted=True))
    a, b = make_step()(weighted, batch), make_step()(make_state(), repeated)
    chex.assert_trees_all_close(a.params, b.params, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(a.table, b.table, rtol=1e-5, atol=1e-6)
    mine, theirs = metrics.compute(a.metrics), metrics.compute(b.metrics)
    assert mine["ne"] == pytest.approx(theirs["ne"], rel=1e-6)
    assert digest(a.table) != digest(make_state().table)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_the_scale_of_all_weights_does_not_matter(microbatches):
    state = dataclasses.replace(make_state(), metrics=metrics.init(weighted=True))
    batch = make_batch()
    batch.weights[:] = np.arange(64)
    tiny = batch._replace(weights=batch.weights * np.float32(2.0**-20))
    step = make_step(microbatches=microbatches)
    a, b = step(state, batch), step(state, tiny)
    chex.assert_trees_all_close(a.params, b.params, rtol=1e-6, atol=1e-7)
    assert digest(a.params) != digest(state.params)


def test_ids_out_of_range_are_counted_and_touch_no_row():
    state, batch = make_state(), make_batch()
    batch.ids[:, :] = 1
    batch.ids[0] = (-1, 10, 2**31 - 1)
    after = make_step()(state, batch)
    named = [1, 21, 31]  # row 1 of each table
    changed = np.any(np.asarray(after.table != state.table), axis=1)
    assert np.flatnonzero(changed).tolist() == named
    assert (int(after.bad_ids), int(after.skipped)) == (3, 0)


def test_l2_pulls_rows_that_no_id_names():
    state, batch = make_state(), make_batch()
    batch.ids[:, :] = 1
    after = make_step(l2=0.5)(state, batch)
    want = np.asarray(state.table[2]) * (1 - 0.1 * 0.5)
    np.testing.assert_allclose(after.table[2], want, rtol=1e-6)


def test_a_skipped_step_applies_no_l2():
    state, batch = make_state(), make_batch()
    batch.dense[0, 0] = np.nan
    after = make_step(l2=0.5)(state, batch)
    assert digest(without(after, *COUNTERS)) == digest(without(state, *COUNTERS))


def test_lr_scale_scales_both_updates():
    state = make_state()
    full = make_step()(state, make_batch())
    half = dataclasses.replace(state, lr_scale=jnp.asarray(0.5))
    half = make_step()(half, make_batch())

    def steps(after):
        pairs = ((after.params, state.params), (after.table, state.table))
        return [jax.tree.map(jnp.subtract, *pair) for pair in pairs]

    want = jax.tree.map(lambda x: 0.5 * x, steps(full))
    # What was updated is below 4 and was rounded to a multiple of 2^-22.
    chex.assert_trees_all_close(steps(half), want, rtol=1e-3, atol=2.0**-22)


@pytest.mark.slow
def test_dropout_depends_on_seed_and_step_and_nothing_else():
    model = F32.clone(dropout_rate=0.5)
    state, batch = make_state(model), make_batch()
    step = make_step(model)
    later = dataclasses.replace(state, step=jnp.asarray(1, jnp.int32))
    found = [
        step(state, batch),
        step(state, batch),
        step(later, batch),
        make_step(model, dropout_seed=1)(state, batch),
    ]
    digests = [digest(x.params) for x in found]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_evaluation_uses_no_dropout_and_changes_no_state():
    model = F32.clone(dropout_rate=0.5)
    state, batch = make_state(model), make_batch()
    before = digest(state)
    dropped, _ = jax.jit(make_eval_step(model, TABLES))(state, metrics.init(), batch)
    plain, _ = jax.jit(make_eval_step(F32, TABLES))(state, metrics.init(), batch)
    assert digest(dropped) == digest(plain)
    assert digest(state) == before
