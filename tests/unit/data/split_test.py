"""The latest rows as validation rows: numbers, dates, ties, and times that are none."""

import gzip

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.support.data import open_table, real, rows_of, write


def csv_of(times, folder):
    rows = (f"{i % 2},{i},u{i % 3},{time}\n" for i, time in enumerate(times))
    return write(folder / "clicks.csv", "click,row,user,time\n" + "".join(rows))


def split_rows(path, **options):
    """Returns the numbers of the training and of the validation rows."""
    options = {"dense": ("row",), "categorical": ("user",)} | options
    splits = open_table(path, time="time", transform="none", **options)
    parts = (rows_of(splits, split).dense[:, 0] for split in ("train", "valid"))
    return *(part.astype(int).tolist() for part in parts), splits.report["split_rule"]


def test_the_latest_rows_are_for_validation(tmp_path):
    times = np.random.default_rng(0).permutation(50)
    train, valid, rule = split_rows(csv_of(times, tmp_path), valid_fraction=0.2)
    assert sorted(times[valid]) == list(range(40, 50))
    assert sorted(train + valid) == list(range(50))
    assert rule == (
        "validation rows are the last 20.00% of the training file's rows by 'time': "
        "those from 40 on, while the training rows end at 39"
    )


@pytest.mark.parametrize(
    ("times", "fraction", "first"),
    [
        ([1, 1, 2, 2, 3, 3, 3, 3, 3, 4], 0.1, 9),
        ([1, 2, 3, 3, 3, 3, 3, 3, 3, 3], 0.2, 2),  # all of time 3, or none
        ([1, 1, 1, 1, 1, 1, 1, 1, 1, 2], 0.9, 9),  # something is left to train on
    ],
)
def test_rows_of_one_time_stay_together(tmp_path, times, fraction, first):
    train, valid, _ = split_rows(csv_of(times, tmp_path), valid_fraction=fraction)
    assert (train, valid) == (list(range(first)), list(range(first, 10)))


def test_dates_are_ordered_as_dates_in_text_and_parquet(tmp_path):
    dates = [f"2024-0{month}-28 1{month}:00:00" for month in (3, 1, 5, 2, 4)]
    path = csv_of(dates, tmp_path)
    train, valid, rule = split_rows(path, valid_fraction=0.4)
    assert (train, valid) == ([0, 1, 3], [2, 4])
    assert "those from 2024-04-28T14:00:00.000000 on" in rule
    columns = {"click": [0, 1, 0, 1, 1], "row": range(5), "user": list("abcab")}
    stamps = pa.array([np.datetime64(date) for date in dates])
    table = pa.table(columns | {"time": stamps.cast(pa.timestamp("ms", "UTC"))})
    parquet.write_table(table, tmp_path / "clicks.parquet")
    assert split_rows(tmp_path / "clicks.parquet", valid_fraction=0.4) == (
        train,
        valid,
        rule,
    )


@pytest.mark.parametrize(
    ("time", "why"),
    [
        ("", "row 3 has no value in the time column 'time'"),
        ("inf", "row 3 has inf in the time column"),
        ("soon", "row 3 column 'time' holds 'soon', not a number"),
        ("2024-02-30", "row 3 column 'time' holds '2024-02-30', not a number"),
    ],
)
def test_a_row_without_a_time_is_named(tmp_path, time, why):
    with pytest.raises(ValueError, match=why):
        split_rows(csv_of([1, 2, time, 4], tmp_path))


def test_one_time_in_all_rows_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'time' has one time in all rows"):
        split_rows(csv_of([5, 5, 5], tmp_path))


def test_a_validation_file_and_a_time_contradict_each_other(tmp_path):
    path = csv_of([1, 2, 3], tmp_path)
    with pytest.raises(ValueError, match="leave out --data.time, or that file"):
        split_rows(path, valid=write(tmp_path / "v.csv", "click,row,user,time\n"))


def test_movielens_is_split_by_time(tmp_path):
    source = real("movielens_100k") / "u.data.gz"
    ratings = np.loadtxt(gzip.open(source, "rt"), np.int64)
    lines = (f"{int(r > 3)},{u},{i},{t}\n" for u, i, r, t in ratings)
    path = write(tmp_path / "u.csv", "click,user,item,time\n" + "".join(lines))
    columns = {"dense": ("time",), "categorical": ("user", "item")}
    splits = open_table(path, time="time", transform="none", **columns)
    train, valid = (rows_of(splits, split).dense[:, 0] for split in ("train", "valid"))
    assert train.max() < valid.min()
    assert len(train) + len(valid) == 100_000
    assert 10_000 <= len(valid) < 10_100
    # Later users are hardly seen before: unlike at random, most are new.
    oov = splits.report["splits"]["valid"]["columns"]["user"]["oov"]
    assert oov > 5_000
