"""Converted data on disk: a folder with the records of each split, and a manifest.

`train.records` holds one record a row, one after another, and is memory-mapped;
`vocabulary-00.parquet` the values of a field. A folder is written under a temporary
name and renamed when complete. One that is opened is untrusted input, as a stranger's
numbers would become sizes, offsets and lines on the console: regular files only; sizes
and digests are checked here, ids batch by batch by the reader.
"""

import errno
import hashlib
import os
import pathlib
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import Meta
from pyarrow import parquet

from loka_jax import jsonfile, saved_format
from loka_jax.data.batch import Schema
from loka_jax.data.config import DataConfig
from loka_jax.data.reader import record_dtype_of
from loka_jax.terminal import clip

MANIFEST = "manifest.json"
SPLITS = ("train", "valid", "test")
# Digests of folders up to this size are verified at every opening, in about a second;
# those of larger ones only by `experiments/convert.py --verify`.
MAX_DIGEST_BYTES = 1 << 30

type Count = Annotated[int, Meta(ge=0, le=2**53)]
type Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
# A name without separators cannot lead out of the folder.
type FileName = Annotated[
    str,
    Meta(pattern=r"^((train|valid|test)\.records|vocabulary-[0-9]{2,6}\.parquet)\Z"),
]


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file of the folder.

    Attributes:
        count: the number of records, or of values of a vocabulary.
        values_sha256: the digest of a vocabulary's values, whatever file holds them;
            None for records.
    """

    count: Count
    bytes: Count
    sha256: Digest
    values_sha256: Digest | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a manifest.

    Attributes:
        config: the options of the conversion, but for its files.
        report: the conversion's counts, policies and sources; {} of an encoding.
    """

    format: Literal["loka_jax shards"] = "loka_jax shards"
    version: int = saved_format.SHARDS
    schema: Schema
    files: dict[FileName, FileEntry]
    config: DataConfig
    forms: dict[str, str] = {}
    constants: dict[str, tuple[float, ...]] = {}
    report: dict[str, Any] = {}

    def __post_init__(self):
        """Checks that the parts agree, and that the report has what runs print."""
        learned = self.config.inputs.learned
        scaled = {*learned} & {*self.schema.dense}
        are_two = all(len(self.constants.get(name, ())) == 2 for name in scaled)
        if {*self.constants} != {*learned} or not are_two:
            raise ValueError("its constants are not those of its transforms")
        if self.report:
            msgspec.convert(self.report, _Report)


class _Facts(msgspec.Struct):
    """Facts on a column, see `loka_jax.data.learn.column_facts`."""

    rows: Count
    most_frequent: list[tuple[str, int]]
    values: Count | None = None
    warning: str | None = None
    reserved: Count | None = None
    new_values: Count | None = None
    new_rows: Count | None = None

    def __post_init__(self):
        if self.new_values is not None and None in (self.new_rows, self.reserved):
            raise ValueError("it has new values and no count of their rows")


class _Split(msgspec.Struct):
    columns: dict[str, dict[str, Count]]


class _BadRows(msgspec.Struct):
    count: Count


class _Report(msgspec.Struct):
    split_rule: str
    notes: list[str]
    examples: dict[str, Count]
    totals: dict[str, Count]
    bad_rows: _BadRows
    categorical: dict[str, _Facts]
    splits: dict[str, _Split]


class Unusable(ValueError):
    """A file or folder has to be made again; `reason` is what is wrong with it."""

    def __init__(self, path: pathlib.Path, reason: str):
        """Takes the file or folder, and what is wrong with it."""
        super().__init__(f"{path} cannot be used ({reason}): convert the data again.")
        self.reason = reason


class ShardFolder(NamedTuple):
    """An opened folder, with the memory-mapped records of the splits that have some."""

    path: pathlib.Path
    manifest: Manifest
    records: dict[str, np.ndarray]

    @property
    def schema(self) -> Schema:
        """The columns and table sizes."""
        return self.manifest.schema

    @property
    def report(self) -> dict[str, Any]:
        """The conversion's counts, policies and sources."""
        return self.manifest.report

    @property
    def vocabulary_digests(self) -> dict[str, str | None]:
        """A digest of the values of each field with a vocabulary."""
        files = self.manifest.files
        return {
            column: files[name].values_sha256
            for field, column in enumerate(self.schema.fields)
            if (name := vocabulary_name(field)) in files
        }


class ShardWriter:
    """Writes the files of a new folder of shards."""

    def __init__(self, folder: pathlib.Path):
        """Writes into `folder`, which exists and is empty."""
        self._folder = folder
        self._files: dict[str, FileEntry] = {}
        self._counts: dict[str, int] = {}

    def add_records(self, split: str, records: np.ndarray) -> None:
        """Appends records to a split."""
        if not len(records):
            return
        check_disk(self._folder, records.nbytes, f"the next {len(records):,} rows")
        name = f"{split}.records"
        with open(self._folder / name, "ab") as file:
            file.write(records.data)
        self._counts[name] = self._counts.get(name, 0) + len(records)

    def add_vocabulary(self, field: int, values: pa.Array) -> None:
        """Writes a field's vocabulary: the values of its ids, from id 1 on."""
        name = vocabulary_name(field)
        with open(self._folder / name, "wb") as file:
            table = pa.table({"value": values})
            parquet.write_table(table, file, write_page_checksum=True)
        # The file's own digest differs between versions of Arrow.
        digest = _digest_of_values(values)
        self._register(name, count=len(values), values_sha256=digest)

    def copy(self, path: pathlib.Path, entry: FileEntry) -> None:
        """Copies a file of another folder, after comparing its digest."""
        _check_file(path, entry, digests=True)
        shutil.copyfile(path, self._folder / path.name)
        numbers = {"count": entry.count, "values_sha256": entry.values_sha256}
        self._register(path.name, **numbers)

    def _register(self, name: str, **entry: Any) -> None:
        with open(self._folder / name, "r+b") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.seek(0, os.SEEK_END)
        self._files[name] = FileEntry(bytes=size, sha256=digest, **entry)

    def finish(self, schema: Schema, config: DataConfig, **entries: Any) -> None:
        """Writes the manifest, which completes the folder.

        `entries` are the entries of `Manifest` that the writer does not know.
        """
        for name, count in self._counts.items():
            self._register(name, count=count)
        manifest = Manifest(schema=schema, config=config, files=self._files, **entries)
        jsonfile.write(self._folder / MANIFEST, msgspec.to_builtins(manifest))


def vocabulary_name(field: int) -> str:
    """Returns the name of the file with a field's vocabulary."""
    return f"vocabulary-{field:02d}.parquet"


def _digest_of_values(values: pa.Array) -> str:
    """Returns a digest of the values in their order, whatever file they stand in."""
    values = values.cast(pa.large_string())
    _, offsets, text = values.buffers()
    digest = hashlib.sha256()
    if len(values):
        ends = np.frombuffer(offsets, np.int64)[values.offset :][: len(values) + 1]
        digest.update(np.ascontiguousarray(ends - ends[0]))
        digest.update(memoryview(text)[ends[0] : ends[-1]])
    return digest.hexdigest()


@contextmanager
def new_folder(
    target: pathlib.Path, options: str = "--out or --data.cache"
) -> Iterator[pathlib.Path]:
    """Yields a temporary folder, renamed to `target` on success or else removed.

    Who may read it follows the umask, as of any other output. `options` are those that
    name another folder, for messages.

    Raises:
        ValueError: if the target exists already or cannot be written.
    """
    is_empty_folder = target.is_dir() and not any(target.iterdir())
    if target.is_symlink() or (target.exists() and not is_empty_folder):
        raise ValueError(f"{target} exists already: remove it, or choose another name.")
    prefix = f".{target.name}.partial-"
    # Named before it is made, so that a signal between the two leaves nothing.
    partial = target.with_name(f"{prefix}{secrets.token_hex(8)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target.parent, prefix)
        partial.mkdir()
        yield partial
        os.rename(partial, target)
    except OSError as error:
        raise ValueError(
            f"{target} cannot be written ({_reason(error, partial)}): mend that, or "
            f"choose another folder with {options}."
        ) from None
    finally:  # also after Ctrl-C; after the rename there is nothing to remove
        shutil.rmtree(partial, ignore_errors=True)


def _reason(error: OSError, partial: pathlib.Path) -> str:
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not partial.is_dir():
        return reason
    written = sum(path.stat().st_size for path in partial.iterdir())
    return f"{reason} after {written:,} bytes, {_free_bytes(partial):,} are free"


def _remove_abandoned(folder: pathlib.Path, prefix: str) -> None:
    """Removes day-old folders that killed conversions to the same target left."""
    for path in folder.iterdir():
        if path.name.startswith(prefix) and path.lstat().st_mtime < time.time() - 86400:
            shutil.rmtree(path, ignore_errors=True)


def _free_bytes(folder: pathlib.Path) -> int:
    return shutil.disk_usage(folder).free


def check_disk(folder: pathlib.Path, needed: int, rows: str) -> None:
    """Raises ValueError if the folder's disk has fewer than `needed` bytes free."""
    if needed > (free := _free_bytes(folder)):
        # In bytes, as rounded amounts may look the same.
        raise ValueError(
            f"The disk of {folder.parent} has {free:,} bytes free, and {rows} take "
            f"{needed:,}: make room, or choose another folder with --out or "
            "--data.cache."
        )


def is_shard_folder(path: pathlib.Path) -> bool:
    """Returns whether the folder has a manifest."""
    return (path / MANIFEST).is_file()


def open_shards(folder: pathlib.Path, *, verify: bool | None = None) -> ShardFolder:
    """Opens a folder of shards; compares all digests, by default in a small one only.

    Raises:
        ValueError: with the file, if anything is missing, damaged or not allowed.
    """
    manifest = _read_manifest(folder)
    files, dtype = manifest.files, record_dtype_of(manifest.schema)
    if verify is None:
        verify = sum(entry.bytes for entry in files.values()) <= MAX_DIGEST_BYTES
    records = {}
    for name, entry in files.items():
        _check_file(folder / name, entry, verify)
        if not name.endswith(".records"):
            continue
        if not 0 < entry.bytes == entry.count * dtype.itemsize:
            reason = f"it is not one or more, {entry.count}, records of {dtype}"
            raise Unusable(folder / name, reason)
        split = name.removesuffix(".records")
        records[split] = np.memmap(folder / name, dtype, mode="r")
    return ShardFolder(folder, manifest, records)


def _read_manifest(folder: pathlib.Path) -> Manifest:
    """Returns the folder's manifest; raises Unusable with what is wrong."""
    path = folder / MANIFEST
    _check_regular(path)
    try:
        value = jsonfile.as_dict(jsonfile.read(path))
        reason = saved_format.why_not(value.get("version"), saved_format.SHARDS)
        if reason is None:
            return jsonfile.typed(value, Manifest)
    except (OSError, ValueError) as error:
        reason = clip(str(error).replace(str(path), "it"), 200)
    raise Unusable(path, reason)


def _check_regular(path: pathlib.Path) -> None:
    """Raises Unusable if the file is missing, a link, or not a regular file."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        raise Unusable(path, "it is missing") from None
    if not stat.S_ISREG(mode):
        raise Unusable(path, "it is a link or not a regular file")


def _check_file(path: pathlib.Path, entry: FileEntry, digests: bool) -> None:
    _check_regular(path)
    size = path.stat().st_size
    if size != entry.bytes:
        raise Unusable(path, f"{size} bytes, not {entry.bytes}")
    if digests:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != entry.sha256:
            raise Unusable(path, "its digest differs from the manifest's")
