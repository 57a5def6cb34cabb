"""A folder of shards is whole or refused; a conversion leaves all or nothing."""

import json
import os
import pickle
import time

import numpy as np
import pytest

from loka_jax.data import Schema, open_data
from loka_jax.data.convert import convert
from loka_jax.data.files import find_sources
from loka_jax.data.manifest import MANIFEST
from loka_jax.data.shards import ShardWriter, new_folder, open_shards, record_dtype
from tests.support import permissions
from tests.support.data import HEADER, rows_text, table_config, write


@pytest.fixture
def folder(tmp_path):
    source = write(tmp_path / "train.csv", HEADER + rows_text(100))
    config = table_config(source)
    convert(config, find_sources(config), tmp_path / "shards")
    return tmp_path / "shards"


def edit_manifest(folder, change):
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


FILES = ("train-00000.npy", "valid-00000.npy", "vocabulary-01.parquet")


def test_what_was_written_can_be_opened(folder):
    opened = open_shards(folder)
    assert len(opened.shards["train"][0]) + len(opened.shards["valid"][0]) == 100
    assert opened.shards["test"] == []
    assert opened.schema.vocab_sizes == (8, 12)


def test_manifest_names_no_folder_of_the_machine(folder):
    assert str(folder.parent) not in (folder / MANIFEST).read_text()


def test_who_may_read_them_follows_the_umask(tmp_path):
    with permissions.umask(0o027), new_folder(tmp_path / "shards") as partial:
        (partial / "a").touch()
    assert permissions.modes(tmp_path / "shards") == {0o640, 0o750}


@pytest.mark.parametrize("name", (*FILES, MANIFEST))
def test_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"{name} cannot be used .it is missing"):
        open_shards(folder)


@pytest.mark.parametrize("name", FILES)
def test_cut_off_file_is_named(folder, name):
    with open(folder / name, "r+b") as file:
        file.truncate(50)
    with pytest.raises(ValueError, match=f"{name} cannot be used .50 bytes, not"):
        open_shards(folder)


@pytest.mark.parametrize("name", FILES)
def test_flipped_byte_is_found(folder, name):
    content = bytearray((folder / name).read_bytes())
    content[-5] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} cannot be used .its digest differs"):
        open_shards(folder)


@pytest.mark.parametrize("name", (*FILES, MANIFEST))
def test_link_is_refused(folder, name):
    (folder / name).rename(folder.parent / name)
    (folder / name).symlink_to(folder.parent / name)
    with pytest.raises(ValueError, match=f"{name} cannot be used .it is a link"):
        open_shards(folder)


@pytest.mark.parametrize(
    "name", ["../train-00000.npy", "/etc/passwd", "a/b-00.npy", ".."]
)
def test_path_that_leads_out_of_the_folder_is_refused(folder, name):
    def change(manifest):
        manifest["files"][name] = manifest["files"]["train-00000.npy"]

    edit_manifest(folder, change)
    with pytest.raises(ValueError, match="it names a file"):
        open_shards(folder)


def test_shard_that_is_not_listed_is_refused(folder):
    edit_manifest(folder, lambda m: m["splits"]["train"].append("../x.npy"))
    with pytest.raises(ValueError, match="lacks an entry"):
        open_shards(folder)


def test_pickle_is_not_loaded(folder):
    path = folder / "train-00000.npy"
    np.save(path, np.array([{"a": 1}], object), allow_pickle=True)
    path.write_bytes(path.read_bytes() + pickle.dumps({}))

    def change(manifest):
        manifest["files"][path.name]["bytes"] = path.stat().st_size

    edit_manifest(folder, change)
    with pytest.raises(ValueError, match="not a .npy file"):
        open_shards(folder, verify=False)


def test_records_of_another_schema_are_refused(folder):
    edit_manifest(folder, lambda m: m["schema"]["dense"].append("more"))
    with pytest.raises(ValueError, match="train-00000.npy cannot be used"):
        open_shards(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", "other"),
        ("version", 99),
        ("schema", None),
        ("schema", {"label": "click"}),
        ("schema", {"label": 1, "dense": 2, "categorical": 3, "vocab_sizes": 4}),
        ("files", []),
        ("files", {"train-00000.npy": 3}),
        ("files", {"train-00000.npy": {"bytes": "many"}}),
        ("files", None),
        ("report", []),
        ("report", None),
        ("settings", [1]),
        ("settings", "text"),
        ("splits", {"train": []}),
        ("splits", {"train": 1, "valid": 2, "test": 3}),
    ],
)
def test_manifest_of_another_shape_is_refused(folder, key, value):
    edit_manifest(folder, lambda m: m.__setitem__(key, value))
    with pytest.raises(ValueError, match="cannot be used"):
        open_shards(folder)


@pytest.mark.parametrize("sizes", [[8.5, 12], ["8", "12"], [2**40, 12], [0, 12], [8]])
def test_table_sizes_of_a_stranger_are_checked(folder, sizes):
    edit_manifest(folder, lambda m: m["schema"].__setitem__("vocab_sizes", sizes))
    with pytest.raises(ValueError):
        open_shards(folder)


ILL_TYPED = {
    "text": "5",
    "float": 5.0,
    "bool": True,
    "null": None,
    "list": [5],
    "dict": {"a": 5},
    "nested": json.loads("[" * 400 + "]" * 400),
    "negative": -1,
    "400 digits": 10**400,
    "2^63": 2**63,
    "surrogate": "\ud800",
}
FIELDS = [
    ("files", "train-00000.npy", "rows"),
    ("files", "train-00000.npy", "bytes"),
    ("files", "train-00000.npy", "sha256"),
    ("files", "vocabulary-00.parquet", "rows"),
    ("files", "vocabulary-00.parquet", "sha256"),
    ("files", "vocabulary-00.parquet", "values_sha256"),
    ("files", "vocabulary-00.parquet"),
    ("splits", "train"),
    ("splits", "train", 0),
    ("schema", "label"),
    ("schema", "dense"),
    ("schema", "dense", 0),
    ("schema", "categorical", 0),
    ("schema", "vocab_sizes"),
    ("schema", "vocab_sizes", 0),
    ("report", "split_rule"),
    ("report", "examples"),
    ("report", "examples", "train"),
    ("report", "totals", "oov"),
    ("report", "bad_rows", "count"),
]
TEXT_FIELDS = {("schema", "label"), ("schema", "dense", 0), ("report", "split_rule")}
TEXT_FIELDS |= {("schema", "categorical", 0)}
COUNTS = ("report", "examples"), "dict"  # of any names


def set_field(manifest, place, value):
    *parents, last = place
    for key in parents:
        manifest = manifest[key]
    manifest[last] = value


@pytest.mark.parametrize("place", FIELDS, ids=lambda p: ".".join(map(str, p)))
def test_field_of_another_type_is_refused(folder, place):
    original = (folder / MANIFEST).read_text()
    for name, value in ILL_TYPED.items():
        if (place in TEXT_FIELDS and name == "text") or (place, name) == COUNTS:
            continue
        (folder / MANIFEST).write_text(original)
        edit_manifest(folder, lambda m, v=value: set_field(m, place, v))
        with pytest.raises(ValueError, match=r"cannot be used .*: convert the data ag"):
            open_data(table_config(folder), seed=0)


@pytest.mark.parametrize("place", FIELDS[:5] + FIELDS[9:11], ids=str)
def test_missing_field_is_named(folder, place):
    def remove(manifest):
        *parents, last = place
        for key in parents:
            manifest = manifest[key]
        del manifest[last]

    edit_manifest(folder, remove)
    with pytest.raises(ValueError, match=f"cannot be used .it lacks .*{place[-1]}"):
        open_shards(folder)


@pytest.mark.parametrize(
    ("split", "names"),
    [
        ("train", ["train-00000.npy", "train-00000.npy"]),
        ("train", ["valid-00000.npy"]),
        ("train", ["vocabulary-00.parquet"]),
        ("test", ["train-00000.npy"]),
    ],
)
def test_shards_of_other_splits_are_refused(folder, split, names):
    edit_manifest(folder, lambda m: m["splits"].__setitem__(split, names))
    with pytest.raises(ValueError, match=f"cannot be used .its split {split} has"):
        open_shards(folder)


def write_shard(folder, content):
    """Replaces a shard, and its size in the manifest."""
    (folder / "train-00000.npy").write_bytes(content)
    size = len(content)
    edit_manifest(folder, lambda m: m["files"]["train-00000.npy"].update(bytes=size))


def npy(fields, records):
    header = f"{fields:<117}\n".encode()
    length = len(header).to_bytes(2, "little")
    return b"\x93NUMPY\x01\x00" + length + header + records


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields.replace("(8", f"({2**63}"),
        lambda fields: fields.replace("(8", "(-8"),
        lambda fields: "(" * 9000,
        lambda fields: "[" * 9000 + "]" * 9000,
        lambda fields: fields.replace("False", "True"),
        lambda fields: fields.replace("<f4", "|O"),
        lambda fields: fields.replace("<f4", ">f4"),
        lambda fields: fields.replace("8", "9" * 4000),
        lambda fields: "",
        lambda fields: "__import__('os').abort()",
    ],
)
def test_header_that_is_not_the_one_is_refused(folder, change):
    content = (folder / "train-00000.npy").read_bytes()
    header, records = content[10:].split(b"\n", 1)
    fields = header.decode().rstrip()
    assert "'shape': (8" in fields
    write_shard(folder, npy(change(fields), records))
    with pytest.raises(ValueError, match="train-00000.npy cannot be used .it is not a"):
        open_shards(folder, verify=False)


def test_padding_of_a_header_may_differ(folder):
    want = np.array(open_shards(folder).shards["train"][0])
    content = (folder / "train-00000.npy").read_bytes()
    header, records = content[10:].split(b"\n", 1)
    write_shard(folder, npy(header.decode().rstrip(), records))
    assert np.array_equal(open_shards(folder, verify=False).shards["train"][0], want)


def test_shards_are_what_numpy_writes(folder):
    records = np.load(folder / "train-00000.npy")
    assert np.array_equal(records, open_shards(folder).shards["train"][0])


def test_full_shards_are_written_and_their_order_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("loka_jax.data.shards.SHARD_ROWS", 10)
    records = np.zeros(25, record_dtype(1, 0))
    records["label"] = np.arange(25)
    writer = ShardWriter(tmp_path)
    for part in (records[:3], records[3:24], records[24:]):
        writer.add_rows("train", part)
    schema = Schema(label="a", dense=("b",), categorical=(), vocab_sizes=())
    writer.finish(schema, sources=[], settings={}, report={})
    shards = open_shards(tmp_path).shards["train"]
    assert [len(shard) for shard in shards] == [10, 10, 5]
    assert np.concatenate(shards)["label"].tolist() == list(range(25))


def test_long_rows_make_short_shards(tmp_path, monkeypatch):
    monkeypatch.setattr("loka_jax.data.shards.SHARD_BYTES", 100)
    writer = ShardWriter(tmp_path)
    writer.add_rows("train", np.zeros(9, record_dtype(9, 0)))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"train-0000{i}.npy" for i in range(4)
    ]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[" * 100_000, "null", "\xff\xfe", "[NaN]", '{"a": 1e400}', "9" * 5000],
)
def test_manifest_that_is_no_json_is_refused(folder, text):
    (folder / MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match="cannot be used"):
        open_shards(folder)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_interrupted_conversion_leaves_nothing(tmp_path, error):
    config = table_config(write(tmp_path / "train.csv", HEADER + rows_text(100)))

    def interrupt(stage, rows):
        if stage == "encoding":
            raise error("stop")

    with pytest.raises(error):
        convert(config, find_sources(config), tmp_path / "shards", interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["train.csv"]


def test_failed_conversion_leaves_nothing(tmp_path):
    text = HEADER + rows_text(100) + "5,1,1,a,b\n"
    config = table_config(write(tmp_path / "train.csv", text))
    with pytest.raises(ValueError, match="row 101 has 5 in label"):
        convert(config, find_sources(config), tmp_path / "shards")
    assert [path.name for path in tmp_path.iterdir()] == ["train.csv"]


def test_existing_folder_is_not_overwritten(folder):
    config = table_config(folder.parent / "train.csv")
    before = (folder / MANIFEST).stat().st_mtime_ns
    with pytest.raises(ValueError, match="exists already"):
        convert(config, find_sources(config), folder)
    assert (folder / MANIFEST).stat().st_mtime_ns == before


def test_target_under_a_file_is_told(folder):
    config = table_config(folder.parent / "train.csv")
    with pytest.raises(ValueError, match="cannot be written"):
        convert(config, find_sources(config), folder / MANIFEST / "x")


def test_full_disk_is_told_and_leaves_nothing(tmp_path):
    def fill_disk():
        with new_folder(tmp_path / "shards") as partial:
            (partial / "train-00000.npy").write_bytes(b"half")
            raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match="cannot be written .No space left on device"):
        fill_disk()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_conversion_left_is_removed_a_day_later(tmp_path):
    old, new = (tmp_path / f".shards.partial-{name}" for name in ("old", "new"))
    for path in (old, new):
        path.mkdir()
    os.utime(old, (time.time() - 100_000,) * 2)
    with new_folder(tmp_path / "shards"):
        pass
    assert not old.exists() and new.exists()
