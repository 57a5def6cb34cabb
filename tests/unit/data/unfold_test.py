"""Lists of the events before an example give the histories that a log of them gives."""

import dataclasses

import chex
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, parquet

from loka_jax.data import DataConfig, Position, open_data

LOG = DataConfig(
    kind="table",
    label="click",
    categorical=("item",),
    context=("country",),
    actions=("dwell",),
    user="user",
    time="when",
    encoding="hash",
    history=4,
)
LISTS = dataclasses.replace(
    LOG,
    user=None,
    lists=("item=items", "when=times", "dwell=dwells", "click=clicks"),
    separator="|",
)
OF_EVENT = {"items": "item", "times": "when", "dwells": "dwell", "clicks": "click"}


def events(count=40):
    """Events of users 0 to 2, in the order of time."""
    draws = np.random.default_rng(0)
    columns = {
        "user": [f"u{i % 3}" for i in range(count)],
        "when": [10 * i + i % 4 for i in range(count)],
        "item": draws.integers(0, 20, count).tolist(),
        "dwell": [f"d{i % 5}" for i in range(count)],
        "click": draws.integers(0, 2, count).tolist(),
        "country": [f"c{i % 3}" for i in range(count)],
    }
    return pa.table(columns).to_pylist()


def with_lists(rows):
    """Returns the rows with the lists of their users' earlier events."""
    found = []
    for at, row in enumerate(rows):
        past = [x for x in rows[:at] if x["user"] == row["user"]]
        own = {name: [x[of] for x in past] for name, of in OF_EVENT.items()}
        found.append(row | own)
    return found


def opened(tmp_path, config, rows, ending="parquet"):
    path = tmp_path / f"rows{len(list(tmp_path.iterdir()))}.{ending}"
    if ending == "csv":
        lists = [name for name in OF_EVENT if name in rows[0]]
        joined = ({n: "|".join(map(str, r[n])) for n in lists} for r in rows)
        rows = [row | texts for row, texts in zip(rows, joined, strict=True)]
        csv.write_csv(pa.Table.from_pylist(rows), path)
    else:
        parquet.write_table(pa.Table.from_pylist(rows), path)
    own = {"path": str(path), "cache": str(tmp_path / "cache")}
    return open_data(dataclasses.replace(config, **own), seed=0)


def whole(data, batch_size=None, step=0):
    size = batch_size or data.num_examples
    return data.batch(Position(0, step, 0), size, shuffle=False)


@pytest.mark.parametrize("ending", ["parquet", "csv"])
@pytest.mark.parametrize("stream", [False, True])
def test_lists_are_the_histories_of_a_log(tmp_path, ending, stream):
    log = opened(tmp_path, dataclasses.replace(LOG, stream=stream), events())
    config = dataclasses.replace(LISTS, stream=stream)
    lists = opened(tmp_path, config, with_lists(events()), ending)
    assert lists.report["examples"] == log.report["examples"] != {}
    for name in ("train", "valid"):
        one, other = getattr(lists, name), getattr(log, name)
        assert one.num_examples == other.num_examples > 2
        chex.assert_trees_all_equal(whole(one), whole(other))
        chex.assert_trees_all_equal(whole(one, 3, 1), whole(other, 3, 1))
    assert whole(lists.valid).events.answers.max() == 2


def test_events_of_lists_have_no_answers_without_a_list_of_them(tmp_path):
    config = dataclasses.replace(LISTS, lists=LISTS.lists[:2])
    batch = whole(opened(tmp_path, config, with_lists(events())).valid)
    full = whole(opened(tmp_path, LISTS, with_lists(events())).valid)
    assert not batch.events.answers.any() and not batch.events.ids[:, 1].max() > 0
    np.testing.assert_array_equal(batch.events.ids[:, 0], full.events.ids[:, 0])
    np.testing.assert_array_equal(batch.labels, full.labels)


def test_later_events_and_those_of_the_examples_time_are_no_history(tmp_path):
    rows = with_lists(events())
    more = {"items": [7, 8], "dwells": ["d1", "d2"], "clicks": [1, 0]}
    for row in rows:
        for name, values in (more | {"times": [row["when"], row["when"] + 5]}).items():
            row[name] = [*values, *row[name]]
    plain = opened(tmp_path, LISTS, with_lists(events()))
    chex.assert_trees_all_equal(
        whole(opened(tmp_path, LISTS, rows).train), whole(plain.train)
    )


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ({"times": [1]}, {}, r"row 9 has \d values in column '\w+' and \d in '\w+'"),
        ({"items": ["a"] * 2}, {}, "holds int64, and lists of its events"),
        ({"click": None}, {}, "row 9 has no value in label column 'click'"),
        ({}, {"lists": ("when=times",)}, "--data.lists has no list of 'item'"),
        ({}, {"lists": ("item=items",)}, "--data.lists has no list of"),
        ({}, {"user": "user"}, "leave out --data.user"),
        ({}, {"targets": "all"}, "set --data.targets last"),
        ({}, {"lists": ("price=prices",)}, "--data.lists 'price=prices' must be"),
    ],
)
def test_what_does_not_fit_is_one_sentence(tmp_path, change, options, said):
    rows = with_lists(events())
    if "items" in change:
        rows = [row | {"items": [str(x) for x in row["items"]]} for row in rows]
    rows[8] |= change
    with pytest.raises(ValueError, match=said):
        opened(tmp_path, dataclasses.replace(LISTS, **options), rows)
