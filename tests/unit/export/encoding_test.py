"""The loader turns rows into the inputs that training makes of them."""

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pytest

from loka_jax.data import DataConfig, sequences, transforms
from loka_jax.data.blocks import Block
from loka_jax.data.events import layout_of
from loka_jax.data.values import Counts
from loka_jax.export import rows as raw
from loka_jax.export.encoding import inputs_of
from tests.support.predict import encoding_of

CONFIG = DataConfig(
    kind="table", path="x.csv", dense=("price", "age"), categorical=("user", "item")
)
ROWS = {
    "price": [1.5, None, -3.0, float("nan"), 1e30, float("-inf"), 0.1],
    "age": ["+12", "NA", "-1e3", "nan", "+inf", "", " 7.25"],
    "user": ["u1", "", None, "é", "new", "u1", "NA"],
    "item": [3.0, 7.0, float("nan"), None, 99.0, -3.0, 2.0**40],
}
LISTS = {
    "tags": [["a", "b", "c", "d"], [], None, ["", "a"], [None, "q"], ["b"], ["a"]],
    "genres": ["x|y|z", "", None, "y", "||x", "z|q", "x|x|x|x"],
    "shares": ["1|2|3", "", None, "0.5", "9|9|1e3", "0|1", "1|2|3|4"],
}


def records(encoding, rows):
    table = pa.table(rows)
    block = Block(table, np.arange(1, table.num_rows + 1), "rows")
    return encoding.records([block], Counts(), labels="none")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"transform": ("log1p",)},
        {"transform": ("standardize",)},
        {"transform": ("price=clip:-1:1,log1p,standardize,missing", "age=buckets:4")},
        {"encoding": "hash", "hash_buckets": 50},
        {"hashed": ("item",), "hash_sizes": ("item=1000",)},
    ],
    ids=lambda changes: " ".join(changes) or "vocabulary",
)
def test_one_value_a_field(changes):
    plain, rows = encoding_of(dataclasses.replace(CONFIG, **changes)), dict(ROWS)
    if changes.get("hashed"):
        rows["item"] = ["3", "-9223372036854775808", None, "0x1F", "0XFFFFFFFFFFFFFFFF"]
        rows["item"] += ["18446744073709551615", "-1"]
    expected = records(plain, rows)
    found = raw.Encoding(*inputs_of(plain), transforms).inputs(rows)
    assert np.array_equal(found.dense, expected["dense"])
    assert np.array_equal(found.ids, expected["ids"])
    assert len(np.unique(found.ids)) > 3


@pytest.mark.parametrize("weights", [(), ("genres=shares",)])
def test_lists(weights):
    config = dataclasses.replace(
        CONFIG, multi=("tags", "genres"), multi_weights=weights, separator="|"
    )
    plain = encoding_of(config, slots=(3, 2))
    expected, rows = records(plain, ROWS | LISTS), ROWS | LISTS
    found = raw.Encoding(*inputs_of(plain), transforms).inputs(rows)
    for bag, (ids, own) in enumerate(found.bags):
        assert np.array_equal(ids, expected[f"bag_{bag}"])
        if (name := f"bag_weights_{bag}") in expected.dtype.names:
            assert np.array_equal(own, expected[name])
        else:
            assert own is None
    assert (found.bags[1][1] is not None) == bool(weights)


@pytest.mark.parametrize(
    "column, value, changes, said",
    [
        ("price", "\u0661", {}, "row 2 column 'price' .* which is no number"),
        ("price", 2e12, {"bad": "strict"}, "which is huge and refused"),
        ("user", "u9", {"bad": "strict"}, "'u9', which is not in the vocabulary"),
        ("item", 2**64, {"hashed": ("item",)}, "no integer in -9223372036854775808.."),
    ],
)
def test_a_bad_value_is_named(column, value, changes, said):
    spec = inputs_of(encoding_of(dataclasses.replace(CONFIG, **changes)))
    rows = {"price": [1, 2], "age": [1, 2], "user": ["u1", "u1"], "item": [3, 3]}
    rows[column] = [rows[column][0], value]
    with pytest.raises(ValueError, match=said):
        raw.Encoding(*spec, transforms).inputs(rows)


def test_columns_and_weights_must_be_there_and_equally_long():
    def refused(config, rows, said, **options):
        with pytest.raises(ValueError, match=said):
            spec = inputs_of(encoding_of(config, **options))
            raw.Encoding(*spec, transforms).inputs(rows)

    rows = {name: values[:1] for name, values in ROWS.items()}
    refused(CONFIG, {"price": [1], "age": [1], "item": [3]}, "is no column 'user'")
    refused(CONFIG, rows | {"item": [3, 4]}, r"hold \[1, 2\] values")
    lists = dataclasses.replace(CONFIG, multi=("t",), multi_weights=("t=w",))
    for weights, said in (
        ([1.0], "not a weight for each of 2 values"),
        ([1.0, -1.0], r"row 1 column 'w' .* no weight in 0 to"),
    ):
        refused(lists, rows | {"t": [["a", "b"]], "w": [weights]}, said, slots=(3,))


EVENTS = {
    "user": ["b", "a", "b", "b", "a", "c", "b"],
    "when": ["2024-01-02T03:04:05.25", "2024-01-01", "2024-01-01 00:00:00"]
    + ["2024-01-03 00:00", "2024-02-01", "2024-02-01", "2024-01-02"],
    "item": [3, 7, None, 99, 3, 7, 3],
    "device": ["x", "", "y", "x", None, "z", "x"],
    "click": [1, 0, None, None, None, None, "1"],
    "buy": [None, 1, 0, None, None, "", 0],
}


@pytest.mark.parametrize(
    "times",
    [
        EVENTS["when"],
        ["2024-01-02T03:04:05+01:00", *["2024-01-02T02:04:05Z"] * 6],
        [7, 1.5, 3, "9", 9, 1e9, 4],
    ],
)
def test_events_become_the_batches_of_predictions(times):
    config = DataConfig(
        kind="table",
        labels=("click", "buy"),
        context=("device",),
        categorical=("item",),
        user="user",
        time="when",
        history=2,
    )
    plain, rows = encoding_of(config), EVENTS | {"when": times}
    layout = layout_of(config, plain.schema)
    spec, arrays = inputs_of(plain, layout)
    encoding = raw.encoding_of(
        json.loads(json.dumps(spec)), arrays, sequences, transforms
    )
    as_text = {x: [None if y is None else str(y) for y in rows[x]] for x in rows}
    block = Block(pa.table(as_text), np.arange(1, 8), "rows")
    expected = plain.records([block], Counts(), labels="some")
    found = encoding.inputs(rows)
    for name in ("time", "ids", "label"):
        np.testing.assert_array_equal(found[name], expected[name])
    assert encoding.columns == ("device", "item", "user", "when", "click", "buy")
    assert encoding.num_scores(found) == 3
    is_new, shapes = sequences.are_candidates(expected), [sequences.candidate_shape(12)]
    parts = expected[~is_new], expected[is_new], layout, shapes
    ((batch, _, numbers),) = sequences.candidate_batches(*parts)
    ((size, inputs, own),) = encoding.batches(found, (12,))
    assert size == 12 and sorted(own) == sorted(numbers) == [0, 1, 2]
    # Users have other keys, and their sequences come in another order.
    places = inputs.bags[5][np.argsort(own)], batch.events[5][np.argsort(numbers)]
    for x, y in zip(inputs.bags[:4], batch.events[:4], strict=True):
        np.testing.assert_array_equal(x[places[0]], y[places[1]])
    assert sorted(np.diff(inputs.bags[4])) == sorted(np.diff(batch.events[4]))
    blank = encoding.blank(12)
    assert [x.shape for x in blank.bags] == [x.shape for x in inputs.bags]
