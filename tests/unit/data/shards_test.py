"""A folder of shards is whole or refused; a conversion leaves all or nothing."""

import functools
import json
import operator
import os
import time

import numpy as np
import pytest

from loka_jax.data import DataConfig, Schema, open_data
from loka_jax.data.convert import convert
from loka_jax.data.files import find_sources
from loka_jax.data.reader import record_dtype_of
from loka_jax.data.shards import MANIFEST, ShardWriter, new_folder, open_shards
from tests.support import permissions
from tests.support.data import HEADER, rows_text, table_config, write

SHARD = "train.records"


def converted(folder, more="", **options):
    """Converts a file in the folder to `shards` beside it."""
    text = HEADER + rows_text(100) + more
    config = table_config(write(folder / "train.csv", text))
    convert(config, find_sources(config), folder / "shards", **options)
    return folder / "shards"


@pytest.fixture
def folder(tmp_path):
    return converted(tmp_path)


def set_entry(folder, place, value):
    """Sets an entry of the manifest."""
    manifest = json.loads((folder / MANIFEST).read_text())
    functools.reduce(operator.getitem, place[:-1], manifest)[place[-1]] = value
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_what_was_written_can_be_opened(folder):
    opened = open_shards(folder)
    train, valid = opened.records["train"], opened.records["valid"]
    assert len(train) + len(valid) == 100 and "test" not in opened.records
    assert opened.schema.vocab_sizes == (8, 12)
    assert np.array_equal(np.fromfile(folder / SHARD, train.dtype), train)


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def link(path):
    elsewhere = path.parent.parent / path.name
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


DAMAGES = [(os.unlink, "it is missing"), (link, "it is a link")]
DAMAGES += [(flip_a_byte, "its digest differs")]
DAMAGES += [(lambda path: os.truncate(path, 50), "50 bytes, not")]


@pytest.mark.parametrize(("damage", "why"), DAMAGES)
@pytest.mark.parametrize("name", [SHARD, "valid.records", "vocabulary-01.parquet"])
def test_a_damaged_file_is_named(folder, damage, why, name):
    damage(folder / name)
    with pytest.raises(ValueError, match=f"{name} cannot be used .{why}"):
        open_shards(folder)


def test_digests_are_compared_if_asked_for_or_the_folder_is_small(folder, monkeypatch):
    flip_a_byte(folder / SHARD)
    assert open_shards(folder, verify=False)
    monkeypatch.setattr("loka_jax.data.shards.MAX_DIGEST_BYTES", 100)
    assert open_shards(folder)
    with pytest.raises(ValueError, match="its digest differs"):
        open_shards(folder, verify=True)


OUTSIDE = {"count": 1, "bytes": 1, "sha256": "0" * 64}
DEEP = json.loads("[" * 400 + "]" * 400)


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        (
            ("files", "../train.records"),
            OUTSIDE,
            "key in files is wrong .Expected str matching",
        ),
        (("files", SHARD), 3, "files.* is wrong .Expected object, got int"),
        *((("files", SHARD, "count"), n, "it is not one or more,") for n in (0, 9)),
        (("files", SHARD, "count"), 2**53 + 1, ".* is wrong .Expected int <="),
        (("schema", "dense"), ["price", "age", "more"], "it is not one or more, "),
        (("schema", "categorical", 0), True, ""),
        (("schema", "vocab_sizes"), [2**31, 12], "The table of column 'user' has 21"),
        (("schema",), {}, "schema is wrong .Object missing required field label"),
        (("constants",), {"price": [0.0, 1.0]}, "its constants are not those"),
        (("forms",), DEEP, ""),
        *((("report", "bad_rows", "count"), value, "") for value in (True, -1, 5.0)),
        (("report", "categorical", "user", "rows"), "5", ""),
        (("format",), "other", "format is wrong .Invalid enum value 'other'"),
    ],
)
def test_what_a_stranger_wrote_is_refused(folder, place, value, why):
    set_entry(folder, place, value)
    match = rf"cannot be used \({why}.*: convert the data again"
    with pytest.raises(ValueError, match=match):
        open_data(table_config(folder), seed=0)


def test_records_are_written_one_after_another(tmp_path):
    schema = Schema(label="a", dense=("b",), categorical=(), vocab_sizes=())
    records = np.zeros(25, record_dtype_of(schema))
    records["label"] = np.arange(25)
    writer = ShardWriter(tmp_path)
    for part in (records[:0], records[:3], records[3:24], records[24:]):
        writer.add_records("train", part)
        writer.add_records("test", records[:0])
    writer.finish(schema, DataConfig())
    opened = open_shards(tmp_path).records
    assert list(opened) == ["train"] and np.array_equal(opened["train"], records)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_a_conversion_that_is_interrupted_or_fails_leaves_nothing(tmp_path, error):
    def interrupt(stage, rows):
        if stage == "encoding" and error is not ValueError:
            raise error("row 101 has 5 in label")

    with pytest.raises(error, match="row 101 has 5 in label"):
        converted(tmp_path, progress=interrupt, more="5,1,1,a,b\n")
    assert [path.name for path in tmp_path.iterdir()] == ["train.csv"]


def test_existing_folder_is_not_overwritten(folder):
    before = (folder / MANIFEST).stat().st_mtime_ns
    with pytest.raises(ValueError, match="exists already"):
        converted(folder.parent)
    assert (folder / MANIFEST).stat().st_mtime_ns == before


def test_what_a_killed_conversion_left_is_removed_a_day_later(tmp_path):
    old, new = (tmp_path / f".shards.partial-{name}" for name in ("old", "new"))
    for path in (old, new):
        path.mkdir()
    os.utime(old, (time.time() - 100_000,) * 2)
    shards = tmp_path / "shards"
    shards.mkdir()  # an empty one is no obstacle
    with permissions.umask(0o027), new_folder(shards) as partial:
        (partial / "a").touch()
    assert not old.exists() and new.exists()
    assert permissions.modes(shards) == {0o640, 0o750}
