"""A file that changes while it is read is refused, and never taken from the cache."""

import os
import time

import pytest

from loka_jax.data.convert import convert
from loka_jax.data.files import find_sources
from tests.support.data import (
    HEADER,
    open_table,
    rows_text,
    table_config,
    write,
)

TEXT = HEADER + rows_text(200)
OTHER = HEADER + rows_text(200).replace("u", "x")  # of the same size
CLOCK_TICK = 0.02  # seconds; most systems keep the times of files in steps of 0.004


def replace(path):
    """Puts another file of the same name, size and time in its place."""
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    other = path.with_name("other")
    other.write_text(OTHER)
    os.utime(other, ns=times)
    other.rename(path)


def write_in_place(path):
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    with open(path, "r+") as file:
        file.write(OTHER)
    os.utime(path, ns=times)


def append(path):
    with open(path, "a") as file:
        file.write("1,1,1,a,b\n")


def cut_off(path):
    with open(path, "r+") as file:
        file.truncate(len(TEXT) - 3)


def make_pipe(path):
    path.unlink()
    os.mkfifo(path)


CHANGES = [replace, write_in_place, append, cut_off, os.unlink, make_pipe]


def convert_while(change, folder, stage, **options):
    """Converts a file that changes once a stage has read its first block."""
    path = folder / "train.csv"
    path.write_text(TEXT)
    os.utime(path, ns=(0, 10**18))
    config = table_config(path, **options)
    left = [change]

    def progress(now, rows):
        if now == stage and left:
            time.sleep(CLOCK_TICK)
            left.pop()(path)

    convert(config, find_sources(config), folder / "shards", progress)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stage", ["reading", "encoding"])
def test_a_file_that_changes_is_refused_and_nothing_is_left(tmp_path, change, stage):
    with pytest.raises(
        ValueError, match=r"train\.csv (changed while|cannot|is a pipe)"
    ):
        convert_while(change, tmp_path, stage)
    assert not list(tmp_path.glob("*shards*"))


@pytest.mark.parametrize("change", [replace, write_in_place, append])
def test_hashed_values_need_no_first_reading_and_are_watched_too(tmp_path, change):
    with pytest.raises(ValueError, match="train.csv changed while it was read"):
        convert_while(change, tmp_path, "encoding", encoding="hash")


def test_a_change_is_told_before_the_damage_it_causes(tmp_path):
    def spoil(path):
        path.write_text(TEXT.replace("1,", "7,"))

    with pytest.raises(ValueError, match="train.csv changed while it was read"):
        convert_while(spoil, tmp_path, "reading")


def test_a_change_that_no_time_shows_is_seen_by_the_values(tmp_path, monkeypatch):
    monkeypatch.setattr("loka_jax.data.convert.check_unchanged", lambda _: None)
    monkeypatch.setattr("loka_jax.data.stamps.check_unchanged", lambda _: None)
    with pytest.raises(ValueError, match=r"train.csv row \d+ column 'user' holds 'x"):
        convert_while(replace, tmp_path, "reading")


@pytest.mark.parametrize("change", [replace, write_in_place, append])
def test_a_changed_file_is_not_taken_from_the_cache(tmp_path, change):
    path = tmp_path / "train.csv"
    path.write_text(TEXT)
    before = open_table(path).identity
    time.sleep(CLOCK_TICK)
    change(path)
    changed = open_table(path)
    assert changed.identity != before
    (tmp_path / "new").mkdir()
    fresh = write(tmp_path / "new" / "b.csv", path.read_text())
    assert changed.identity == open_table(fresh).identity


def test_a_pipe_is_refused_before_it_is_read(tmp_path):
    os.mkfifo(tmp_path / "a.csv")
    with pytest.raises(ValueError, match="a.csv is a pipe .* write them to a file"):
        open_table(tmp_path / "a.csv")
