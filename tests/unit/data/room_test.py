"""What does not fit the disk is told with amounts, and leaves nothing."""

import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from loka_jax.data.convert import convert
from loka_jax.data.files import find_sources
from loka_jax.data.room import memory_bytes
from tests.support.data import HEADER, rows_text, table_config, write

SCRIPT = pathlib.Path(__file__).parents[3] / "experiments" / "convert.py"
ROWS = 1000
BYTES = 4 * (1 + 2 + 2)  # a row: label, 2 dense, 2 ids


def amounts(message):
    return [int(text.replace(",", "")) for text in re.findall(r"\d[\d,]*", message)]


def convert_with_free(monkeypatch, folder, free, **options):
    config = table_config(write(folder / "a.csv", HEADER + rows_text(ROWS)), **options)
    usage = shutil.disk_usage(folder)._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    convert(config, find_sources(config), folder / "shards")


@pytest.mark.parametrize("encoding", ["vocabulary", "hash"])
def test_rows_that_do_not_fit_the_disk_are_told(tmp_path, monkeypatch, encoding):
    with pytest.raises(ValueError, match=r"make room.*--out or --data\.cache") as error:
        convert_with_free(monkeypatch, tmp_path, 5000, encoding=encoding)
    free, rows, needed = amounts(str(error.value).split(str(tmp_path))[1])
    assert free == 5000 and 0.85 * ROWS < rows < ROWS and needed == rows * BYTES
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


def test_amounts_that_are_nearly_equal_look_different(tmp_path, monkeypatch):
    with pytest.raises(ValueError) as error:
        convert_with_free(monkeypatch, tmp_path, 0)
    *_, needed = amounts(str(error.value))
    with pytest.raises(ValueError, match=f"{needed - 1:,} bytes.* take {needed:,}:"):
        convert_with_free(monkeypatch, tmp_path, needed - 1)


def test_rows_that_just_fit_are_written(tmp_path, monkeypatch):
    convert_with_free(monkeypatch, tmp_path, ROWS * BYTES)
    assert (tmp_path / "shards").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "message"),
    [("200k", "bytes free, and .* take"), ("480k", "No space left on device after")],
    ids=["shards", "vocabularies"],
)
def test_a_full_disk_ends_a_conversion_in_one_sentence(tmp_path, size, message):
    rng = np.random.default_rng(0)
    lines = (f"{i % 2},{i},{i},{rng.bytes(16).hex()},i\n" for i in range(20_000))
    write(tmp_path / "a.csv", HEADER + "".join(lines))
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size={size} none {disk}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount]).returncode:
        pytest.skip("needs the right to mount a disk of its own (unshare -rm)")
    columns = "--data.label click --data.dense price age --data.categorical user item"
    command = f"{sys.executable} {SCRIPT} --data.path {tmp_path / 'a.csv'} {columns}"
    command = f"{mount} && {command} --out {disk / 'shards'}; code=$?; ls -A {disk}; "
    result = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command + "exit $code"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: ")
    assert re.search(message, result.stderr)
    assert len(set(amounts(result.stderr.split("disk", 1)[1]))) >= 2
    assert not result.stdout  # nothing is left


def test_memory_is_that_of_this_machine():
    assert 1 << 28 < memory_bytes() < 1 << 46
