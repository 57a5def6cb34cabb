"""Numbers, labels and policies: what is done to each value, and that it is counted."""

import re

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from loka_jax.data import DataConfig, transforms
from loka_jax.data.blocks import Block
from loka_jax.data.values import Counts, Sample, clean_dense
from tests.support.data import HEADER, open_table, rows_of, rows_text, write


def clean(values, **policies):
    counts = Counts()
    config = DataConfig(kind="table", dense=("x",), **policies)
    block = Block(pa.table({"x": values}), np.arange(1, len(values) + 1), "logs.csv")
    out = transforms.dense(clean_dense(block, config, counts)["x"], ())
    return out.tolist(), counts.report()["totals"]


MISSING_WORDS = ["", "NA", "N/A", "NULL", "null", "None", "\\N", None]
STRICT = {"bad": "strict"}


@pytest.mark.parametrize(
    ("values", "policies", "want", "counts"),
    [
        (["1", *MISSING_WORDS], {}, [1, *[0] * 8], {"missing": 8}),
        (["1", "nan", "NaN", "-nan"], {}, [1, 0, 0, 0], {"nan": 3}),
        (["inf", "1e999", "9"], {}, [1e12, 1e12, 9], {"inf": 2}),
        (["-Infinity"], {}, [-1e12], {"inf": 1, "negative": 1}),
        (["1e30", "1e12", "1.1e12"], {}, [1e12] * 3, {"huge": 2}),
        (["-1e30"], {}, [-1e12], {"huge": 1, "negative": 1}),
        (["-2", "0", " 3 "], {}, [-2, 0, 3], {"negative": 1}),
        (["-2", "1e12", "\t3"], STRICT, [-2, 1e12, 3], {"negative": 1}),
        (["true", "False", "", " TRUE", "1"], {}, [1, 0, 0, 1, 1], {"missing": 1}),
    ],
)
def test_what_a_policy_applies_to_is_changed_and_counted(
    values, policies, want, counts
):
    assert clean(values, **policies) == (want, counts)


@pytest.mark.parametrize(
    ("value", "policies", "why"),
    [
        *(
            (value, STRICT, f"has {shown} in dense column 'x', which .*strict")
            for value, shown in (("", "no value"), ("nan", "nan"), ("-inf", "-inf"))
        ),
        ("2e12", STRICT, r"has 2e\+12 in .* correct it or set --data.bad clean"),
        *((x, {}, f"column 'x' holds '{x}', not") for x in ("1,5", "0x10", "--1")),
    ],
)
def test_what_is_refused_is_named_with_file_row_and_column(value, policies, why):
    with pytest.raises(ValueError, match=f"logs.csv row 3 {why}"):
        clean(["1", "2", value, "oops" if not policies else value], **policies)


def test_transforms_are_finite_and_do_what_their_name_says():
    values = np.array([-1e12, -3.0, -1.0, 0.0, 1.0, 1e12])
    log1p = np.sign(values) * np.log1p(abs(values))
    for steps, want in (
        ([("log1p",)], log1p),
        ([("none",)], values),
        ([("standardize", 2.0, 4.0)], (values - 2) / 4),
        ([("clip", -2.0, 1.0)], [-2, -2, -1, 0, 1, 1]),
        ([("log1p",), ("clip", -2.0, 1.0)], np.clip(log1p, -2, 1)),
        (
            [("clip", -2.0, 1.0), ("standardize", 1.0, 2.0)],
            [-1.5, -1.5, -1, -0.5, 0, 0],
        ),
        ([("missing",)], [0] * 6),
    ):
        np.testing.assert_allclose(transforms.dense(values, steps), want, rtol=1e-7)
    missing = np.array([np.nan, 3.0])
    assert transforms.dense(missing, [("missing",)]).tolist() == [1, 0]
    assert transforms.dense(missing, [("standardize", 2.0, 4.0)]).tolist() == [
        -0.5,
        0.25,
    ]


def test_a_sample_has_the_same_rows_whatever_the_blocks():
    rng = np.random.default_rng(0)
    values = rng.lognormal(size=(5000, 3))
    values[::5, 1] = np.nan
    values[np.arange(5000) % 5 < 3, 0] = 0.0
    values[:, 2] = 0.1
    found = set()
    for parts in ([], [1, 10, 500, 500], [4999]):
        sample = Sample(3, size=1000)
        for part in np.split(values, parts):
            sample.add(part)
        steps = ("buckets", 4.0), ("buckets", 8.0), ("standardize",)
        found.add(tuple(sample.constants(i, (x,)) for i, x in enumerate(steps)))
    ((mostly_zero, cuts, constant),) = found
    assert len(mostly_zero) == 2 and mostly_zero[0] == 0.0
    known = values[~np.isnan(values[:, 1]), 1]
    shares = np.searchsorted(np.sort(known), cuts) / len(known)
    # Four standard errors of a share of 1,000 rows without a fifth.
    np.testing.assert_allclose(shares, np.arange(1, 8) / 8, atol=4 * 0.5 / 800**0.5)
    assert constant[1] == 1.0
    few, steps = Sample(1), (("log1p",), ("standardize",))
    assert few.constants(0, (("buckets", 4.0),)) == ()
    few.add(values[:, :1])
    scaled = np.log1p(values[:, 0])
    want = scaled.mean(), scaled.std()
    np.testing.assert_allclose(few.constants(0, steps), want, rtol=1e-12)


def test_standardize_learns_from_all_training_rows_and_from_no_others(tmp_path):
    rows = "".join(f"{i % 2},{10 + 10 * (i // 60)},1,a,b\n" for i in range(120))
    train = write(tmp_path / "train.csv", HEADER + rows)
    valid = write(tmp_path / "valid.csv", HEADER + rows_text(50))
    options = {"transform": ("standardize",), "encoding": "hash"}
    price = rows_of(open_table(train, valid=valid, **options), "valid").dense[:, 0]
    np.testing.assert_allclose(price, (np.arange(1, 51) - 15) / 5, rtol=1e-6)


def test_counts_are_reported_by_split_and_column(tmp_path):
    train = write(tmp_path / "train.csv", HEADER + "1,,nan,a,b\n0,-1,2,,b\n")
    valid = write(tmp_path / "valid.csv", HEADER + "1,inf,2,a,new\n")
    report = open_table(train, valid=valid).report
    columns = [split["columns"] for split in report["splits"].values()]
    price, missing = {"missing": 1, "negative": 1}, {"missing": 1}
    assert columns[0] == {"price": price, "age": {"nan": 1}, "user": missing}
    assert columns[1] == {"price": {"inf": 1}, "item": {"oov": 1}}
    want = {"missing": 2, "nan": 1, "inf": 1, "huge": 0, "negative": 1, "oov": 1}
    assert report["totals"] == want


RISING = np.arange(1.0, 101)


@pytest.mark.parametrize(
    ("values", "options", "cause"),
    [
        (1.7e9 + RISING, {}, "it is constant, 21.2539 after --data.transform log1p"),
        (np.full(100, 3), {"transform": ("standardize",)}, "it is constant, 0 after"),
        (pa.nulls(100), {}, "all its values are missing"),
        ([None, np.nan] * 50, {}, "all its values are missing"),
        ([np.inf, -1e15] * 50, {}, "all its values lie beyond 1e.12"),
        (RISING, {}, None),
        ([None, 1.0] * 50, {}, None),
    ],
)
def test_a_dense_column_of_which_nothing_is_left_is_named(
    tmp_path, values, options, cause
):
    columns = {"click": [0, 1] * 50, "price": pa.array(values), "age": RISING}
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    report = open_table(tmp_path / "a.parquet", categorical=(), **options).report
    said = [note for note in report["notes"] if note.startswith("Warning")]
    assert len(said) == (cause is not None)
    if cause:
        assert re.search(
            f"nothing is left of dense column 'price' .*: {cause}", said[0]
        )
