"""Generated click logs: a pure stream with a known best normalized entropy."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.data import DataConfig, Part, Position, generated, open_data, planted
from loka_jax.data.planted import expected_distinct

TINY = DataConfig(
    rows=(50, 40, 30, 20), examples=1000, eval_examples=500, signal=1.1, click_rate=0.3
)
BLOCK = 1 << 14  # rows of the batches by which the report is made
START = Position(0, 0, 0)
zipf_ids = jax.jit(planted.zipf_ids, static_argnums=1)


@pytest.fixture(scope="module")
def splits():
    return open_data(TINY, seed=3)


@pytest.fixture(scope="module")
def world(splits):
    return splits.train._world


def rows_of(data, batch_size=BLOCK, epoch=0, seed=7):
    """Returns the rows of an epoch."""
    places = [Position(epoch, s, seed) for s in range(data.num_batches(batch_size))]
    batches = [data.batch(place, batch_size, shuffle=True) for place in places]
    return jax.tree.map(lambda *x: np.concatenate(x)[: data.num_examples], *batches)


def dataset(world, split="train", num_examples=1000, seed=0):
    options = {"num_examples": num_examples, "seed": seed}
    return generated.GeneratedDataset(TINY, world, split, **options)


def assert_equal_rows(one, other):
    chex.assert_trees_all_equal(one[1:], other[1:])
    # Standardizing subtracts: what is rounding of the logarithm is absolute here.
    chex.assert_trees_all_close(one.dense, other.dense, rtol=1e-6, atol=2e-6)


def entropy(p):
    return -p * np.log(p) - (1 - p) * np.log1p(-p)


def probabilities(data):
    """Returns the true probability and the label of every example, in float64."""
    batch, logit = data.batch_and_logit(START, BLOCK)
    logit = np.asarray(logit, np.float64)[: data.num_examples]
    labels = np.asarray(batch.labels, np.float64)[: data.num_examples]
    return 1 / (1 + np.exp(-logit)), labels


def test_rows_depend_on_split_seed_epoch_and_place_alone(world):
    train = rows_of(dataset(world))
    assert_equal_rows(train, rows_of(dataset(world, seed=1), batch_size=64))
    assert np.all(train.weights == 1) and train.ids.dtype == np.int32
    valid = rows_of(dataset(world, "valid"))
    chex.assert_trees_all_equal(valid, rows_of(dataset(world, "valid"), BLOCK, 4, 9))
    others = [dataset(world, name) for name in ("test", "measure")]
    others.append(dataset(world, "valid", seed=1))
    rows = [train, valid, *map(rows_of, others)]
    rows += [rows_of(dataset(world), BLOCK, *place) for place in ((1, 7), (0, 8))]
    dense = np.concatenate([x.dense for x in rows])
    assert len(np.unique(dense, axis=0)) == len(dense) == 7000


@pytest.mark.parametrize("split", ["train", "valid"])
def test_parts_are_together_the_whole_batch(splits, split):
    data = getattr(splits, split)
    last = data.num_batches(128) - 1
    place = Position(1, last, 7)
    whole = jax.device_get(data.batch(place, 128, shuffle=True))
    parts = [data.batch(place, 128, shuffle=True, part=Part(i, 2)) for i in (0, 1)]
    assert_equal_rows(jax.tree.map(lambda *x: np.concatenate(x), *parts), whole)
    rest = data.num_examples - 128 * last
    assert whole.weights.tolist() == [1.0] * rest + [0.0] * (128 - rest)
    with pytest.raises(ValueError, match=r"must lie in \[0, "):
        data.batch(Position(0, last + 1, 0), 128, shuffle=True)


def test_dense_columns_are_standardized_logarithms_of_counts():
    z = np.random.default_rng(0).standard_normal((9, 13))
    column = np.arange(13) / 12
    center, spread = 0.5 + 4 * column, 0.8 + 0.6 * column
    count = np.exp(center + spread * z)
    found = jax.jit(generated._dense)(jnp.asarray(z, jnp.float32))
    want = (np.log1p(count) - center) / spread
    # The logarithm is 12 at most, and its rounding is divided by 0.8 or more.
    np.testing.assert_allclose(found, want, atol=12 / 0.8 * 2**-21)


def test_the_logit_has_waves_effects_of_ids_and_pairs_of_fields(monkeypatch):
    monkeypatch.setattr(planted, "_MOST_PLANTED", 12)
    monkeypatch.setattr(planted, "_REPEATED", 5)
    rows, planted_rows = tuple(range(3, 15)), [*range(3, 13), 5, 5]
    config = dataclasses.replace(TINY, rows=rows)
    draw = np.random.default_rng(0)
    waves, z = draw.normal(size=(4, 13)), draw.normal(size=(7, 13))
    effects = [draw.normal(size=count) for count in planted_rows]
    latents = [draw.normal(size=(count, 3)) for count in planted_rows[5:]]
    ids = np.stack([draw.integers(1, count, 7) for count in rows], axis=1)
    weights, bias = np.array([1.0, 2.0, -3.0]), 0.5
    world = planted.World(
        *map(np.float32, (waves, np.concatenate(effects), np.concatenate(latents))),
        *map(np.float32, (weights, bias)),
    )
    logit = jax.jit(planted.true_logit, static_argnums=0)
    found = logit(config, world, np.float32(z), np.int32(ids))

    amplitude, frequency, phase, slope = waves
    dense = (amplitude * np.sin(frequency * z + phase) + slope * z).sum(1)
    dense += np.tanh(z[:, 0]) * np.tanh(z[:, 1])
    own = [ids[:, f] % count for f, count in enumerate(planted_rows)]
    effect = sum(values[at] for values, at in zip(effects, own, strict=True))
    vectors = [values[at] for values, at in zip(latents, own[5:], strict=True)]
    ring = zip(vectors, [*vectors[1:], vectors[0]], strict=True)
    pairs = sum((one * other).sum(1) for one, other in ring)
    want = np.stack([dense, effect, pairs], axis=1) @ weights + bias
    # Some 80 terms of at most 10 are summed.
    np.testing.assert_allclose(found, want, atol=80 * 10 * 2**-23)


def test_signal_click_rate_and_shares_are_those_of_the_options(world):
    key = jax.random.key(1)
    parts = jax.jit(
        lambda world, index: planted._parts(
            TINY, world, *planted.draw(TINY, key, index)[:2]
        )
    )(world, jnp.arange(BLOCK, dtype=jnp.uint32))
    weighted = np.asarray(parts, np.float64) * np.asarray(world.weights)
    logit = weighted.sum(1) + float(world.bias)
    # The parts were scaled by other examples: 4 deviations of a deviation, 3 %.
    np.testing.assert_allclose(logit.std(), TINY.signal, rtol=0.04)
    shares = weighted.var(axis=0) / weighted.var(axis=0).sum()
    np.testing.assert_allclose(shares, (0.4, 0.4, 0.2), rtol=0.08)
    p = 1 / (1 + np.exp(-logit))
    assert abs(p.mean() - TINY.click_rate) < 5 * p.std() / np.sqrt(BLOCK)


def test_the_best_possible_ne_is_the_mean_entropy_over_that_of_the_mean(world):
    found, error = generated.best_possible_ne(TINY, world, BLOCK)
    p, _ = probabilities(dataset(world, "measure", BLOCK, seed=0))
    np.testing.assert_allclose(found, entropy(p).mean() / entropy(p.mean()), rtol=1e-9)
    # The jackknife of 256 blocks knows the standard error to 4 %.
    left_out = [np.delete(p.reshape(256, -1), i, axis=0) for i in range(256)]
    values = [entropy(x).mean() / entropy(x.mean()) for x in left_out]
    np.testing.assert_allclose(error, np.std(values) * np.sqrt(255), rtol=0.2)
    no_signal = world._replace(weights=jnp.zeros(3))
    best, _ = generated.best_possible_ne(TINY, no_signal, BLOCK)
    assert best == pytest.approx(1.0, abs=1e-6)


def test_ids_follow_the_power_law():
    uniform = (np.arange(200_000, dtype=np.float32)[:, None] + 0.5) / 200_000
    ids = np.asarray(zipf_ids(uniform, (40,)))[:, 0]
    edges = np.arange(1, 41, dtype=np.float64)
    cdf = 1 - edges ** (1 - planted.ZIPF)
    got = np.bincount(ids, minlength=40) / len(ids)
    np.testing.assert_allclose(got, [0, *np.diff(cdf / cdf[-1])], atol=2e-5)


def test_ids_of_large_tables_stay_inside_them_and_reach_their_ends():
    uniform = np.float32([[2.0**-24] * 3, [0.5] * 3, [1 - 2.0**-24] * 3])
    rows = np.array((2, 100_000_000, 2**31 - 1))
    ids = np.int64(zipf_ids(uniform, tuple(rows.tolist())))
    assert ids[0].tolist() == [1, 1, 1]
    assert (ids < rows).all() and (ids[2] >= 0.9999 * (rows - 1)).all()
    assert ids[1, 2] == pytest.approx(((1 + 2**-3.1) / 2) ** -10, rel=0.01)


def test_the_report_tells_what_the_true_model_scores_on_the_labels(splits):
    sizes = [split.num_examples for split in (splits.train, splits.valid, splits.test)]
    assert sizes == [1000, 500, 500]
    for name in ("valid", "test"):
        # Held-out examples are those of the seed.
        again = dataset(splits.train._world, name, 500, seed=3)
        p, labels = probabilities(again)
        assert np.array_equal(labels, rows_of(getattr(splits, name)).labels)
        for weight in (1.0, p - p.mean()):
            error = np.sqrt((weight**2 * p * (1 - p)).sum())
            assert abs((weight * (labels - p)).sum()) < 4 * error
        loss = -np.log(np.where(labels == 1, p, 1 - p)).mean()
        scored = loss / entropy(labels.mean())
        assert splits.report["true_model_ne"][name] == pytest.approx(scored, rel=1e-9)
    assert 0.5 < splits.report["best_possible_ne"] < 0.95
    assert np.isnan(generated.true_model_ne(dataset(splits.train._world, "test", 1)))


@pytest.mark.parametrize("rows, zipf", [(3, 1.1), (20_000, 1.05)])
def test_distinct_ids_are_a_sum_over_ids(rows, zipf):
    draws, q = 4096, 1 - zipf
    cdf = (np.arange(1.0, rows + 1) ** q - 1) / (rows**q - 1)
    exact = np.sum(1 - (1 - np.diff(cdf)) ** draws)
    # Ranges of ids beyond 4,096 take the mean of odds that differ by a thousandth.
    assert expected_distinct(rows, draws, zipf) == pytest.approx(exact, rel=1e-5)
    assert expected_distinct(10, 100, None) == expected_distinct(100, 10, None) == 10
