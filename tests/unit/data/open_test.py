"""Opening data: the split rule, the cache, shards, and options that contradict them."""

import dataclasses
import functools
import json

import chex
import numpy as np
import pytest

from loka_jax.cache_folder import cache_folder
from loka_jax.data import DataConfig, Position, open_data
from loka_jax.data.convert import convert
from loka_jax.data.files import find_sources
from loka_jax.data.manifest import MANIFEST
from loka_jax.data.split import hashed
from loka_jax.data.text import read_text
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
    return write(tmp_path / "clicks.csv", HEADER + rows_text(400))


@pytest.fixture
def shards(source, tmp_path):
    config = table_config(source)
    convert(config, find_sources(config), tmp_path / "shards")
    return tmp_path / "shards"


def cached(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache").iterdir())


def test_split_off_rows_are_those_of_the_stated_rule(source):
    splits = open_table(source, transform="none")
    assert "hashed row number" in splits.report["split_rule"]
    # The price of a row is its number, counted from 1.
    chosen = np.flatnonzero(hashed(np.arange(400), 0) < 0.1) + 1
    assert np.array_equal(rows_of(splits, "valid").dense[:, 0], chosen)
    assert splits.train.num_examples == 400 - len(chosen)


def test_the_split_rule_takes_about_its_fraction_and_grows_with_it():
    row = np.arange(100_000)
    tenth, fifth = hashed(row, 0) < 0.1, hashed(row, 0) < 0.2
    assert abs(tenth.mean() - 0.1) < 0.004 and abs(fifth.mean() - 0.2) < 0.005
    assert not (tenth & ~fifth).any()


def test_given_validation_file_is_used_whole(source, tmp_path):
    valid = write(tmp_path / "held.csv", HEADER + rows_text(30))
    splits = open_table(source, valid=valid)
    assert (splits.train.num_examples, splits.valid.num_examples) == (400, 30)
    assert splits.test is None
    assert "held.csv" in splits.report["split_rule"]


def test_folder_gives_all_three_splits(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    for name, count in (("train", 40), ("valid", 20), ("test", 10)):
        write(folder / f"{name}.csv", HEADER + rows_text(count))
    splits = open_table(folder)
    assert splits.test is not None
    assert splits.report["examples"] == {"train": 40, "valid": 20, "test": 10}


def test_several_training_files_are_read_as_one(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    write(folder / "train-0.csv", HEADER + rows_text(200))
    write(folder / "train-1.csv", HEADER + rows_text(200))
    two = open_table(folder)
    one = open_table(
        write(tmp_path / "one.csv", HEADER + rows_text(200) + rows_text(200))
    )
    chex.assert_trees_all_equal(rows_of(two), rows_of(one))


def test_report_is_json(source):
    report = open_table(source).report
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_validation_rows_with_one_class_only_are_allowed(source, tmp_path):
    valid = write(tmp_path / "valid.csv", HEADER + "1,2,3,a,b\n" * 5)
    splits = open_table(source, valid=valid)
    assert rows_of(splits, "valid").labels.tolist() == [1.0] * 5


def test_no_features_are_refused_before_anything_is_read(source):
    with pytest.raises(ValueError, match="no features.*--data.dense"):
        open_table(source, dense=(), categorical=())


def test_label_among_the_features_is_refused(source):
    with pytest.raises(ValueError, match="'click' is named more than once"):
        open_table(source, dense=("click",))


def test_no_validation_rows_at_all_are_refused(source):
    with pytest.raises(ValueError, match="no validation rows.*--data.valid"):
        open_table(source, valid_fraction=0.0)


def test_too_few_rows_to_split_are_told(tmp_path):
    path = write(tmp_path / "a.csv", HEADER + "1,1,1,a,b\n")
    with pytest.raises(ValueError, match="fell into the validation split"):
        open_table(path)


def test_second_opening_uses_the_cache(source, tmp_path):
    first = open_table(source)
    times = (tmp_path / "cache" / cached(tmp_path)[0] / MANIFEST).stat().st_mtime_ns
    again = open_table(source)
    (name,) = cached(tmp_path)
    manifest = tmp_path / "cache" / name / MANIFEST
    assert manifest.stat().st_mtime_ns == times
    chex.assert_trees_all_equal(rows_of(first), rows_of(again))


def test_changed_file_is_converted_again(source, tmp_path):
    open_table(source)
    write(tmp_path / "clicks.csv", HEADER + rows_text(401))
    assert sum(open_table(source).report["examples"].values()) == 401


@pytest.mark.parametrize(
    "option", [{"transform": "none"}, {"encoding": "hash"}, {"dense": ("price",)}]
)
def test_changed_option_is_converted_again(source, tmp_path, option):
    open_table(source)
    open_table(source, **option)
    assert len(cached(tmp_path)) == 2


def test_damaged_cache_is_made_again(source, tmp_path):
    want = rows_of(open_table(source))
    (name,) = cached(tmp_path)
    (tmp_path / "cache" / name / "train-00000.npy").write_bytes(b"junk")
    chex.assert_trees_all_equal(rows_of(open_table(source)), want)


def test_default_cache_is_private_and_under_the_users(source, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    open_table(source, cache=None)
    root = tmp_path / "home" / "loka_jax" / "data"
    assert root.stat().st_mode & 0o777 == 0o700
    assert len(list(root.iterdir())) == 1


def test_unusable_home_falls_back_to_a_temporary_folder(source, tmp_path, monkeypatch):
    write(tmp_path / "file", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "below"))
    splits = open_table(source, cache=None)
    assert sum(splits.report["examples"].values()) == 400
    assert cache_folder("data") == cache_folder("data") != cache_folder("dispatch")
    assert len(list(cache_folder("data").iterdir())) == 1


def test_shards_open_directly_and_equal_the_cache(source, shards):
    config = DataConfig(kind="table", path=str(shards))
    chex.assert_trees_all_equal(
        rows_of(open_data(config, seed=0)), rows_of(open_table(source))
    )


def test_many_shards_equal_one(source, shards, tmp_path, monkeypatch):
    monkeypatch.setattr("loka_jax.data.shards.SHARD_ROWS", 50)
    small_blocks = functools.partial(read_text, block_bytes=500)
    monkeypatch.setattr("loka_jax.data.table.read_text", small_blocks)
    config = table_config(source)
    convert(config, find_sources(config), tmp_path / "many")
    assert len(list((tmp_path / "many").glob("train-*.npy"))) > 4
    many, one = (
        open_data(DataConfig(kind="table", path=str(path)), seed=0).train.batch(
            Position(1, 2, 3), 64, shuffle=True
        )
        for path in (tmp_path / "many", shards)
    )
    chex.assert_trees_all_equal(many, one)


def test_options_that_equal_the_shards_are_fine(shards):
    config = table_config(shards)
    assert open_data(config, seed=0).train.schema.dense == ("price", "age")


@pytest.mark.parametrize(
    ("option", "value"),
    [("encoding", "hash"), ("dense", ("age",)), ("label", "buy"), ("min_count", 5)],
)
def test_options_that_contradict_the_shards_are_refused(shards, option, value):
    config = dataclasses.replace(table_config(shards), **{option: value})
    with pytest.raises(ValueError, match=f"was converted with {option} .* convert the"):
        open_data(config, seed=0)


def test_validation_file_beside_shards_is_refused(shards, source):
    config = table_config(shards, valid=source)
    with pytest.raises(ValueError, match="leave out --data.valid"):
        open_data(config, seed=0)
