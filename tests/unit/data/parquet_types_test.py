"""Every type of Parquet's columns is read, or refused in one sentence."""

import datetime
import decimal
import uuid

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from loka_jax.data import parquet as parquet_lib
from tests.support.data import open_table, rows_of

COUNT = 200
WORDS = ["a", None, "", "a text that is longer than 12 bytes", "ü", "a"] * COUNT
WORDS = pa.array(WORDS[:COUNT])
BYTES, VIEWS = WORDS.cast(pa.binary()), WORDS.cast(pa.string_view())


def opened(folder, *, name="item", column, data=None, **options):
    """Opens rows with a column of some type in place of a usual one."""
    folder.mkdir(exist_ok=True)
    index = np.arange(1, COUNT + 1)
    columns = {"click": index % 2, "price": index, "age": index, "user": index}
    table = pa.table(columns | {"item": index} | {name: column})
    parquet.write_table(table, folder / "a.parquet", **options)
    return open_table(folder / "a.parquet", **(data or {}))


@pytest.mark.parametrize(
    "column",
    [
        VIEWS,
        WORDS.dictionary_encode(),
        pa.chunked_array([WORDS[:50], WORDS[50:]]),
        pa.ExtensionArray.from_storage(pa.json_(pa.string_view()), VIEWS),
        BYTES.cast(pa.binary_view()),
        BYTES.dictionary_encode(),
    ],
    ids=lambda column: str(column.type),
)
def test_text_and_bytes_of_every_type_give_the_same_ids(tmp_path, column):
    plain = BYTES if "binary" in str(column.type) else WORDS
    want = opened(tmp_path / "a", column=plain)
    got = opened(tmp_path / "b", column=column)
    assert got.identity == want.identity
    assert np.array_equal(rows_of(got).ids, rows_of(want).ids)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1.5, None] * 100, pa.float32()),
        pa.array(np.array([1.5, 0] * 100, np.float16)),
        pa.array([1, None] * 100).dictionary_encode(),
        pa.array([True, None] * 100),
        pa.nulls(COUNT),
        pa.array([decimal.Decimal("1.5"), None] * 100, pa.decimal256(50, 2)),
        pa.array([" 1.5", "NA"] * 100, pa.string_view()),
    ],
    ids=lambda column: str(column.type),
)
def test_numbers_of_every_type_are_read(tmp_path, column):
    splits = opened(tmp_path, name="price", column=column)
    want = 0 if column.null_count == COUNT else np.log1p(float(column[0].as_py()))
    assert splits.train.num_examples + splits.valid.num_examples == COUNT
    assert rows_of(splits).dense[:, 0].max() == pytest.approx(want)


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_text_in_delta_encodings_is_read(tmp_path, encoding):
    want = opened(tmp_path / "a", column=WORDS)
    options = {"use_dictionary": False, "column_encoding": {"item": encoding}}
    assert opened(tmp_path / "b", column=WORDS, **options).identity == want.identity


def test_rows_before_a_delta_encoding_are_read_once(tmp_path, monkeypatch):
    decoded = parquet_lib._decoded

    def begins_late(path, metadata, names, rows, leaves):
        for at, batch in enumerate(decoded(path, metadata, names, rows, leaves)):
            if leaves and at == 3:
                raise OSError("Not yet implemented: DecodeArrow of DictAccumulator")
            yield batch

    want = opened(tmp_path / "a", column=WORDS)
    monkeypatch.setattr(parquet_lib, "_decoded", begins_late)
    assert opened(tmp_path / "b", column=WORDS).identity == want.identity


@pytest.mark.parametrize("fixed", [pa.uuid(), pa.binary(16)])
def test_uuids_are_read_as_their_bytes(tmp_path, fixed):
    numbers = [uuid.UUID(int=i % 3).bytes for i in range(COUNT)]
    want = opened(tmp_path / "a", column=pa.array(numbers, pa.binary()))
    got = opened(tmp_path / "b", column=pa.array(numbers, fixed))
    assert got.identity == want.identity
    top = got.report["categorical"]["item"]["most_frequent"]
    assert {value for value, _ in top} == {f"{i:032x}" for i in range(3)}


@pytest.mark.parametrize("values", [[[]], [None], [[None], None]])
def test_lists_of_nothing_are_empty(tmp_path, values):
    lists = pa.array(values * (COUNT // len(values)), pa.list_(pa.null()))
    options = {"multi": ("item",), "categorical": ("user",)}
    (bag,) = rows_of(opened(tmp_path, column=lists, data=options)).bags
    assert (bag.ids == -1).all()


NO_TEXT = [
    pa.array([[1], None] * 100, pa.large_list(pa.int8())),
    pa.array([[1, 2], None] * 100, pa.list_(pa.int8(), 2)),
    pa.array([{"two\nlines": 1}, None] * 100),
    pa.array([[("a", 1)], None] * 100, pa.map_(pa.string(), pa.int8())),
    pa.array([["a"], None] * 100),
]
NO_NUMBERS = [
    *NO_TEXT,
    pa.array([b"1", None] * 100, pa.binary_view()),
    pa.array([uuid.UUID(int=1).bytes, None] * 100, pa.uuid()),
    pa.array([datetime.datetime(2000, 1, 1), None] * 100),
    pa.array(["no number", None] * 100, pa.string_view()),
]


@pytest.mark.parametrize(
    ("name", "column", "why"),
    [
        *(("item", column, "leave it out") for column in NO_TEXT),
        *(("price", column, "(not a?|neither) ?n") for column in NO_NUMBERS),
    ],
    ids=str,
)
def test_what_has_no_text_or_is_no_number_is_refused(tmp_path, name, column, why):
    match = f"a.parquet .*column '{name}' holds .*{why}"
    with pytest.raises(ValueError, match=match) as error:
        opened(tmp_path, name=name, column=column)
    assert str(error.value).isprintable()
    splits = opened(tmp_path, name="more", column=column)  # not asked for
    assert splits.train.num_examples


@pytest.mark.parametrize("name", ["item", "price"])
def test_text_that_is_not_utf8_is_refused(tmp_path, name):
    column = pa.array([b"1", b"\xff\xfe"] * 100).view(pa.string())
    with pytest.raises(ValueError, match="a.parquet cannot be read: .*UTF-?8"):
        opened(tmp_path, name=name, column=column, use_dictionary=name == "item")
