"""Which file is which split; opening them: rules, the cache, and contradictions."""

import json

import chex
import numpy as np
import pytest

from loka_jax.data import DataConfig, Position, open_data
from loka_jax.data import open as open_lib
from loka_jax.data.convert import convert
from loka_jax.data.files import find_sources
from loka_jax.data.shards import MANIFEST
from loka_jax.data.split import hashed
from tests.support.data import HEADER, open_table, rows_of, rows_text, table_config
from tests.support.data import write as write_text


@pytest.fixture
def source(tmp_path):
    return write_text(tmp_path / "clicks.csv", HEADER + rows_text(400))


@pytest.fixture
def shards(source, tmp_path):
    config = table_config(source)
    convert(config, find_sources(config), tmp_path / "shards")
    return tmp_path / "shards"


def write(folder, name, count):
    folder.mkdir(exist_ok=True)
    return write_text(folder / name, HEADER + rows_text(count))


def cached(tmp_path):
    return sorted((tmp_path / "cache").iterdir())


def test_split_off_rows_are_those_of_the_stated_rule(source):
    splits = open_table(source, transform=("none",))
    assert "hashed row number" in splits.report["split_rule"]
    # The price of a row is its number, counted from 1.
    chosen = np.flatnonzero(hashed(np.arange(400), 0) < 0.1) + 1
    assert np.array_equal(rows_of(splits, "valid").dense[:, 0], chosen)
    assert splits.train.num_examples == 400 - len(chosen)
    # The same forever.
    found = [hashed(np.arange(2), stream).round(6).tolist() for stream in (0, 1)]
    assert found == [[0.38389, 0.706601], [0.560023, 0.724253]]


def test_files_of_splits_are_used_whole_and_several_are_read_as_one(tmp_path):
    for name, count in (("train-0", 200), ("train-1", 90), ("valid", 20), ("test", 10)):
        write(tmp_path / "logs", f"{name}.csv", count)
    splits = open_table(tmp_path / "logs")
    report = splits.report
    assert report["examples"] == {"train": 290, "valid": 20, "test": 10}
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    parts = [(x["files"], x["positives"]) for x in report["splits"].values()]
    train = ["train-0.csv", "train-1.csv"]
    assert parts == [(train, 145), (["valid.csv"], 10), (["test.csv"], 5)]
    text = HEADER + rows_text(200) + rows_text(90)
    path = write_text(tmp_path / "one.csv", text)
    one_class = write_text(tmp_path / "ones.csv", HEADER + "1,2,3,a,b\n" * 5)
    one = open_table(path, valid=one_class)
    assert "ones.csv" in one.report["split_rule"] and one.test is None
    chex.assert_trees_all_equal(rows_of(splits), rows_of(one))
    assert rows_of(one, "valid").labels.tolist() == [1.0] * 5


@pytest.mark.parametrize(
    ("rows", "options", "why"),
    [
        (9, {"valid_fraction": 0.0}, "no validation rows.*--data.valid"),
        (1, {}, "No row of clicks.csv fell into the validation split"),
        (99, {"reserve_rows": 2**31 - 2}, "more than an int32 id can tell apart"),
    ],
)
def test_data_that_cannot_be_trained_on_are_refused(tmp_path, rows, options, why):
    with pytest.raises(ValueError, match=why):
        open_table(write(tmp_path, "clicks.csv", rows), **options)


def test_a_file_may_serve_any_split_unless_its_rows_are_all_bad(source, tmp_path):
    other = write(tmp_path, "other.csv", 30)
    bad = write_text(tmp_path / "bad.csv", HEADER + "1,2\n" * 3)
    for split in ("valid", "test"):
        splits = open_table(source, **{split: other})
        assert getattr(splits, split).num_examples == 30
        assert (splits.test is None) == (split == "valid")
        with pytest.raises(ValueError, match=f"bad.csv has no rows for the {split}"):
            open_table(source, max_bad_rows=3, **{split: bad})


def test_second_opening_uses_the_cache_and_a_damaged_one_is_made_again(
    source, tmp_path
):
    first = rows_of(open_table(source))
    (folder,) = cached(tmp_path)
    made = (folder / MANIFEST).stat().st_mtime_ns
    chex.assert_trees_all_equal(rows_of(open_table(source)), first)
    assert cached(tmp_path) == [folder]
    assert (folder / MANIFEST).stat().st_mtime_ns == made
    (folder / "train.records").write_bytes(b"junk")
    chex.assert_trees_all_equal(rows_of(open_table(source)), first)


def test_another_run_may_finish_the_same_conversion_first(source, monkeypatch):
    convert_once = open_lib.convert

    def convert_late(*arguments, **options):
        for _ in range(2):  # the second one finds the folder of the first
            convert_once(*arguments, **options)

    monkeypatch.setattr(open_lib, "convert", convert_late)
    assert sum(open_table(source).report["examples"].values()) == 400


def test_changed_file_or_option_is_converted_again(source, tmp_path):
    open_table(source)
    open_table(source, transform=("none",))
    assert len(cached(tmp_path)) == 2
    write(tmp_path, "clicks.csv", 401)
    assert sum(open_table(source).report["examples"].values()) == 401


def test_shards_open_directly_and_equal_the_cache(source, shards):
    one = open_data(DataConfig(kind="table", path=str(shards)), seed=0)
    same = open_data(table_config(shards), seed=0)  # options that equal the shards'
    for splits in (one, same):
        assert splits.train.schema.dense == ("price", "age")
        chex.assert_trees_all_equal(rows_of(splits), rows_of(open_table(source)))


def test_blocks_of_any_size_give_the_same(source, tmp_path, monkeypatch):
    few = open_table(source).train
    monkeypatch.undo()  # blocks are not small any more
    one = open_table(source, cache=str(tmp_path / "whole")).train
    batches = [data.batch(Position(1, 2, 3), 64, shuffle=True) for data in (few, one)]
    chex.assert_trees_all_equal(*batches)


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ({"dense": ("age",)}, "was converted with dense .* convert the"),
        ({"min_count": 5}, "was converted with min_count 1, not 5: .*--data.min-count"),
        ({"test": "clicks.csv"}, "leave out --data.test"),
    ],
)
def test_options_that_contradict_the_shards_are_refused(shards, option, why):
    with pytest.raises(ValueError, match=why):
        open_table(shards, **option)


def sources(path, **options):
    path = None if path is None else str(path)
    return find_sources(DataConfig(kind="table", path=path, **options))


def names(found):
    return [[path.name for path in paths] for paths in found]


def touch(folder, *files):
    for name in files:
        (folder / name).write_text("x")


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("clicks_2042.csv", {}, "2042.csv does not exist .did you mean 'clicks_"),
        ("no/a.csv", {}, "there is no folder"),
        ("clicks.csv", {"valid": "valdi.csv"}, "valdi.csv .* .did you mean 'valid.csv"),
        ("*.tsv", {}, "there is no file at "),
        ("", {}, "no data file .* only clicks.csv, clicks_2024.csv, valid"),
    ],
)
def test_what_cannot_be_found_is_told_with_what_is_there(tmp_path, name, options, why):
    touch(tmp_path, "clicks_2024.csv", "clicks.csv", "valid.csv")
    options = {option: str(tmp_path / name) for option, name in options.items()}
    with pytest.raises(ValueError, match=why):
        sources(tmp_path / name, **options)
    (tmp_path / "docs").mkdir()
    touch(tmp_path / "docs", "README.md")
    with pytest.raises(ValueError, match=r"docs has no data file .*: correct --data"):
        sources(tmp_path / "docs")


def test_folder_is_sorted_out_by_words(tmp_path):
    touch(tmp_path, "x_train_1.csv.gz", "x_train_0.csv.gz", "x_val.csv", "training.txt")
    touch(tmp_path, "README.md", "raw_logs.tsv", "latest.csv", "values.csv")
    touch(tmp_path, "trainer.csv", "x-test.parquet", "Testing.TSV", "VALID.csv")
    (tmp_path / "train.csv").mkdir()
    assert names(sources(tmp_path)) == [
        ["training.txt", "x_train_0.csv.gz", "x_train_1.csv.gz"],
        ["VALID.csv", "x_val.csv"],
        ["Testing.TSV", "x-test.parquet"],
    ]


def test_named_files_win_over_the_folders(tmp_path):
    touch(tmp_path, "train.csv", "valid.csv", "test.csv", "other.csv")
    other = str(tmp_path / "other.csv")
    for option, found in (("valid", ["other", "test"]), ("test", ["valid", "other"])):
        want = [[f"{name}.csv"] for name in ("train", *found)]
        assert names(sources(tmp_path, **{option: other})) == want
    touch(tmp_path, "train_and_test.csv")
    with pytest.raises(ValueError, match="could be train or test"):
        sources(tmp_path)


def test_what_a_folder_holds_and_no_split_has_is_named(tmp_path):
    parts = [f"part-{i}.csv" for i in range(7)]
    for name in parts:
        write(tmp_path / "logs", name, 90)
    touch(tmp_path / "logs", "_SUCCESS", ".part-0.csv.crc")
    assert names(sources(tmp_path / "logs")) == [parts, [], []]
    write(tmp_path / "logs", "valid.csv", 90)
    why = "only part-0.csv, .* and 3 more: put it into the names of all training files"
    with pytest.raises(ValueError, match=why):
        open_table(tmp_path / "logs")
    (tmp_path / "logs" / "valid.csv").unlink()
    (tmp_path / "logs" / "part-0.csv").rename(tmp_path / "logs" / "train-0.csv")
    (tmp_path / "logs" / "valid.parquet").mkdir()
    for _ in ("converted", "from the cache"):
        (note,) = open_table(tmp_path / "logs").report["notes"]
        assert note.startswith("Warning: not read") and "part-1.csv, part-2" in note
