"""A file that changes while it is read is refused, and never taken from the cache."""

import os
import time

import pytest

from loka_jax.data.convert import convert
from loka_jax.data.files import find_sources
from tests.support.data import HEADER, open_table, rows_text, table_config

ROWS = rows_text(2000)  # more than is read ahead
TEXT = HEADER + ROWS
OTHER = HEADER + ROWS.replace("u", "x")  # of the same size
CLOCK_TICK = 0.02  # seconds; most systems keep the times of files in steps of 0.004


def write_in_place(path, text=OTHER):
    """Writes other text of the same size, and sets back the time."""
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_text(text)
    os.utime(path, ns=times)


def replace(path):
    """Puts another file of the same name, size and time in its place."""
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    write_in_place(other)
    other.rename(path)


def append(path):
    with open(path, "a") as file:
        file.write("1,1,1,a,b\n")


def make_pipe(path):
    path.unlink()
    os.mkfifo(path)


CHANGED, GONE = "changed while it was read", "cannot be read .No such"
# A change is told before the damage it causes.
CHANGES = [
    *((change, CHANGED) for change in (replace, write_in_place, append)),
    (lambda path: os.truncate(path, len(TEXT) - 3), CHANGED),
    (lambda path: write_in_place(path, TEXT.replace("\n1,", "\n7,")), CHANGED),
    *((os.unlink, GONE), (make_pipe, "is a pipe")),
]


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


@pytest.mark.parametrize(("change", "why"), CHANGES)
@pytest.mark.parametrize("stage", ["reading", "encoding", "hash"])
def test_a_file_that_changes_is_refused_and_nothing_is_left(
    tmp_path, change, why, stage
):
    options = {"encoding": "hash"} if stage == "hash" else {}
    with pytest.raises(ValueError, match=rf"train\.csv {why}"):
        convert_while(change, tmp_path, stage.replace("hash", "encoding"), **options)
    assert not list(tmp_path.glob("*shards*"))


@pytest.mark.parametrize("change", [replace, write_in_place, append])
def test_a_changed_file_is_not_taken_from_the_cache(tmp_path, change):
    path = tmp_path / "train.csv"
    path.write_text(TEXT)
    before = open_table(path).identity
    time.sleep(CLOCK_TICK)
    change(path)
    fresh = open_table(path, cache=str(tmp_path / "new")).identity
    assert open_table(path).identity == fresh != before
