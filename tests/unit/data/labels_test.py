"""Several label columns, from the file to the batch."""

import numpy as np
import pytest

from loka_jax.data import DataConfig, Position
from loka_jax.data.shards import record_dtype, record_dtype_of
from tests.support.data import open_table, rows_of, write

COLUMNS = {"dense": ("row",), "categorical": ("user",), "transform": "none"}
LABELS = ("click", "buy")


def csv_of(buy, folder):
    """Rows whose click is the row's number modulo 2."""
    rows = (f"{i % 2},{value},{i},u{i % 3}\n" for i, value in enumerate(buy))
    return write(folder / "clicks.csv", "click,buy,row,user\n" + "".join(rows))


def test_labels_come_in_the_order_of_the_option(tmp_path):
    path = csv_of([int(i % 6 == 5) for i in range(100)], tmp_path)
    for labels in (LABELS, LABELS[::-1]):
        splits = open_table(path, label=labels[0], labels=labels, **COLUMNS)
        batch = rows_of(splits)
        row = batch.dense[:, 0].astype(int)
        expected = {"click": row % 2, "buy": row % 6 == 5}
        assert batch.labels.dtype == np.float32
        for task, name in enumerate(labels):
            assert np.array_equal(batch.labels[:, task], expected[name])
        assert splits.train.schema.labels == labels
        counts = splits.report["splits"]["train"]
        assert counts["positives"] == {k: v.sum() for k, v in expected.items()}


@pytest.mark.parametrize("missing", ["", "nan", "NA"])
def test_a_row_may_lack_a_label(tmp_path, missing):
    path = csv_of([1, missing, 0, missing] * 25, tmp_path)
    splits = open_table(path, labels=LABELS, **COLUMNS)
    batch = rows_of(splits)
    row = batch.dense[:, 0].astype(int)
    expected = np.choose(row % 4, [1, np.nan, 0, np.nan])
    assert np.array_equal(batch.labels[:, 1], expected, equal_nan=True)
    lacking = np.isnan(expected).sum()
    assert splits.report["notes"] == [
        f"{lacking} training rows have no label 'buy' and count for the other tasks "
        "only."
    ]


def test_one_label_may_not_be_missing(tmp_path):
    path = csv_of([1, "", 0, 1], tmp_path)
    with pytest.raises(ValueError, match="row 2 has no value in label column 'buy'"):
        open_table(path, label="buy", **COLUMNS)


def test_a_task_without_any_label_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'buy' has no label in any train row"):
        open_table(csv_of([""] * 50, tmp_path), labels=LABELS, **COLUMNS)


def test_text_is_no_label_and_may_be_mended(tmp_path):
    path = csv_of(["True"] * 20, tmp_path)
    with pytest.raises(ValueError, match="'True', not a number: .* labels as 0 and 1"):
        open_table(path, label="buy", **COLUMNS)


def test_what_is_no_label_is_refused_with_its_row(tmp_path):
    path = csv_of([1, 0, 2, 1], tmp_path)
    with pytest.raises(ValueError, match="clicks.csv row 3 has 2 in label column 'bu"):
        open_table(path, labels=LABELS, **COLUMNS)


def test_one_name_among_labels_is_one_label(tmp_path):
    path = csv_of([1, 0] * 50, tmp_path)
    one = open_table(path, label="buy", **COLUMNS)
    same = open_table(path, label="buy", labels=("buy",), **COLUMNS)
    assert one.identity == same.identity
    assert rows_of(same).labels.ndim == 1
    dtype = record_dtype_of(one.train.schema)
    assert dtype == record_dtype(1, 1)  # as ever: older shards can be read


def test_a_negative_has_no_label_that_is_1(tmp_path):
    path = csv_of([int(i % 6 == 4) for i in range(600)], tmp_path)
    splits = open_table(path, labels=LABELS, keep_negatives=1e-6, **COLUMNS)
    batch = rows_of(splits)
    assert (batch.labels == 1).any(axis=1).all()
    assert set(batch.weights) == {1.0}
    assert set(batch.dense[:, 0] % 6) == {1, 3, 4, 5}


def test_a_stored_label_is_checked_again(tmp_path):
    path = csv_of([1, 0] * 50, tmp_path)
    train = open_table(path, labels=LABELS, **COLUMNS).train
    words = train._words[0].copy()
    words.view(np.float32)[5, 1] = 3
    train._words = [words]
    with pytest.raises(ValueError, match="holds the label 3"):
        train.batch(Position(0, 0, 0), train.num_examples, shuffle=False)


def test_contradicting_options_are_refused():
    with pytest.raises(ValueError, match="name labels twice: leave out --data.label"):
        DataConfig(kind="table", label="view", labels=LABELS)
    with pytest.raises(ValueError, match="both label and weight"):
        DataConfig(kind="table", labels=LABELS, weight="buy")
    with pytest.raises(ValueError, match="--data.labels names a column of a table"):
        DataConfig(labels=LABELS)
