"""One training step: what it reads, what it replaces, what it leaves alone."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

from loka_jax import nn
from loka_jax.optim import Adam, OptimConfig, Sgd, make_dense_optimizer
from loka_jax.scaling import DelayedScaling
from loka_jax.train import metrics
from loka_jax.train.gradients import Gradients, accumulate
from loka_jax.train.placement import Placement
from loka_jax.train.step import (
    TrainStep,
    make_eval_step,
    make_train_step,
    named_sites,
    scales_initialized,
)
from loka_jax.train.tables.update import RowUpdate, update_table
from loka_jax.train.tasks import Objective
from tests.support import linear
from tests.support.linear import FIRST_ROWS, SIZE, TABLES, Linear, expected, make_batch
from tests.support.loop import start_state
from tests.support.own_models import Block
from tests.support.train import digest

COUNTERS = ("step", "skipped", "skipped_in_a_row")
CLIPPED = make_dense_optimizer(OptimConfig(dense="sgd", lr=0.1, clip_norm=0.5), 9)


def counted(state):
    return [int(getattr(state, name)) for name in COUNTERS]


def weighted(batch, seed=3):
    """Returns the batch with unequal weights, of which the last eight are 0."""
    weights = np.random.default_rng(seed).uniform(0.5, 3, SIZE).astype(np.float32)
    weights[-8:] = 0
    return batch._replace(weights=weights)


@functools.cache
def make_step(**options):
    """Returns the step of the linear model; rates of rows grow with steps taken."""
    rows = RowUpdate(Adam(), lambda step: 0.1 * (1 + step.astype(jnp.float32)), 0.0)
    return linear.step_of(Linear(), CLIPPED, rows, **options)


@pytest.fixture(scope="module")
def start():
    return linear.make_state(Linear(), CLIPPED, Adam(), weighted=True)


@pytest.fixture(scope="module")
def trained(start):
    """A state after two steps, whose rows have moments."""
    state = make_step()(start, weighted(make_batch(1)))
    return make_step()(state, weighted(make_batch(2)))


def assert_only_counters_differ(after, before):
    kept = [
        {k: v for k, v in vars(x).items() if k not in COUNTERS} for x in (after, before)
    ]
    assert digest(kept[0]) == digest(kept[1])


@pytest.mark.parametrize(
    "size, weight, microbatches, lr_scale",
    [(0.3, 1.0, 1, 1.0), (10.0, 1.0, 4, 0.5), (0.3, 2e-6, 4, 1.0)],
)
def test_a_step_follows_its_equations(start, size, weight, microbatches, lr_scale):
    """Gradients are shrunk to the clip norm of 0.5, and only those above it."""
    batch = weighted(make_batch())
    dense, weights = batch.dense * np.float32(size), batch.weights * np.float32(weight)
    batch = batch._replace(dense=dense, weights=weights)
    scaled = dataclasses.replace(start, lr_scale=jnp.asarray(lr_scale))
    after = make_step(microbatches=microbatches)(scaled, batch)
    logits, gradients, of_rows = expected(start, batch)
    norm = float(optax.tree.norm(gradients))
    assert (norm > 0.5) == (size > 1) and norm > 0.05
    rate = 0.1 * lr_scale * min(1, 0.5 / norm)
    want = jax.tree.map(lambda p, g: p - rate * g, start.params, gradients)
    # Some 30 terms below 10, each right to 1e-7 of itself.
    chex.assert_trees_all_close(after.params, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(after.grad_norm, norm, rtol=1e-5)
    # Adam's first step is one rate against the gradient's sign.
    step = 0.1 * lr_scale * of_rows / (np.abs(of_rows) + 1e-8)
    touched = np.abs(of_rows) > 1e-6
    np.testing.assert_allclose(after.row_state.m, 0.1 * of_rows, rtol=1e-4, atol=1e-7)
    moved = np.asarray(after.table - start.table)
    np.testing.assert_allclose(moved[touched], -step[touched], rtol=1e-3)
    loss = np.logaddexp(0, np.where(batch.labels == 1, -1, 1) * logits[:, 0])
    seen, want = metrics.compute(after.metrics), np.average(loss, weights=batch.weights)
    assert (seen["logloss"], seen["count"]) == (pytest.approx(want, rel=1e-5), SIZE - 8)
    assert (counted(after), int(after.bad_ids)) == ([1, 0, 0], 0)


def test_padding_rows_do_not_matter_and_move_no_row(trained):
    batch, other = weighted(make_batch()), weighted(make_batch())
    other.dense[-8:], other.labels[-8:] = 7.0, 1 - other.labels[-8:]
    for x, id_of_padding in ((batch, 0), (other, 1)):
        x.ids[:-8] = np.maximum(x.ids[:-8], 2)
        x.ids[-8:] = id_of_padding
    a, b = make_step()(trained, batch), make_step()(trained, other)
    assert digest(a) == digest(b) != digest(trained)
    rows = np.concatenate([FIRST_ROWS, FIRST_ROWS + 1])
    assert np.any(np.asarray(trained.row_state.m)[rows])  # lazy Adam would move them
    for x, y in zip(
        *map(jax.tree.leaves, (a.row_state, trained.row_state)), strict=True
    ):
        np.testing.assert_array_equal(x[rows], y[rows])
    np.testing.assert_array_equal(a.table[rows], trained.table[rows])


@pytest.mark.parametrize("what", ["dense", "params", "table"])
def test_a_step_that_is_not_finite_changes_nothing_but_counters(trained, what):
    batch, poisoned = weighted(make_batch(5)), trained
    batch.ids[0, 0] = 0
    if what == "dense":
        batch.dense[3, 2] = -np.inf
    else:
        leaves, tree = jax.tree.flatten(getattr(trained, what))
        leaves[0] = leaves[0].at[0].set(np.nan)
        harmed = {what: jax.tree.unflatten(tree, leaves)}
        poisoned = dataclasses.replace(trained, **harmed)
    after = make_step()(poisoned, batch)
    assert_only_counters_differ(after, poisoned)
    assert counted(after) == [3, 1, 1]
    assert counted(make_step()(after, batch)) == [4, 2, 2]


def test_a_good_step_ends_the_row_of_skipped_ones(start):
    counts = (jnp.int32(7), jnp.int32(4), jnp.int32(3))
    state = dataclasses.replace(start, **dict(zip(COUNTERS, counts, strict=True)))
    after = make_step()(state, weighted(make_batch()))
    assert counted(after) == [8, 4, 0]
    # The rows' rate is that of the third step that was taken, 0.4, not of the eighth.
    once = make_step()(start, weighted(make_batch()))
    moved = [np.asarray(x.table - start.table) for x in (after, once)]
    np.testing.assert_allclose(moved[0], 4 * moved[1], rtol=1e-4, atol=2.0**-21)


def test_ids_out_of_range_are_counted_and_touch_no_row(start):
    batch = make_batch()
    batch.ids[:, :] = 1
    batch.ids[0] = (-1, 10, 2**31 - 1)
    after = make_step()(dataclasses.replace(start, bad_ids=jnp.int32(4)), batch)
    changed = np.any(np.asarray(after.table != start.table), axis=1)
    assert np.flatnonzero(changed).tolist() == (FIRST_ROWS + 1).tolist()
    assert (int(after.bad_ids), int(after.skipped)) == (4 + 3, 0)


def test_l2_pulls_all_rows_unless_the_step_is_skipped():
    table = np.arange(1, 13, dtype=np.float32).reshape(6, 2)
    touched = jnp.int32([[4], [1]]), jnp.ones((2, 1, 2))
    how = RowUpdate(Sgd(), lambda step: 0.1, 0.5)

    @jax.jit
    def update(enabled):
        return update_table(jnp.asarray(table), (), touched, how, 0.1, enabled)[0]

    named = np.isin(np.arange(6), (1, 4))[:, None]
    want = table - 0.1 * (0.5 * table + named)
    np.testing.assert_allclose(update(jnp.array(True)), want, rtol=1e-6)
    chex.assert_trees_all_equal(update(jnp.array(False)), table)


def test_microbatches_are_accumulated_in_order():
    """Gradients are summed, FP8 states merged by maxima, rows and logits joined."""

    def gradients(state, batch, rows, key, total_weight):
        part = jnp.sum(batch.weights)
        fp8 = {"site": DelayedScaling(jnp.stack([part, -part, 1 / part])[:, None])}
        stats = {"mean": state.batch_stats["mean"] * 10 + part}
        logits = batch.dense[:, 0] + 100 * jax.random.uniform(key)
        grads = Gradients(params=part * jnp.ones(2), rows=rows * 2, fp8=fp8)
        return part / total_weight, logits, stats, grads

    state = dataclasses.replace(
        linear.make_state(Linear(), linear.sgd(), Sgd()),
        params=jnp.ones(2),
        fp8={"site": DelayedScaling(jnp.zeros((3, 1)))},
        batch_stats={"mean": jnp.float32(1)},
    )
    batch = make_batch()
    batch.weights[:] = np.repeat([1.0, 0.25, 0.5, 0.125], SIZE // 4)  # 8 examples each
    rows = jnp.arange(SIZE * 6.0).reshape(SIZE, 3, 2)
    run = jax.jit(functools.partial(accumulate, gradients, 4))
    loss, logits, stats, grads = run(state, batch, rows, jax.random.key(0))
    np.testing.assert_allclose(loss, 1, rtol=1e-6)  # each part over the weight of all
    of_key = np.round(np.reshape(logits - batch.dense[:, 0], (4, -1)), 3)
    assert len(np.unique(of_key)) == len(np.unique(of_key[:, 0])) == 4  # a key a part
    np.testing.assert_array_equal(grads.rows, rows * 2)
    np.testing.assert_array_equal(grads.params, [15, 15])
    assert float(stats["mean"]) == 10_000 + 8000 + 200 + 40 + 1
    # Zeros, with which the maximum begins, are neutral: amaxes are none below.
    np.testing.assert_array_equal(grads.fp8["site"].table[:, 0], [8, 0, 1])


class WithBlock(linen.Module):
    """A block, the sum of whose outputs is the logit."""

    @linen.compact
    def __call__(self, dense, embeddings, *, train=False):
        x = jnp.concatenate([dense, embeddings.reshape(len(dense), -1)], axis=1)
        return jnp.sum(Block(name="block")(3 * x), axis=1) / 30


@pytest.mark.parametrize("microbatches", [1, 4])
def test_tweo_adds_the_mean_fourth_power_of_blocks_to_the_loss(microbatches):
    state, batch = linear.make_state(WithBlock(), linear.sgd(), Sgd()), make_batch()
    options = dict(objective=Objective(tweo=0.5), microbatches=microbatches)
    step = linear.step_of(WithBlock(), linear.sgd(), RowUpdate(*OF_ROWS), **options)

    def loss(params, rows):
        x = jnp.concatenate([batch.dense, rows.reshape(SIZE, -1)], axis=1)
        y = Block().apply({"params": params["block"]}, 3 * x)
        losses = jnp.logaddexp(0, (1 - 2 * batch.labels) * jnp.sum(y, axis=1) / 30)
        return jnp.mean(losses) + 0.5 * jnp.mean((y / 3) ** 4)

    rows = state.table[batch.ids + FIRST_ROWS]
    grads, of_rows = jax.jit(jax.grad(loss, (0, 1)))(state.params, rows)
    want = jax.tree.map(lambda p, g: p - 0.1 * g, state.params, grads)
    after = step(state, batch)
    chex.assert_trees_all_close(after.params, want, rtol=1e-5, atol=1e-6)
    table = state.table.at[batch.ids + FIRST_ROWS].add(-0.1 * of_rows)
    np.testing.assert_allclose(after.table, table, rtol=1e-5, atol=1e-6)


class Stateful(linen.Module):
    """A dense layer with delayed scales, dropout, and a running mean of the inputs."""

    recipe: str = "fp8_tensorwise_delayed"
    compute_dtype = jnp.bfloat16

    @linen.compact
    def __call__(self, dense, embeddings, *, train=False):
        inputs = embeddings.reshape(len(dense), -1)
        inputs = jnp.concatenate([inputs, dense[:, :4].astype(inputs.dtype)], axis=1)
        mean = self.variable("batch_stats", "mean", jnp.zeros, ())
        if train and not self.is_initializing():
            mean.value = 0.5 * mean.value + 0.5 * jnp.mean(dense[:, 3:])
        hidden = nn.Dense(16, recipe=self.recipe, name="layer")(inputs)
        hidden = linen.Dropout(0.5, deterministic=not train)(hidden)
        return jnp.sum(hidden.astype(jnp.float32), axis=1) + 100 * mean.value


ONE = Placement(TABLES)
OF_ROWS = Sgd(), optax.constant_schedule(0.1), 0.0


@pytest.fixture(scope="module")
def stateful():
    """The step of that model, its start, and two states after it."""
    momentum = optax.sgd(0.1, momentum=0.9)
    step = linear.step_of(Stateful(), momentum, RowUpdate(*OF_ROWS))
    start = linear.make_state(Stateful(), momentum, Sgd())
    first = step(start, make_batch())
    return step, start, first, step(first, make_batch(1))


def test_scales_histories_and_statistics_move_in_every_step(stateful):
    _, start, first, warm = stateful
    assert not scales_initialized(start) and scales_initialized(warm)
    assert scales_initialized(dataclasses.replace(start, fp8={}))
    before, after = (named_sites(state)["layer"] for state in (first, warm))
    assert np.all(np.asarray(after.scale_inv) > 0)
    assert np.all(np.asarray(after.history[:, :2]) > 0)
    assert np.array_equal(after.history[:, 1], before.history[:, 0])
    one, two = (make_batch(seed).dense[:, 3:].mean() for seed in (0, 1))
    want = 0.25 * one + 0.5 * two
    np.testing.assert_allclose(warm.batch_stats["mean"], want, rtol=1e-4, atol=1e-6)


def test_a_skipped_step_leaves_scales_statistics_and_moments(stateful):
    step, *_, warm = stateful
    batch = make_batch(2)
    batch.dense[3, 1] = np.inf  # saturates in a cast
    after = step(warm, batch)
    assert_only_counters_differ(after, warm)
    assert counted(after) == [3, 1, 1]


def test_dropout_depends_on_the_step_and_its_seed(stateful):
    step, *_, warm = stateful
    later = dataclasses.replace(warm, step=warm.step + 1)
    digests = [digest(step(x, make_batch()).params) for x in (warm, warm, later)]
    assert digests[0] == digests[1] != digests[2]

    def program(seed):
        parts = Stateful(), ONE, optax.sgd(0.1, momentum=0.9), RowUpdate(*OF_ROWS)
        made = make_train_step(*parts, dropout_seed=seed)
        return str(jax.make_jaxpr(made)(warm, make_batch()))

    assert program(0) == program(0) != program(1)


def test_evaluation_uses_statistics_and_no_dropout(stateful):
    *_, warm = stateful
    batch, step = make_batch(4), jax.jit(make_eval_step(Stateful(), ONE))
    seen, logits = step(warm, metrics.init(), batch)
    rows = np.asarray(warm.table)[batch.ids + FIRST_ROWS].reshape(SIZE, -1)
    inputs = np.append(rows, batch.dense[:, :4], axis=1)
    layer = jax.device_get(warm.params["layer"])
    mean = float(warm.batch_stats["mean"])
    want = np.sum(inputs @ layer["kernel"] + layer["bias"], axis=1) + 100 * mean
    # 16 sums of 16 products in FP8, each off by 2^-4 of it at most.
    bound = 2**-3 * np.sum(np.abs(inputs) @ np.abs(layer["kernel"]), axis=1)
    assert np.all(np.abs(logits - want) < bound + 0.05) and np.all(bound < 5)
    assert metrics.compute(seen)["count"] == SIZE and abs(100 * mean) > 0.5


def test_a_step_leaves_what_probe_has_learned():
    def step(state):
        assert state.probe == {}
        return dataclasses.replace(state, step=state.step + 1)

    state = dataclasses.replace(start_state(), probe={"site": jnp.ones(2)})
    after = TrainStep(jax.jit(step))(state)
    assert after.step == 1 and after.probe is state.probe
