"""An encoding outlives the files that it was learned from, and keeps every id."""

import dataclasses

import chex
import pytest

from loka_jax.data import open_data
from loka_jax.data.encoding import VocabularyEncoder
from loka_jax.data.saved_encoding import (
    digest_of,
    load_encoding,
    open_encoding,
    save_encoding,
    values_of,
)
from tests.support.data import (
    HEADER,
    criteo_line,
    open_table,
    rows_of,
    rows_text,
    table_config,
    write,
)


def folder_of(splits):
    assert splits.folder is not None
    return splits.folder


def saved(folder, tmp_path):
    save_encoding(folder, tmp_path / "encoding")
    return open_encoding(tmp_path / "encoding", digest_of(folder))


@pytest.mark.parametrize(
    "options",
    [
        {"transform": "standardize", "min_count": 30},
        {"encoding": "hash", "hash_buckets": 20, "negative": "clip"},
        {"dense": (), "reserve_rows": 3},
        {"categorical": ()},
    ],
    ids=["standardize", "hash", "reserved", "dense"],
)
def test_a_saved_encoding_is_the_one_that_was_learned(tmp_path, options):
    source = write(tmp_path / "a.csv", HEADER + rows_text(300))
    learned = folder_of(open_table(source, **options))
    again = saved(learned, tmp_path)
    assert digest_of(again) == digest_of(learned)
    assert not any(again.shards.values())
    encoding = load_encoding(again)
    assert encoding.schema == learned.schema
    config = table_config(source, **options)
    assert encoding.config == dataclasses.replace(config, path=None, cache=None)


def test_ids_stay_when_the_file_changes(tmp_path):
    source = write(tmp_path / "a.csv", HEADER + rows_text(300))
    first = open_table(source)
    base, before = saved(folder_of(first), tmp_path), rows_of(first).ids
    # Other values become the most frequent ones, and some are new.
    more = "".join(f"0,1,1,u{i % 9},{10 + i % 3}\n" for i in range(3000))
    write(tmp_path / "a.csv", HEADER + rows_text(300) + more)
    splits = open_data(table_config(source), seed=0, base=base)
    assert splits.encoding_digest == digest_of(base)
    chex.assert_trees_all_equal(rows_of(splits).ids[: len(before)], before)
    assert splits.report["splits"]["train"]["columns"]["user"]["oov"] > 0


def test_ids_have_the_names_of_their_values(tmp_path):
    source = write(tmp_path / "a.csv", HEADER + rows_text(300))
    splits = open_table(source, reserve_rows=1)
    folder = saved(folder_of(splits), tmp_path)
    encoder = load_encoding(folder).encoders[0]
    assert isinstance(encoder, VocabularyEncoder)
    values = encoder.values.to_pylist()
    ids = range(len(values) + 2)  # the last one is reserved
    assert values_of(folder, {"user": ids})["user"] == [None, *values, None]
    hashed = folder_of(open_table(source, encoding="hash"))
    assert values_of(hashed, {"user": [0, 1]})["user"] == [None, None]


def test_a_resumed_run_converts_nothing_twice(tmp_path):
    source = write(tmp_path / "a.csv", HEADER + rows_text(300))
    base = saved(folder_of(open_table(source)), tmp_path)
    open_data(table_config(source), seed=0, base=base)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_criteos_columns_are_saved(tmp_path):
    text = "".join(criteo_line(label=str(i % 2)) for i in range(30))
    source = write(tmp_path / "train.txt", text)
    config = table_config(source, kind="criteo", dense=(), categorical=())
    learned = open_data(config, seed=0)
    encoding = load_encoding(saved(learned.folder, tmp_path))
    assert encoding.config.kind == "criteo"
    assert encoding.schema == learned.train.schema


def test_values_of_later_days_get_reserved_rows(tmp_path):
    source = write(tmp_path / "a.csv", HEADER + rows_text(300))
    first = open_table(source, reserve_rows=2)
    assert first.train.schema.vocab_sizes == (1 + 7 + 2, 1 + 11 + 2)
    values = ["a", "a", "b", "b", "b", "c", "u1"] * 40
    day = "".join(f"{i % 2},1,1,{value},i1\n" for i, value in enumerate(values))
    later = write(tmp_path / "b.csv", HEADER + day)
    base = saved(folder_of(first), tmp_path)
    second = open_data(table_config(later, reserve_rows=2), seed=0, base=base)
    assert second.train.schema == first.train.schema
    (known, _), (users, items) = (
        load_encoding(folder).encoders for folder in (base, folder_of(second))
    )
    assert isinstance(known, VocabularyEncoder)
    assert isinstance(users, VocabularyEncoder) and isinstance(items, VocabularyEncoder)
    assert users.values.to_pylist() == [*known.values.to_pylist(), "b", "a"]
    assert (users.reserved, items.reserved) == (0, 2)
    assert second.encoding_digest != digest_of(base)
