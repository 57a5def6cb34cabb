"""Example weights and negative downsampling, from the file to the batch."""

import numpy as np
import pytest

from loka_jax.data import DataConfig, Position, open_data
from loka_jax.data.split import hashed
from tests.support.data import open_table, real, rows_of, rows_text, write

COLUMNS = {"dense": ("row",), "categorical": ("user",), "transform": "none"}


def csv_of(weights, folder, label=lambda i: i % 2):
    rows = (f"{label(i)},{i},u{i % 3},{w}\n" for i, w in enumerate(weights))
    return write(folder / "clicks.csv", "click,row,user,w\n" + "".join(rows))


def test_weights_come_with_their_rows(tmp_path):
    path = csv_of(np.arange(100) / 8, tmp_path)
    splits = open_table(path, weight="w", **COLUMNS)
    for split in ("train", "valid"):
        batch = rows_of(splits, split)
        assert np.array_equal(batch.weights, batch.dense[:, 0] / 8)
        total = splits.report["splits"][split]["weight"]
        assert total == batch.weights.sum(dtype=np.float64)
    assert splits.train.schema.weighted
    assert "weighted by column 'w'" in splits.report["notes"][0]


def test_a_padding_row_has_no_weight(tmp_path):
    train = open_table(csv_of([3] * 100, tmp_path), weight="w", **COLUMNS).train
    last = train.num_batches(64) - 1
    weights = train.batch(Position(0, last, 0), 64, shuffle=True).weights
    rest = train.num_examples - 64 * last
    assert weights.tolist() == [3] * rest + [0] * (64 - rest)


def test_a_column_may_be_feature_and_weight(tmp_path):
    path = csv_of(range(1, 50), tmp_path)
    splits = open_table(path, weight="row", **COLUMNS)
    batch = rows_of(splits)
    assert np.array_equal(batch.weights, batch.dense[:, 0])


@pytest.mark.parametrize(
    ("weight", "what"),
    [
        ("-0.5", "has -0.5 in weight column 'w'"),
        ("nan", "has nan in weight column 'w'"),
        ("inf", "has inf in weight column 'w'"),
        ("1e13", r"has 1e\+13 in weight column 'w'"),
        ("", "has no value in weight column 'w'"),
        ("heavy", "column 'w' holds 'heavy', not a number"),
    ],
)
def test_what_is_no_weight_is_refused_with_its_row(tmp_path, weight, what):
    path = csv_of([1, 1, weight, 1], tmp_path)
    with pytest.raises(ValueError, match=f"clicks.csv row 3 {what}.*--data.weight"):
        open_table(path, weight="w", **COLUMNS)


def test_weights_that_are_all_zero_are_refused(tmp_path):
    with pytest.raises(ValueError, match="All train rows have weight 0 in column 'w'"):
        open_table(csv_of([0] * 50, tmp_path), weight="w", **COLUMNS)


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_a_stored_weight_is_checked_again(tmp_path, bad):
    train = open_table(csv_of([1] * 50, tmp_path), weight="w", **COLUMNS).train
    words = train._words[0].copy()
    words.view(np.float32)[5, -1] = bad
    train._words = [words]
    with pytest.raises(ValueError, match="holds the weight .* convert the data again"):
        train.batch(Position(0, 0, 0), train.num_examples, shuffle=False)


def test_negatives_are_kept_by_row_and_weigh_more(tmp_path):
    path = csv_of([2] * 2000, tmp_path)
    splits = open_table(path, weight="w", keep_negatives=0.25, **COLUMNS)
    batch = rows_of(splits)
    row = batch.dense[:, 0].astype(int)
    every = np.arange(2000)
    is_train = hashed(every, 0) >= 0.1
    kept = is_train & ((every % 2 == 1) | (hashed(every, 1) < 0.25))
    assert np.array_equal(row, every[kept])
    assert np.array_equal(batch.weights, np.where(row % 2, 2, 8))
    assert "the fraction 0.25 is kept" in splits.report["notes"][1]
    valid = rows_of(splits, "valid")
    assert np.array_equal(valid.dense[:, 0], every[~is_train])
    assert set(valid.weights) == {2.0}


def test_sampling_a_validation_file_leaves_it_whole(tmp_path):
    valid = write(tmp_path / "v.csv", "click,row,user,w\n" + rows_text(0) + "0,1,u,1\n")
    path = csv_of([1] * 500, tmp_path)
    splits = open_table(path, valid=valid, keep_negatives=0.1, **COLUMNS)
    assert splits.valid.num_examples == 1
    assert 250 < splits.train.num_examples < 300
    assert rows_of(splits).weights.max() == 10


def test_values_of_dropped_rows_are_not_learned(tmp_path):
    path = csv_of([1] * 500, tmp_path, label=lambda i: int(i % 3 == 0))
    splits = open_table(path, keep_negatives=1e-6, **COLUMNS)
    assert splits.train.schema.vocab_sizes == (2,)  # u0 is in the clicks only


@pytest.mark.parametrize("rate", [0.0, -1.0, 1.5, np.nan])
def test_a_share_out_of_range_is_refused(rate):
    with pytest.raises(ValueError, match="--data.keep-negatives .* must lie between"):
        DataConfig(keep_negatives=rate)


def test_options_without_effect_are_refused():
    with pytest.raises(ValueError, match="leave out --data.keep-negatives"):
        DataConfig(keep_negatives=0.5)
    with pytest.raises(ValueError, match="--data.weight names a column of a table"):
        DataConfig(kind="criteo", weight="I1")
    with pytest.raises(ValueError, match="both label and weight"):
        DataConfig(kind="table", label="y", weight="y")


def test_sampled_attribution_logs_keep_their_click_rate(tmp_path):
    config = DataConfig(
        kind="table",
        path=str(real("criteo_attribution_small")),
        label="click",
        categorical=("cat1", "cat4", "cat6", "cat8", "cat9"),
        keep_negatives=0.1,
        cache=str(tmp_path),
    )
    splits = open_data(config, seed=0)
    train = rows_of(splits)
    assert 48_000 < len(train.labels) < 50_000  # of 115,382
    assert train.labels.mean() > 0.8
    rate = np.average(train.labels, weights=train.weights)
    # One standard error of the sample is 0.7 %.
    assert abs(rate / (41_637 / 115_382) - 1) < 0.02
    assert rows_of(splits, "valid").labels.sum() == 18_001
