"""Labels, weights, times and sampling, from the file to the batch."""

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from loka_jax.data import Position
from loka_jax.data.reader import record_dtype_of
from loka_jax.data.split import hashed
from tests.support.data import open_table, rows_of, write

COLUMNS = {"dense": ("row",), "categorical": ("user",), "transform": ("none",)}
HEADER = "click,row,user,w\n"
LABELS = {"labels": ("click", "w")}
WEIGHT = {"weight": "w"}


def opened(folder, values, click=lambda i: i % 2, **options):
    """Opens rows with these values of `w`, whose dense column is their number."""
    rows = (f"{click(i)},{i},u{i % 3},{w}\n" for i, w in enumerate(values))
    path = write(folder / "clicks.csv", HEADER + "".join(rows))
    return open_table(path, **(COLUMNS | options))


def test_labels_come_in_the_order_of_the_option(tmp_path):
    for labels in (("click", "w"), ("w", "click")):
        buy = [int(i % 6 == 5) for i in range(100)]
        splits = opened(tmp_path, buy, label=labels[0], labels=labels)
        batch = rows_of(splits)
        row = batch.dense[:, 0].astype(int)
        expected = {"click": row % 2, "w": row % 6 == 5}
        want = np.stack([expected[name] for name in labels], axis=1)
        assert np.array_equal(batch.labels, want) and batch.labels.dtype == np.float32
        assert splits.train.schema.labels == labels
        counts = splits.report["splits"]["train"]
        assert counts["positives"] == {k: v.sum() for k, v in expected.items()}
        assert set(counts["labelled"].values()) == {len(row)}


def test_a_row_may_lack_a_label(tmp_path):
    splits = opened(tmp_path, [1, "", 0, "nan"] * 25, **LABELS)
    batch = rows_of(splits)
    row = batch.dense[:, 0].astype(int)
    expected = np.choose(row % 4, [1, np.nan, 0, np.nan])
    assert np.array_equal(batch.labels[:, 1], expected, equal_nan=True)
    lacking = np.isnan(expected).sum()
    assert splits.report["splits"]["train"]["labelled"]["w"] == len(row) - lacking
    note = f"{lacking} training rows have no label 'w' and count for the other tasks"
    assert splits.report["notes"] == [f"{note} only."]


def test_one_name_among_labels_is_one_label(tmp_path):
    one = opened(tmp_path, [1, 0] * 50, label="w")
    same = opened(tmp_path, [1, 0] * 50, label="w", labels=("w",))
    assert one.identity == same.identity and rows_of(same).labels.ndim == 1
    names = record_dtype_of(one.train.schema).names
    assert names == ("label", "dense", "ids")  # as ever


MANY = ["1", 0] * 50


@pytest.mark.parametrize(
    ("values", "options", "why"),
    [
        ([*MANY, "-0.5"], WEIGHT, "row 101 has -0.5 in weight column 'w'.*--data.wei"),
        ([*MANY, "nan", 1], WEIGHT, "row 101 has nan in weight column 'w'"),
        (["1e12", "1.1e12"], WEIGHT, r"row 2 has 1.1e\+12 in weight column 'w'"),
        ([*MANY, "", 1], WEIGHT, "row 101 has no value in weight column 'w'"),
        ([0] * 50, WEIGHT, "All train rows have weight 0 in column 'w'"),
        ([*MANY, 2], LABELS, "row 101 has 2 in label column 'w'"),
        ([1, 0, "nan"], {"label": "w"}, "row 3 has nan in label column 'w'"),
        ([1, "", 0], {"label": "w"}, "row 2 has no value in label column 'w'"),
        ([""] * 50, LABELS, "'w' has no label in any train row"),
        (["yes"] * 9, {"label": "w"}, "'yes', not a number: .* labels as 0 and 1"),
    ],
)
def test_what_is_no_weight_or_label_is_refused_with_its_row(
    tmp_path, values, options, why
):
    with pytest.raises(ValueError, match=why):
        opened(tmp_path, values, **options)


def test_weights_come_with_their_rows(tmp_path):
    splits = opened(tmp_path, np.arange(1, 101) / 8, **WEIGHT)
    for split in ("train", "valid"):
        batch = rows_of(splits, split)
        assert np.array_equal(batch.weights, (batch.dense[:, 0] + 1) / 8)
        total = splits.report["splits"][split]["weight"]
        assert total == batch.weights.sum(dtype=np.float64)
    assert "weighted by column 'w'" in splits.report["notes"][0]
    train = splits.train
    last, rest = train.num_batches(64) - 1, train.num_examples % 64
    weights = train.batch(Position(0, last, 0), 64, shuffle=True).weights
    assert (weights[:rest] > 0).all() and not weights[rest:].any()  # padding
    same = rows_of(opened(tmp_path, range(1, 50), weight="row"))
    assert np.array_equal(same.weights, same.dense[:, 0])


def test_negatives_are_kept_by_row_and_weigh_more(tmp_path):
    splits = opened(tmp_path, [2] * 2000, keep_negatives=0.25, **WEIGHT)
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


def test_sampling_leaves_a_validation_file_whole_and_learns_what_is_kept(tmp_path):
    valid = write(tmp_path / "v.csv", HEADER + "0,1,u,1\n" * 40)
    options = {"valid": valid, "keep_negatives": 1e-6}
    splits = opened(tmp_path, [1] * 500, lambda i: int(i % 3 == 0), **options)
    assert rows_of(splits, "valid").weights.tolist() == [1] * 40
    assert rows_of(splits).dense[:, 0].tolist() == list(range(0, 500, 3))
    assert splits.train.schema.vocab_sizes == (2,)  # u0 is in the clicks only
    # A negative has no label that is 1.
    buy = [int(i % 6 == 4) for i in range(600)]
    batch = rows_of(opened(tmp_path, buy, keep_negatives=1e-6, **LABELS))
    assert set(batch.dense[:, 0] % 6) == {1, 3, 4, 5} and set(batch.weights) == {1.0}


def split_rows(folder, times, **options):
    """Returns the numbers of the training and of the validation rows, and the rule."""
    splits = opened(folder, times, time="w", **options)
    parts = (rows_of(splits, split).dense[:, 0] for split in ("train", "valid"))
    return *(part.astype(int).tolist() for part in parts), splits.report["split_rule"]


def test_the_latest_rows_are_for_validation(tmp_path):
    times = np.random.default_rng(0).permutation(50) / 2
    train, valid, rule = split_rows(tmp_path, times, valid_fraction=0.2)
    assert sorted(times[valid]) == [i / 2 for i in range(40, 50)]
    assert sorted(train + valid) == list(range(50))
    assert "last 20.00% of the training file's rows by 'w': those from 20 on" in rule


@pytest.mark.parametrize(
    ("times", "fraction", "first"),
    [
        ([1, 1, 2, 2, 3, 3, 3, 3, 3, 4], 0.1, 9),
        ([1, 2, 3, 3, 3, 3, 3, 3, 3, 3], 0.2, 2),  # all of time 3, or none
        ([1, 1, 1, 1, 1, 1, 1, 1, 1, 2], 0.9, 9),  # something is left to train on
        (range(10), 0.04, 9),  # something is left to validate
        (range(10), 0.26, 7),  # rounded
    ],
)
def test_rows_of_one_time_stay_together(tmp_path, times, fraction, first):
    train, valid, _ = split_rows(tmp_path, times, valid_fraction=fraction)
    assert (train, valid) == (list(range(first)), list(range(first, 10)))


def test_dates_are_ordered_as_dates_in_text_and_parquet(tmp_path):
    times = [f"2024-0{month}-28 14:00:00" for month in (3, 1, 5, 2, 4)]
    train, valid, rule = split_rows(tmp_path, times, valid_fraction=0.4)
    assert (train, valid) == ([0, 1, 3], [2, 4])
    assert "those from 2024-04-28T14:00:00 on" in rule
    columns = {"click": [0, 1, 0, 1, 1], "row": range(5), "user": list("abcab")}
    stamps = pa.array([np.datetime64(time) for time in times])
    path = tmp_path / "clicks.parquet"
    for kind in (pa.timestamp("ms", "UTC"), pa.date32()):
        table = pa.table(columns | {"w": stamps.cast(kind, safe=False)})
        parquet.write_table(table, path)
        splits = open_table(path, time="w", valid_fraction=0.4, **COLUMNS)
        assert rows_of(splits, "valid").dense[:, 0].tolist() == valid
        assert "those from 2024-04-28T" in splits.report["split_rule"]


@pytest.mark.parametrize(
    ("times", "why"),
    [
        ([*range(150), ""], "row 151 has no value in time column 'w'"),
        ([1, 2, "2024-02-30"], "row 3 column 'w' holds '2024-02-30', not a number"),
        ([5, 5, 5], "'w' has one time in all rows"),
    ],
)
def test_times_that_are_none_are_refused(tmp_path, times, why):
    with pytest.raises(ValueError, match=why):
        split_rows(tmp_path, times)
    with pytest.raises(ValueError, match="leave out --data.time, or that file"):
        split_rows(tmp_path, times, valid=write(tmp_path / "v.csv", HEADER))


def test_numbers_and_dates_have_no_order(tmp_path):
    for i, time in enumerate(["5", "2024-02-01"]):
        write(tmp_path / f"train-{i}.csv", f"{HEADER}1,{i},u,{time}\n")
    why = "train-1.csv column 'w' holds numbers in some rows and dates in others"
    with pytest.raises(ValueError, match=why):
        open_table(tmp_path, time="w", **COLUMNS)
