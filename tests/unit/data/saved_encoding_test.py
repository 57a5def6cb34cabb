"""An encoding outlives the files that it was learned from, and keeps every id."""

import dataclasses
import json

import chex
import pytest

from loka_jax.data import open_data
from loka_jax.data.convert import convert
from loka_jax.data.encoding import VocabularyEncoder
from loka_jax.data.files import find_sources
from loka_jax.data.saved_encoding import (
    digest_of,
    load_encoding,
    open_encoding,
    save_encoding,
    values_of,
)
from loka_jax.data.shards import MANIFEST, open_shards
from tests.support.data import (
    HEADER,
    open_table,
    rows_of,
    rows_text,
    table_config,
    write,
)


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "a.csv", HEADER + rows_text(300))


def saved(splits, tmp_path):
    """Returns the encoding of the splits, from a folder of its own."""
    save_encoding(splits.folder, tmp_path / "encoding")
    return open_encoding(tmp_path / "encoding", digest_of(splits.folder))


def values(encoder):
    assert isinstance(encoder, VocabularyEncoder)
    return encoder.values.to_pylist()


@pytest.mark.parametrize(
    "options",
    [
        {"transform": ("standardize",), "min_count": 30},
        {"transform": ("price=log1p,standardize,clip:-2:2", "age=buckets:4,missing")},
        {"encoding": "hash", "hash_buckets": 20, "bad": "strict"},
        {"dense": (), "reserve_rows": 3, "share": ("item=user",)},
        {"categorical": ("price",), "hashed": ("price",), "hash_sizes": ("price=12",)}
        | {"dense": ()},
        {"multi": ("item",), "separator": "0"} | {"categorical": ("user",)},
    ],
    ids=str,
)
def test_a_saved_encoding_is_the_one_that_was_learned(source, tmp_path, options):
    learned = open_table(source, **options)
    again = saved(learned, tmp_path)
    assert digest_of(again) == learned.encoding_digest
    assert not again.records
    assert load_encoding(again).schema == learned.train.schema
    config = table_config(source, **options)
    want = dataclasses.replace(config, path=None, cache=None)
    assert load_encoding(again).config == want
    other = {"cache": str(tmp_path / "other")} | options
    splits = open_data(table_config(source, **other), seed=0, base=again)
    for split in ("train", "valid"):
        chex.assert_trees_all_equal(rows_of(splits, split), rows_of(learned, split))


def test_ids_stay_when_the_file_changes(source, tmp_path):
    first = open_table(source)
    base, before = saved(first, tmp_path), rows_of(first).ids
    open_data(table_config(source), seed=0, base=base)
    assert len(list((tmp_path / "cache").iterdir())) == 1  # nothing is converted twice
    # Other values become the most frequent ones, and some are new.
    more = "".join(f"0,1,1,u{i % 9},{10 + i % 3}\n" for i in range(3000))
    write(tmp_path / "a.csv", HEADER + rows_text(300) + more)
    splits = open_data(table_config(source), seed=0, base=base)
    assert splits.encoding_digest == digest_of(base)
    chex.assert_trees_all_equal(rows_of(splits).ids[: len(before)], before)
    assert splits.report["splits"]["train"]["columns"]["user"]["oov"] > 0


def test_ids_have_the_names_of_their_values(source, tmp_path):
    folder = saved(open_table(source, reserve_rows=1), tmp_path)
    user, item = map(values, load_encoding(folder).encoders)
    ids = range(len(user) + 2)  # the last one is reserved
    found = values_of(folder, {"user": ids, "item": [2, 1]})
    assert found == {"user": [None, *user, None], "item": [item[1], item[0]]}
    hashed = open_table(source, encoding="hash").folder
    assert values_of(hashed, {"user": [0, 1]}) == {"user": [None, None], "item": []}


def test_values_of_later_days_get_reserved_rows(source, tmp_path):
    first = open_table(source, reserve_rows=2)
    assert first.train.schema.vocab_sizes == (1 + 7 + 2, 1 + 11 + 2)
    users = ["a", "a", "b", "b", "b", "c", "u1"] * 40
    day = "".join(f"{i % 2},1,1,{user},i1\n" for i, user in enumerate(users))
    later = write(tmp_path / "b.csv", HEADER + day)
    base = saved(first, tmp_path)
    second = open_data(table_config(later, reserve_rows=2), seed=0, base=base)
    assert second.train.schema == first.train.schema
    known, _ = load_encoding(base).encoders
    user, item = load_encoding(second.folder).encoders
    assert values(user) == [*values(known), "b", "a"]
    assert (user.reserved, item.reserved) == (0, 2)
    assert second.encoding_digest != digest_of(base)
    facts = second.report["categorical"].values()
    assert [(x["new_values"], x["new_rows"]) for x in facts] == [(3, 2), (0, 0)]


def test_options_that_contradict_the_encoding_are_refused(source, tmp_path):
    base = saved(open_table(source), tmp_path)
    why = "encodes with bad clean, not strict: .* a new run"
    with pytest.raises(ValueError, match=why):
        open_data(table_config(source, bad="strict"), seed=0, base=base)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("bad", "drop", r"config.bad is wrong \(.*'drop'"),
        ("time", 5, "Expected str . null, got int"),
        ("min_count", 0, "must lie between"),
        ("hash_sizes", ["user=99"], "'user' has not 99 rows"),
    ],
)
def test_settings_of_a_stranger_are_refused(source, tmp_path, name, value, why):
    folder = saved(open_table(source), tmp_path).path
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["config"][name] = value
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=rf"cannot be used \(.*{why}"):
        load_encoding(open_shards(folder))


def test_an_encoding_is_compared_with_what_the_checkpoint_names(source, tmp_path):
    base = saved(open_table(source), tmp_path)
    with pytest.raises(ValueError, match="not the one that the checkpoint was trained"):
        open_encoding(base.path, "another")
    (base.path / "vocabulary-00.parquet").unlink()
    lost = "the encoding of the run, cannot be used .it is missing.: restore it from"
    with pytest.raises(ValueError, match=lost):
        open_encoding(base.path, digest_of(base))


def test_shards_of_another_vocabulary_are_refused(source, tmp_path):
    base = saved(open_table(source), tmp_path)
    config = table_config(write(tmp_path / "b.csv", HEADER + rows_text(400)))
    shards = tmp_path / "shards"
    convert(config, find_sources(config), shards)
    with pytest.raises(ValueError, match="converted with another vocabulary than the"):
        open_data(table_config(shards), seed=0, base=base)
    base = open_encoding(shards, digest_of(open_shards(shards)))
    assert open_data(table_config(shards), seed=0, base=base).encoding_digest
