"""A folder of shards is whole or refused; a conversion leaves all or nothing."""

import functools
import json
import operator
import os
import time

import numpy as np
import pytest

from loka_jax.data import Schema, open_data
from loka_jax.data.convert import convert
from loka_jax.data.files import find_sources
from loka_jax.data.manifest import MANIFEST
from loka_jax.data.shards import ShardWriter, new_folder, open_shards, record_dtype_of
from tests.support import permissions
from tests.support.data import HEADER, rows_text, table_config, write

SHARD = "train-00000.npy"


def converted(folder, progress=None, more=""):
    """Converts a file in the folder to `shards` beside it."""
    text = HEADER + rows_text(100) + more
    config = table_config(write(folder / "train.csv", text))
    convert(config, find_sources(config), folder / "shards", progress)
    return folder / "shards"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("loka_jax.data.shards.SHARD_ROWS", 1000)
    return converted(tmp_path)


def set_entry(folder, place, value):
    """Sets an entry of the manifest."""
    manifest = json.loads((folder / MANIFEST).read_text())
    functools.reduce(operator.getitem, place[:-1], manifest)[place[-1]] = value
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_what_was_written_can_be_opened_and_is_what_numpy_writes(folder):
    opened = open_shards(folder)
    (train,), (valid,) = opened.shards["train"], opened.shards["valid"]
    assert len(train) + len(valid) == 100 and opened.shards["test"] == []
    assert opened.schema.vocab_sizes == (8, 12)
    assert np.array_equal(np.load(folder / SHARD), train)


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
@pytest.mark.parametrize("name", [SHARD, "valid-00000.npy", "vocabulary-01.parquet"])
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


OUTSIDE = {"rows": 1, "bytes": 1, "sha256": "0" * 64}
DEEP = json.loads("[" * 400 + "]" * 400)


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        (
            ("files", "../train-00000.npy"),
            OUTSIDE,
            "Expected `str` matching",
        ),
        (("files", SHARD), 3, "Expected `object`, got `int` - at `..files"),
        (("files", SHARD, "rows"), 0, "its train-00000.npy has no rows"),
        (("splits", "train"), ["train-00009.npy"], "it lacks an entry of 'train-"),
        (("splits", "train"), [SHARD] * 2, "its split train has a shard twice"),
        (("splits", "train"), ["valid-00000.npy"], "its split train has valid-"),
        (("splits", "train"), ["vocabulary-00.parquet"], "its split train has vocab"),
        (("schema", "dense"), ["price", "age", "more"], "it is not a .npy file"),
        (("schema", "categorical", 0), True, ""),
        (("schema", "vocab_sizes"), [2**31, 12], "The table of column 'user' has 21"),
        (("schema",), {}, "Object missing required field `label`"),
        (("standardizer",), {"mean": [0.0, 1.0], "std": [1.0]}, "its standardizer "),
        (("kind",), DEEP, ""),
        *((("report", "bad_rows", "count"), value, "") for value in (True, -1, 5.0)),
        (("report", "categorical", "user", "rows"), "5", ""),
        (("format",), "other", "Invalid enum value 'other' - at `..format`"),
    ],
)
def test_what_a_stranger_wrote_is_refused(folder, place, value, why):
    set_entry(folder, place, value)
    match = rf"cannot be used \({why}.*: convert the data again"
    with pytest.raises(ValueError, match=match):
        open_data(table_config(folder), seed=0)


def open_with_header(folder, change):
    """Opens the shards after a change of a header, which is padded by blanks."""
    header, records = (folder / SHARD).read_bytes()[10:].split(b"\n", 1)
    header = f"{change(header.decode().rstrip()):<117}\n".encode()
    prefix = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little")
    content = prefix + header + records
    (folder / SHARD).write_bytes(content)
    set_entry(folder, ("files", SHARD, "bytes"), len(content))
    return open_shards(folder, verify=False).shards["train"][0]


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields.replace("(8", f"({2**63}"),
        lambda fields: fields.replace("<f4", "|O"),
        lambda fields: fields.replace("<f4", ">f4"),
        lambda fields: "__import__('os').abort()",
    ],
)
def test_only_the_padding_of_a_header_may_differ(folder, change):
    want = np.array(open_shards(folder).shards["train"][0])
    assert np.array_equal(open_with_header(folder, lambda fields: fields), want)
    with pytest.raises(ValueError, match="train-00000.npy cannot be used .it is not a"):
        open_with_header(folder, change)


def test_full_shards_are_written_and_their_order_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("loka_jax.data.shards.SHARD_ROWS", 10)
    schema = Schema(label="a", dense=("b",), categorical=(), vocab_sizes=())
    records = np.zeros(25, record_dtype_of(schema))
    records["label"] = np.arange(25)
    writer = ShardWriter(tmp_path)
    for part in (records[:3], records[3:24], records[24:]):
        writer.add_rows("train", part)
    writer.finish(schema, sources=[], settings={}, report={})
    shards = open_shards(tmp_path).shards["train"]
    assert [len(shard) for shard in shards] == [10, 10, 5]
    assert np.concatenate(shards)["label"].tolist() == list(range(25))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_a_conversion_that_is_interrupted_or_fails_leaves_nothing(tmp_path, error):
    def interrupt(stage, rows):
        if stage == "encoding" and error is not ValueError:
            raise error("row 101 has 5 in label")

    with pytest.raises(error, match="row 101 has 5 in label"):
        converted(tmp_path, interrupt, more="5,1,1,a,b\n")
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
