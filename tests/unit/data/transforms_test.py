"""What is made of columns by name: dense inputs, indicators, buckets, hours."""

import datetime

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from loka_jax.data import DataConfig, open_data, transforms
from loka_jax.data.config import columns_of, features_of
from loka_jax.data.saved_encoding import load_encoding, values_of
from tests.support.data import rows_of

OPTIONS = {"kind": "table", "dense": ("price", "age"), "categorical": ("user",)}


def config(*transform, **options):
    return DataConfig(**{**OPTIONS, "transform": transform, **options})


def test_a_column_gives_the_inputs_that_its_entry_names():
    own = config("price=log1p,clip:0:9,missing", "age=buckets:16", "at=hour,weekday")
    columns = columns_of(own)
    assert columns.dense == ("price", "price:missing")
    assert columns.categorical == ("user", "age:buckets", "at:hour", "at:weekday")
    assert features_of(own) == ("price", "age", "user", "at")
    assert own.inputs.dense["price"].steps == (("log1p",), ("clip", 0.0, 9.0))
    every = config("standardize,missing", "age=none", "new=log1p")  # which names it
    assert columns_of(every).dense == ("price", "price:missing", "age", "new")
    assert columns_of(config()).dense == ("price", "age")
    assert config().inputs.dense["age"].steps == (("log1p",),)


@pytest.mark.parametrize(
    "entries",
    [
        ("price=log2",),
        ("price=",),
        ("price=log1p,log1p",),
        ("price=clip:9:0",),
        ("price=clip:0:inf",),
        ("price=clip:1",),
        ("price=buckets:1",),
        ("price=buckets:1.5",),
        ("price=buckets:1000",),
        ("hour",),
        ("price=none", "price=log1p"),
        ("log1p", "none"),
    ],
)
def test_what_is_no_transform_is_refused_with_those_that_are(entries):
    with pytest.raises(ValueError, match=r"--data.transform .* some of log1p, stand"):
        config(*entries)


def test_times_have_the_hours_and_weekdays_of_a_calendar():
    draw = np.random.default_rng(0)
    since = np.append(draw.integers(2 * 10**8, 4 * 10**9, 500), [86400 * 10**4] * 2)
    dates = [datetime.datetime.fromtimestamp(int(x), datetime.UTC) for x in since]
    for unit in (1, 10**3, 10**6, 10**9):
        times = since.astype(np.float64) * unit
        hours, days = (transforms.ids(times, (x,)) for x in ("hour", "weekday"))
        assert hours.tolist() == [1 + date.hour for date in dates]
        assert days.tolist() == [1 + date.weekday() for date in dates]
    assert transforms.ids(np.array([np.nan, -1.0]), ("hour",)).tolist() == [0, 24]


def test_constants_are_those_of_training_rows_and_stay(tmp_path):
    def written(name, age, at):
        columns = {"label": [0, 1] * 50, "user": ["u"] * 100, "price": [None, 2.0] * 50}
        path = tmp_path / name
        parquet.write_table(pa.table(columns | {"age": age, "at": at}), path)
        return str(path)

    days = np.datetime64("2026-11-02T10:30", "us") + np.arange(100) * np.timedelta64(
        25, "h"
    )
    train = written("train.parquet", np.arange(100.0), days)
    valid = written("valid.parquet", np.arange(100.0) * 1e6 + 30.0, days[::-1])
    entries = ("price=standardize,missing", "age=buckets:4", "at=hour,weekday")
    own = config(
        *entries, path=train, valid=valid, label="label", cache=str(tmp_path / "cache")
    )
    splits = open_data(own, seed=0)
    assert splits.train.schema.vocab_sizes == (2, 5, 25, 8)
    learned = load_encoding(splits.folder).constants
    assert learned == {"price": (1.0, 1.0), "age:buckets": (24.0, 49.0, 74.0)}
    rows = rows_of(splits)
    assert rows.ids[:, 1].tolist() == [1] * 25 + [2] * 25 + [3] * 25 + [4] * 25
    assert rows.ids[:3, 2:].tolist() == [[11, 1], [12, 2], [13, 3]]  # from a Monday
    assert rows.dense[:2].tolist() == [[-1.0, 1.0], [1.0, 0.0]]
    names = {"at:weekday": [0, 1], "age:buckets": [1, 2, 4]}
    named = values_of(splits.folder, names)
    assert named["age:buckets"] == ["-inf to 24", "24 to 49", "74 to inf"]
    assert named["at:weekday"] == [None, "Monday"]
    assert rows_of(splits, "valid").ids[:2, 1].tolist() == [2, 4]
    facts = splits.report["categorical"]["at:hour"]
    assert (facts["rows"], facts["values"]) == (25, 24)
    report = splits.report["splits"]["train"]["columns"]
    assert report == {"price": {"missing": 50}}
    later = config(*entries, path=valid, label="label", cache=own.cache)
    again = open_data(later, seed=0, base=splits.folder)
    assert load_encoding(again.folder).constants == learned
