"""Numbers, labels and policies: what is done to each value, and that it is counted."""

import numpy as np
import pyarrow as pa
import pytest

from loka_jax.data import DataConfig
from loka_jax.data.blocks import Block
from loka_jax.data.values import (
    Counts,
    Moments,
    Standardizer,
    clean_dense,
    parse_labels,
    parse_numbers,
    transform_dense,
)
from tests.support.data import HEADER, open_table, rows_of, rows_text, write

NO_STANDARD = Standardizer(np.zeros(1), np.ones(1))


def block(values, kind=None):
    array = values if isinstance(values, pa.Array) else pa.array(values, kind)
    rows = np.arange(1, len(array) + 1)
    return Block(pa.table({"x": array}), rows, "logs.csv")


def clean(values, **policies):
    counts = Counts()
    config = DataConfig(**policies)
    out = clean_dense(block(values), config, ("x",), counts)[:, 0]
    return out.tolist(), counts.report()["totals"]


@pytest.mark.parametrize("word", ["", "NA", "N/A", "NULL", "null", "None", "\\N", None])
def test_missing_values_become_zero_and_are_counted(word):
    assert clean(["1", word]) == ([1.0, 0.0], {"missing": 1})


@pytest.mark.parametrize("word", ["nan", "NaN", "-nan"])
def test_nan_becomes_zero_and_is_counted_apart_from_missing(word):
    assert clean(["1", word]) == ([1.0, 0.0], {"nan": 1})


@pytest.mark.parametrize(
    ("word", "sign"), [("inf", 1), ("-Infinity", -1), ("1e999", 1)]
)
def test_infinities_are_clipped_and_counted(word, sign):
    values, counts = clean([word], huge_limit=1000.0)
    assert values == [sign * 1000.0]
    assert counts["inf"] == 1 and "huge" not in counts


def test_huge_values_are_clipped_and_counted():
    values, counts = clean(["1e30", "-1e30", "1000", "9"], huge_limit=1000.0)
    assert values == [1000.0, -1000.0, 1000.0, 9.0]
    assert counts == {"huge": 2, "negative": 1}


def test_negative_values_are_kept_or_clipped_and_counted_either_way():
    assert clean(["-2", "3"]) == ([-2.0, 3.0], {"negative": 1})
    assert clean(["-2", "3"], negative="clip") == ([0.0, 3.0], {"negative": 1})


@pytest.mark.parametrize(
    ("option", "value", "shown"),
    [
        ("missing", "", "no value"),
        ("nan", "nan", "nan"),
        ("negative", "-3", "-3"),
        ("huge", "1e20", "1e\\+20"),
        ("huge", "-inf", "-inf"),
    ],
)
def test_error_policy_names_file_row_column_and_option(option, value, shown):
    message = f"logs.csv row 2 column 'x' has {shown}, which --data.{option} error"
    with pytest.raises(ValueError, match=message):
        clean(["1", value], **{option: "error"})


@pytest.mark.parametrize("word", ["abc", "1,5", "0x10", "1_000", "12 kg", "--1"])
def test_text_where_a_number_belongs_is_named(word):
    message = f"logs.csv row 3 column 'x' holds '{word}', not a number"
    with pytest.raises(ValueError, match=message):
        clean(["1", "", word, "oops"])


def test_spaces_around_numbers_are_allowed():
    assert clean([" 3 ", "\t4"])[0] == [3.0, 4.0]


@pytest.mark.parametrize(
    "array",
    [
        pa.array([1, 2, None], pa.int64()),
        pa.array([1, 2, None], pa.uint8()),
        pa.array([1, 2, None], pa.float32()),
        pa.array(["1", "2", None]).dictionary_encode(),
        pa.array(["1", "2", ""], pa.large_string()),
        pa.array([1, 2, None], pa.decimal128(9, 2)),
    ],
)
def test_numbers_of_any_arrow_type_are_read(array):
    values, missing = parse_numbers(block(array), "x")
    assert values.tolist() == [1.0, 2.0, 0.0]
    assert missing.tolist() == [False, False, True]


def test_booleans_are_numbers():
    values, _ = parse_numbers(block([True, False]), "x")
    assert values.tolist() == [1.0, 0.0]


def test_large_integers_do_not_overflow():
    values, _ = parse_numbers(block([2**63 - 1, -(2**63)]), "x")
    assert values.tolist() == [2.0**63, -(2.0**63)]


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.date32(), pa.binary()])
def test_types_that_are_no_numbers_are_refused(kind):
    with pytest.raises(ValueError, match="logs.csv column 'x' holds .* not numbers"):
        parse_numbers(block([None, None], kind), "x")


@pytest.mark.parametrize(
    ("value", "shown"),
    [("2", "2"), ("-1", "-1"), ("0.5", "0.5"), ("nan", "nan"), ("", "no value")],
)
def test_label_other_than_zero_and_one_is_named(value, shown):
    message = f"logs.csv row 3 has {shown} in label column 'x', where only 0 and 1"
    with pytest.raises(ValueError, match=message):
        parse_labels(block(["0", "1", value, "9"]), ("x",))


def test_labels_may_be_written_as_floats_and_booleans():
    assert parse_labels(block(["0.0", "1.0"]), ("x",)).tolist() == [0.0, 1.0]
    assert parse_labels(block([False, True]), ("x",)).tolist() == [0.0, 1.0]


def test_log1p_is_odd_and_finite_everywhere():
    values = np.array([[-1e12], [-3.0], [-1.0], [0.0], [1.0], [1e12]])
    out = transform_dense(values, DataConfig(), NO_STANDARD)
    want = np.log1p([1e12, 3.0, 1.0, 0.0, 1.0, 1e12]) * [-1, -1, -1, 1, 1, 1]
    np.testing.assert_allclose(out[:, 0], want.astype(np.float32), rtol=1e-7)
    assert out.dtype == np.float32


def test_moments_equal_those_of_all_rows_at_once():
    rng = np.random.default_rng(0)
    values = rng.normal(1e6, [1.0, 100.0], (1000, 2))  # where naive sums cancel
    moments = Moments(2)
    for part in np.split(values, [1, 10, 500]):
        moments.add(part)
    mean, std = moments.result()
    np.testing.assert_allclose(mean, values.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(std, values.std(axis=0), rtol=1e-9)


def test_a_constant_column_standardizes_to_zero():
    moments = Moments(1)
    moments.add(np.full((100, 1), 0.1))
    config = DataConfig(transform="standardize")
    out = transform_dense(np.full((3, 1), 0.1), config, moments.result())
    np.testing.assert_allclose(out, 0.0, atol=1e-12)


def test_standardize_learns_from_training_rows_only(tmp_path):
    train = write(tmp_path / "train.csv", HEADER + "1,10,1,a,b\n0,20,3,a,b\n")
    valid = write(tmp_path / "valid.csv", HEADER + rows_text(50))
    splits = open_table(train, valid=valid, transform="standardize")
    batch = rows_of(splits, "valid")
    price = np.arange(1, 51)
    np.testing.assert_allclose(batch.dense[:, 0], (price - 15) / 5, rtol=1e-6)


def test_counts_are_reported_by_split_and_column(tmp_path):
    train = write(tmp_path / "train.csv", HEADER + "1,,nan,a,b\n0,-1,2,,b\n")
    valid = write(tmp_path / "valid.csv", HEADER + "1,inf,2,a,new\n")
    report = open_table(train, valid=valid).report
    assert report["splits"]["train"]["columns"] == {
        "price": {"missing": 1, "negative": 1},
        "age": {"nan": 1},
        "user": {"missing": 1},
    }
    assert report["splits"]["valid"]["columns"] == {
        "price": {"inf": 1},
        "item": {"oov": 1},
    }
    want = {"missing": 2, "nan": 1, "inf": 1, "huge": 0, "negative": 1, "oov": 1}
    assert report["totals"] == want
