"""Every type of Parquet's columns is read, or refused in one sentence."""

import datetime
import decimal
import uuid

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.support.data import open_table, rows_of

COUNT = 200
WORDS = ["a", None, "", "a text that is longer than 12 bytes", "ü", "a"] * COUNT
BYTES = [None if word is None else word.encode() for word in WORDS]


def opened(folder, *, name="item", column, **options):
    """Opens rows with a column of some type in place of a usual one."""
    folder.mkdir(exist_ok=True)
    index = np.arange(1, COUNT + 1)
    columns = {"click": index % 2, "price": index, "age": index, "user": index}
    table = pa.table(columns | {"item": index} | {name: column})
    parquet.write_table(table, folder / "a.parquet", **options)
    return open_table(folder / "a.parquet")


@pytest.mark.parametrize("encoding", ["vocabulary", "hash"])
@pytest.mark.parametrize(
    "column",
    [
        pa.array(WORDS[:COUNT], pa.large_string()),
        pa.array(WORDS[:COUNT], pa.string_view()),
        pa.array(WORDS[:COUNT]).dictionary_encode(),
        pa.array(WORDS[:COUNT], pa.large_string()).dictionary_encode(),
        pa.chunked_array([WORDS[:50], WORDS[50:COUNT]]),
        pa.ExtensionArray.from_storage(pa.json_(), pa.array(WORDS[:COUNT])),
        pa.ExtensionArray.from_storage(
            pa.json_(pa.string_view()), pa.array(WORDS[:COUNT], pa.string_view())
        ),
    ],
    ids=lambda column: str(column.type),
)
def test_text_of_every_type_gives_the_same_ids(tmp_path, column, encoding):
    want = opened(tmp_path / "a", column=pa.array(WORDS[:COUNT]))
    got = opened(tmp_path / "b", column=column)
    assert got.identity == want.identity
    assert np.array_equal(rows_of(got).ids, rows_of(want).ids)


@pytest.mark.parametrize(
    "kind",
    [pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int32(), pa.binary())],
)
def test_bytes_of_every_type_give_the_same_ids(tmp_path, kind):
    column = pa.array(BYTES[:COUNT])
    want = opened(tmp_path / "a", column=column)
    assert opened(tmp_path / "b", column=column.cast(kind)).identity == want.identity


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1.5, None] * 100, pa.float32()),
        pa.array([1.5, None] * 100),
        pa.array(np.array([1.5, 0] * 100, np.float16)),
        pa.array([1, None] * 100, pa.uint8()),
        pa.array([1, None] * 100).dictionary_encode(),
        pa.array([True, None] * 100),
        pa.nulls(COUNT),
        pa.array([decimal.Decimal("1.5"), None] * 100, pa.decimal32(5, 1)),
        pa.array([decimal.Decimal("1.5"), None] * 100, pa.decimal256(50, 2)),
        pa.array(["1.5", None] * 100, pa.string_view()),
        pa.array([" 1.5", "NA"] * 100).dictionary_encode(),
    ],
    ids=lambda column: str(column.type),
)
def test_numbers_of_every_type_are_read(tmp_path, column):
    splits = opened(tmp_path, name="price", column=column)
    want = 0 if column.null_count == COUNT else np.log1p(float(column[0].as_py()))
    assert splits.train.num_examples + splits.valid.num_examples == COUNT
    assert rows_of(splits).dense[:, 0].max() == pytest.approx(want)


NO_TEXT = {
    "list": pa.array([[1], None] * 100),
    "large_list": pa.array([[1], None] * 100, pa.large_list(pa.int8())),
    "fixed_size_list": pa.array([[1, 2], None] * 100, pa.list_(pa.int8(), 2)),
    "struct": pa.array([{"a": 1}, None] * 100),
    "map": pa.array([[("a", 1)], None] * 100, pa.map_(pa.string(), pa.int8())),
    "list of text": pa.array([["a"], None] * 100),
}
NO_NUMBERS = NO_TEXT | {
    "binary": pa.array([b"1", None] * 100),
    "binary_view": pa.array([b"1", None] * 100, pa.binary_view()),
    "fixed_size_binary": pa.array([b"1", None] * 100, pa.binary(1)),
    "uuid": pa.array([uuid.UUID(int=1).bytes, None] * 100, pa.uuid()),
    "timestamp": pa.array([datetime.datetime(2000, 1, 1), None] * 100),
    "date": pa.array([datetime.date(2000, 1, 1), None] * 100),
    "time": pa.array([datetime.time(1), None] * 100),
    "text": pa.array(["no number", None] * 100, pa.string_view()),
}


@pytest.mark.parametrize("kind", NO_TEXT)
def test_what_has_no_text_is_refused(tmp_path, kind):
    with pytest.raises(
        ValueError, match=r"a.parquet column 'item' holds .*leave it out"
    ):
        opened(tmp_path, column=NO_TEXT[kind])


@pytest.mark.parametrize("kind", NO_NUMBERS)
def test_what_is_no_number_is_refused(tmp_path, kind):
    with pytest.raises(
        ValueError, match=r"a.parquet .*column 'price' holds .*(not a?|neither) ?n"
    ):
        opened(tmp_path, name="price", column=NO_NUMBERS[kind])


@pytest.mark.parametrize("use_dictionary", [True, False])
@pytest.mark.parametrize("name", ["item", "price"])
def test_text_that_is_not_utf8_is_refused(tmp_path, use_dictionary, name):
    column = pa.array([b"1", b"\xff\xfe"] * 100).view(pa.string())
    with pytest.raises(ValueError, match="a.parquet cannot be read: .*UTF-?8"):
        opened(tmp_path, name=name, column=column, use_dictionary=use_dictionary)


def test_columns_that_are_not_asked_for_may_hold_anything(tmp_path):
    splits = opened(tmp_path, name="more", column=NO_TEXT["struct"])
    assert splits.train.num_examples


def test_a_message_stays_on_one_line(tmp_path):
    names = "two\nlines", "escape\x1b[31m"
    with pytest.raises(ValueError, match="has no column 'price', only") as error:
        parquet.write_table(pa.table({name: [1] for name in names}), tmp_path / "a.pq")
        open_table(tmp_path / "a.pq", label=names[0])
    assert str(error.value).isprintable()
    column = pa.array([{names[0]: 1}] * COUNT)
    with pytest.raises(ValueError, match="column 'item' holds struct") as error:
        opened(tmp_path / "b", column=column)
    assert str(error.value).isprintable()
