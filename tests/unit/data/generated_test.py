"""Generated click logs: a pure stream with a known best normalized entropy."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from loka_jax.data import DataConfig, Position, generated, open_data, planted

TINY = DataConfig(rows=(50, 40, 30, 20), examples=1000, eval_examples=500)


@pytest.fixture(scope="module")
def world():
    return planted.make_world(TINY)


def dataset(world, split="train", num_examples=1000, seed=0):
    return generated.GeneratedDataset(
        TINY, world, split, num_examples=num_examples, seed=seed
    )


def all_rows(data, batch_size):
    steps = range(data.num_batches(batch_size))
    batches = [data.batch(Position(0, s, 7), batch_size, shuffle=True) for s in steps]
    return jax.tree.map(lambda *x: np.concatenate(x)[: data.num_examples], *batches)


def test_batch_is_a_pure_function_of_its_position(world):
    first = dataset(world).batch(Position(2, 3, 5), 64, shuffle=True)
    again = dataset(world).batch(Position(2, 3, 5), 64, shuffle=True)
    chex.assert_trees_all_equal(first, again)


@pytest.mark.parametrize("other", [Position(1, 0, 0), Position(0, 1, 0), (0, 0, 1)])
def test_epoch_step_and_seed_all_change_the_batch(world, other):
    data = dataset(world)
    a = data.batch(Position(0, 0, 0), 64, shuffle=True)
    b = data.batch(Position(*other), 64, shuffle=True)
    assert not np.array_equal(a.dense, b.dense)
    assert not np.array_equal(a.ids, b.ids)


def test_examples_do_not_depend_on_the_batch_size(world):
    data = dataset(world)
    whole, pieces = all_rows(data, 1000), all_rows(data, 96)
    chex.assert_trees_all_equal(whole[1:], pieces[1:])
    # Standardizing subtracts: what is rounding of the logarithm is absolute here.
    chex.assert_trees_all_close(whole.dense, pieces.dense, rtol=1e-6, atol=2e-6)


def test_splits_share_no_example(world):
    rows = [all_rows(dataset(world, s), 1000).dense for s in ("train", "valid", "test")]
    unique = np.unique(np.concatenate(rows), axis=0)
    assert len(unique) == 3000


def test_held_out_split_ignores_epoch_and_seed_of_the_position(world):
    valid = dataset(world, "valid")
    a = valid.batch(Position(0, 0, 0), 64, shuffle=False)
    b = valid.batch(Position(4, 0, 9), 64, shuffle=False)
    chex.assert_trees_all_equal(a, b)


def test_held_out_split_depends_on_its_seed(world):
    a = dataset(world, "valid", seed=0).batch(Position(0, 0, 0), 64, shuffle=False)
    b = dataset(world, "valid", seed=1).batch(Position(0, 0, 0), 64, shuffle=False)
    assert not np.array_equal(a.dense, b.dense)


def test_padding_rows_of_the_last_batch_weigh_nothing(world):
    batch = dataset(world, num_examples=70).batch(Position(0, 1, 0), 64, shuffle=True)
    assert np.asarray(batch.weights).tolist() == [1.0] * 6 + [0.0] * 58


def test_position_past_the_end_is_refused(world):
    with pytest.raises(ValueError, match=r"must lie in \[0, 16\)"):
        dataset(world).batch(Position(0, 16, 0), 64, shuffle=True)


def test_dtypes_are_those_of_the_contract(world):
    batch = dataset(world).batch(Position(0, 0, 0), 8, shuffle=True)
    assert [x.dtype.name for x in batch[:4]] == [
        "float32",
        "int32",
        "float32",
        "float32",
    ]


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.1, 2.0])
def test_ids_follow_the_power_law(exponent):
    rows = (40,)
    uniform = (np.arange(200_000, dtype=np.float32)[:, None] + 0.5) / 200_000
    ids = np.asarray(planted.zipf_ids(jnp.asarray(uniform), rows, exponent))[:, 0]
    edges = np.arange(1, 41, dtype=np.float64)
    q = 1 - exponent
    cdf = np.log(edges) if q == 0 else (edges**q - 1) / q
    want = np.diff(cdf / cdf[-1])
    got = np.bincount(ids, minlength=40) / len(ids)
    assert got[0] == 0.0
    np.testing.assert_allclose(got[1:], want, atol=2e-5)


def test_ids_stay_inside_their_tables_at_the_ends_of_the_range():
    ends = jnp.array([[2.0**-24], [1 - 2.0**-24]], jnp.float32)
    for rows in (2, 1000, 100_000_000):
        ids = np.asarray(planted.zipf_ids(ends, (rows,), 1.1))
        assert ids.min() >= 1 and ids.max() < rows


def test_tables_beyond_int32_in_all_have_ids_of_their_own_and_repeated_effects(
    monkeypatch,
):
    monkeypatch.setattr(planted, "_MOST_PLANTED", 2**10)
    monkeypatch.setattr(planted, "_REPEATED", 2**8)
    largest = 2**31 - 1
    rows = (largest, 1_100_000_000, 1000, largest)
    config = dataclasses.replace(TINY, rows=rows, zipf=0.0)
    world = planted.make_world(config)
    assert len(world.effects) == 3 * 2**8 + 1000
    data = generated.GeneratedDataset(config, world, "train", num_examples=500, seed=0)
    batch = data.batch(Position(0, 0, 7), 500, shuffle=True)
    ids = np.asarray(batch.ids, np.int64)
    # Uniform: 500 draws come as far as the last hundredth, but for 0.7 % of all cases.
    assert np.all(ids > 0) and np.all(ids < np.array(rows)[None, :])
    assert np.all(ids.max(axis=0) > 0.99 * np.array(rows))
    counts = planted._planted(rows)
    firsts = np.cumsum((0, *counts[:-1]))
    places = planted._effect_rows(jnp.asarray(batch.ids), rows, counts)
    np.testing.assert_array_equal(places, ids % np.array(counts) + firsts)


def test_ids_of_the_largest_table_stay_in_int32():
    uniform = jnp.asarray([[0.0], [0.5], [1.0]])
    found = np.asarray(planted.zipf_ids(uniform, (2**31 - 1,), 1.0))[:, 0]
    assert found[0] == 1 and 0.9 * 2**15.5 < found[1] < 1.1 * 2**15.5
    assert found[2] >= 0.9999 * 2**31


def test_labels_follow_the_true_logits(world):
    data = dataset(world, num_examples=200_000)
    batch, logit = data.batch_and_logit(Position(0, 0, 0), 200_000)
    p = 1 / (1 + np.exp(-np.asarray(logit, np.float64)))
    labels = np.asarray(batch.labels)
    for low in np.arange(0, 1, 0.2):
        bin_ = (p >= low) & (p < low + 0.2)
        error = np.sqrt(p[bin_].mean() * (1 - p[bin_].mean()) / bin_.sum())
        assert abs(labels[bin_].mean() - p[bin_].mean()) < 4 * error


def test_click_rate_is_what_was_asked_for():
    config = dataclasses.replace(TINY, click_rate=0.1)
    data = generated.GeneratedDataset(
        config, planted.make_world(config), "train", num_examples=100_000, seed=0
    )
    labels = data.batch(Position(0, 0, 0), 100_000, shuffle=True).labels
    assert abs(float(labels.mean()) - 0.1) < 0.005


def test_best_possible_ne_is_what_the_true_model_scores(world):
    best, error = generated.best_possible_ne(TINY, world, 100_000)
    scored = generated.true_model_ne(dataset(world, "valid", num_examples=300_000))
    # Label noise of the split: about 0.47 / 0.56 nats / sqrt(300,000) = 0.0015.
    assert abs(best - scored) < 4 * (error + 0.0015)


@pytest.mark.slow
def test_best_possible_ne_agrees_with_its_standard_error(world):
    small, error = generated.best_possible_ne(TINY, world, 20_000)
    large, _ = generated.best_possible_ne(TINY, world, 1_000_000)
    assert 0 < abs(small - large) < 4 * error
    assert 0.0003 < error < 0.01


def test_no_signal_leaves_nothing_to_learn():
    config = dataclasses.replace(TINY, signal=0.0)
    best, _ = generated.best_possible_ne(config, planted.make_world(config), 10_000)
    assert best == pytest.approx(1.0, abs=1e-6)


@pytest.mark.slow
def test_default_looks_like_a_click_log():
    splits = open_data(DataConfig(eval_examples=65_536), seed=0)
    assert 0.75 < splits.report["best_possible_ne"] < 0.80
    assert splits.report["best_possible_ne_stderr"] < 0.001
    labels = splits.valid.batch(Position(0, 0, 0), 65_536, shuffle=False).labels
    assert 0.2 < float(labels.mean()) < 0.3


def test_tables_of_one_id_leave_the_dense_columns():
    config = dataclasses.replace(TINY, rows=(2,) * 9)
    splits = open_data(config, seed=0)
    labels = all_rows(splits.train, 100).labels
    assert 0.15 < labels.mean() < 0.35  # the rate that was asked for is 0.25
    assert 0.5 < splits.report["best_possible_ne"] < 0.95


@pytest.mark.slow
def test_one_field_alone_has_no_pairs_and_still_works():
    config = dataclasses.replace(TINY, rows=(10,))
    batch = open_data(config, seed=0).train.batch(Position(0, 0, 0), 8, shuffle=True)
    assert batch.ids.shape == (8, 1)
    chex.assert_tree_all_finite(batch)


@pytest.mark.slow
def test_devices_make_their_own_examples():
    if jax.device_count() < 8:
        pytest.skip("needs eight devices: XLA_FLAGS of .ci/run")
    auto = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("replica", "shard"), axis_types=auto)
    sharding = NamedSharding(mesh, PartitionSpec(("replica", "shard")))
    splits = open_data(TINY, seed=0)
    spread = splits.over(sharding)
    for name in ("train", "valid", "test"):
        place = Position(0, 0, 0)
        whole = getattr(splits, name).batch(place, 64, shuffle=True)
        parts = getattr(spread, name).batch(place, 64, shuffle=True)
        for part in jax.tree.leaves(parts):
            assert part.sharding.is_equivalent_to(sharding, part.ndim)
        chex.assert_trees_all_equal(whole.ids, parts.ids)
        chex.assert_trees_all_equal(whole.labels, parts.labels)
        chex.assert_trees_all_close(whole.dense, parts.dense, rtol=1e-6, atol=2e-6)
    place = np.zeros(5, np.uint32)
    program = generated._make.lower(TINY, spread.train._world, 64, place, sharding)
    text = program.compile().as_text()
    assert "all-" not in text and "collective" not in text  # each makes its own
