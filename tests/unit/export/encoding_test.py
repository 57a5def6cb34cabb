"""The loader turns rows into the inputs that training makes of them."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest

from loka_jax.data import DataConfig
from loka_jax.data.blocks import Block
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
        {"transform": "log1p"},
        {"transform": "standardize"},
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
    found = raw.Encoding(*inputs_of(plain)).inputs(rows)
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
    found = raw.Encoding(*inputs_of(plain)).inputs(rows)
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
        raw.Encoding(*spec).inputs(rows)


def test_columns_and_weights_must_be_there_and_equally_long():
    def refused(config, rows, said, **options):
        with pytest.raises(ValueError, match=said):
            raw.Encoding(*inputs_of(encoding_of(config, **options))).inputs(rows)

    rows = {name: values[:1] for name, values in ROWS.items()}
    refused(CONFIG, {"price": [1], "age": [1], "item": [3]}, "is no column 'user'")
    refused(CONFIG, rows | {"item": [3, 4]}, r"hold \[1, 2\] values")
    lists = dataclasses.replace(CONFIG, multi=("t",), multi_weights=("t=w",))
    for weights, said in (
        ([1.0], "not a weight for each of 2 values"),
        ([1.0, -1.0], r"row 1 column 'w' .* no weight in 0 to"),
    ):
        refused(lists, rows | {"t": [["a", "b"]], "w": [weights]}, said, slots=(3,))
