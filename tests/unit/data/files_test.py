"""Which file is which split, and what to do when it cannot be told."""

import pytest

from loka_jax.data import DataConfig
from loka_jax.data.files import find_sources


def config(path, **options):
    options = {"kind": "table", "categorical": ("c",)} | options
    return DataConfig(path=None if path is None else str(path), **options)


def names(sources):
    return [[path.name for path in paths] for paths in sources]


def touch(folder, *files):
    for name in files:
        (folder / name).write_text("x")
    return folder


def test_missing_file_names_the_nearest(tmp_path):
    touch(tmp_path, "clicks_2024.csv", "other.txt")
    with pytest.raises(
        ValueError, match="clicks_2042.csv does not exist: did you mean c"
    ):
        find_sources(config(tmp_path / "clicks_2042.csv"))


def test_missing_file_far_from_all_shows_what_is_there(tmp_path):
    touch(tmp_path, "a.csv")
    with pytest.raises(ValueError, match="the folder holds a.csv"):
        find_sources(config(tmp_path / "zzzzzzzz.parquet"))


def test_missing_folder_is_told(tmp_path):
    with pytest.raises(ValueError, match="there is no folder"):
        find_sources(config(tmp_path / "no" / "a.csv"))


@pytest.mark.parametrize("option", ["valid", "test"])
def test_missing_held_out_file_is_told(tmp_path, option):
    touch(tmp_path, "a.csv")
    missing = {option: str(tmp_path / "b.csv")}
    with pytest.raises(ValueError, match="b.csv does not exist: did you mean a.csv"):
        find_sources(config(tmp_path / "a.csv", **missing))


def test_no_path_names_the_option():
    with pytest.raises(ValueError, match="needs --data.path"):
        find_sources(config(None))


def test_folder_is_sorted_out_by_words(tmp_path):
    touch(
        tmp_path, "x_train_1.csv.gz", "x_train_0.csv.gz", "x_val.csv", "x-test.parquet"
    )
    touch(
        tmp_path, "README.md", "raw_logs.tsv", "latest.csv", "values.csv", "trainer.csv"
    )
    assert names(find_sources(config(tmp_path))) == [
        ["x_train_0.csv.gz", "x_train_1.csv.gz"],
        ["x_val.csv"],
        ["x-test.parquet"],
    ]


@pytest.mark.parametrize("word", ["valid", "val", "validation", "VALID"])
def test_words_for_validation(tmp_path, word):
    touch(tmp_path, "train.csv", f"{word}.csv")
    assert names(find_sources(config(tmp_path)))[1] == [f"{word}.csv"]


def test_named_files_win_over_the_folders(tmp_path):
    touch(tmp_path, "train.csv", "valid.csv", "other.csv")
    sources = find_sources(config(tmp_path, valid=str(tmp_path / "other.csv")))
    assert names(sources) == [["train.csv"], ["other.csv"], []]


def test_folder_without_training_file_is_told(tmp_path):
    touch(tmp_path, "clicks.csv", "valid.csv")
    with pytest.raises(ValueError, match="no data file .* only clicks.csv, valid.csv"):
        find_sources(config(tmp_path))


def test_file_that_could_be_two_splits_is_told(tmp_path):
    touch(tmp_path, "train_and_test.csv")
    with pytest.raises(ValueError, match="could be train or test"):
        find_sources(config(tmp_path))


def test_folder_as_validation_file_is_refused(tmp_path):
    touch(tmp_path, "train.csv")
    with pytest.raises(ValueError, match="is a folder: name one file"):
        find_sources(config(tmp_path / "train.csv", valid=str(tmp_path)))
