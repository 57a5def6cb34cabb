"""Options and schemas that cannot be are refused; positions and parts follow."""

import math

import pytest

from loka_jax.data import DataConfig
from loka_jax.data.batch import Part, Position, Schema, next_position


def schema(**options):
    parts = {"label": "y", "dense": ("x",), "categorical": ("c",), "vocab_sizes": (5,)}
    return Schema(**(parts | options))


LIST = {"multi": ("m",), "vocab_sizes": (5, 7)}
TWO = {"categorical": ("c", "d"), "vocab_sizes": (5, 6)}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dense": (), "categorical": (), "vocab_sizes": ()}, "no features.*--data.de"),
        ({"dense": ("c",)}, "'c' is named more than once"),
        ({"vocab_sizes": (5, 5)}, "2 table sizes for 1 categorical"),
        ({"vocab_sizes": (0,)}, "'c' has 0 rows"),
        ({"vocab_sizes": (2**31,)}, "'c' has 2147483648 rows"),
        (LIST | {"slots": (0,)}, "slots"),
        (LIST | {"slots": (1025,)}, "slots"),
        (LIST | {"slots": (3,), "weighted_multi": ("c",)}, "weighted_multi"),
        (TWO | {"owners": ("c", "c")}, "with as many rows"),
    ],
)
def test_what_contradicts_itself_is_refused(options, why):
    with pytest.raises(ValueError, match=why):
        schema(**options)


def test_fields_follow_each_other_and_may_share_tables():
    largest = schema(multi=("m",), vocab_sizes=(1, 2**31 - 1), slots=(1024,))
    assert largest.fields == ("c", "m") and largest.tables == (0, 1)
    parts = {"categorical": ("c", "d"), "multi": ("m",), "vocab_sizes": (5, 9, 9)}
    assert schema(**parts, owners=("c", "m", "m"), slots=(2,)).tables == (0, 2, 2)
    assert schema(further_labels=("z",)).labels == ("y", "z")


def test_batches_and_their_parts_follow_each_other():
    assert next_position(Position(2, 3, 7), 5) == Position(2, 4, 7)
    assert next_position(Position(2, 4, 7), 5) == Position(3, 0, 7)
    assert [Part(i, 3).rows(12) for i in (0, 2)] == [range(4), range(8, 12)]
    with pytest.raises(ValueError, match="batch-size 32 .* of the 3 processes"):
        Part(2, 3).rows(32)


LARGEST = 2**31 - 1


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("reserve_rows", 0, LARGEST),
        ("max_values", 1, 1024),
        ("keep_negatives", 1e-6, 1.0),
        ("valid_fraction", 0.0, 0.9),
        ("max_bad_rows", 0, 2**62),
        ("click_rate", 0.001, 0.999),
        ("examples", 1, LARGEST),
    ],
)
def test_value_out_of_range_is_named(name, low, high):
    for value in (low, high):
        DataConfig(kind="table", **{name: value})
    option = "--data." + name.replace("_", "-")
    step = 1 if isinstance(low, int) else 1e-9 * high
    for value in (low - step, high + step, math.nan):
        with pytest.raises(ValueError, match=f"{option} .* must lie between"):
            DataConfig(kind="table", **{name: value})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kind": "generated", "rows": (1,)}, "--data.rows"),
        ({"kind": "generated", "path": "clicks.csv"}, "--data.kind table"),
        ({"kind": "generated", "labels": ("a", "b")}, "labels names a column of a tab"),
        ({"kind": "criteo", "path": "x.tsv", "dense": ("I1",)}, "fixed columns"),
        ({"kind": "criteo", "weight": "I1"}, "--data.weight names a column of a table"),
        ({"valid": "valid.csv"}, "--data.valid needs --data.path"),
        ({"cache": "s3://logs/cache"}, "--data.cache .* a local folder"),
        ({"labels": ("a", "b"), "weight": "b"}, "both label and weight"),
        ({"multi": ("t",), "multi_weights": ("c=w",)}, "=VALUE; the columns are t"),
        ({"hash_sizes": ("c=1",)}, "must give the column 2 to"),
        ({"hashed": ("x",)}, "--data.hashed 'x' is not among"),
        ({"share": ("c=x",)}, "--data.share c=x must name a column"),
        ({"share": ("c=d", "d=c")}, "with a table of its own"),
        ({"share": ("c=d",), "hashed": ("c",)}, "'c' uses the table of 'd'"),
    ],
)
def test_options_that_cannot_be_are_refused(options, why):
    columns = {"categorical": ("c", "d")} if "kind" not in options else {}
    with pytest.raises(ValueError, match=why):
        DataConfig(**({"kind": "table"} | columns | options))


def test_a_size_of_its_own_comes_before_that_of_all_hashes():
    columns = {"kind": "table", "categorical": ("c", "d", "e")}
    options = {"hash_sizes": ("c=5",), "hashed": ("c", "d"), "hash_buckets": 7}
    for encoding, last in (("vocabulary", None), ("hash", 7)):
        config = DataConfig(**columns, **options, encoding=encoding)
        assert [config.hash_rows(name) for name in "cde"] == [5, 7, last]
