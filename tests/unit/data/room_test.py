"""What does not fit the disk is told with amounts, and leaves nothing.

A disk that is really full: tests/whole/data/conversion_test.py.
"""

import re
import shutil

import pytest

from loka_jax.data import learn
from loka_jax.data.convert import convert
from loka_jax.data.files import find_sources
from tests.support.data import HEADER, rows_text, table_config, write

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
        convert_with_free(monkeypatch, tmp_path, 900, encoding=encoding)
    free, rows, needed = amounts(str(error.value).split(str(tmp_path))[1])
    # Hashes need no training rows to be read first: those at hand are told.
    assert 0 < rows < 100 if encoding == "hash" else 0.85 * ROWS < rows < ROWS
    assert free == 900 and needed == rows * BYTES
    # Amounts that are nearly equal look different.
    with pytest.raises(ValueError, match=f"{needed - 1:,} bytes.* take {needed:,}:"):
        convert_with_free(monkeypatch, tmp_path, needed - 1, encoding=encoding)
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]
    convert_with_free(monkeypatch, tmp_path, needed + 100 * BYTES, encoding=encoding)
    assert (tmp_path / "shards").is_dir()


def test_memory_is_that_of_the_machine_or_of_the_container(tmp_path, monkeypatch):
    assert 1 << 28 < learn.memory_bytes() < 1 << 46
    limits = tuple(tmp_path / name for name in ("a", "b", "none"))
    monkeypatch.setattr(learn, "_CONTAINER_LIMITS", limits)
    for texts, want in ((("max", "5000\n"), 5000), (("7000\n", "9000\n"), 7000)):
        for path, text in zip(limits, texts, strict=False):
            path.write_text(text)
        assert learn.memory_bytes() == want
