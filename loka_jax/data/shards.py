"""Converted data on disk: memory-mapped `.npy` shards and a manifest.

A folder holds `manifest.json` and, beside it, `train-00000.npy` and so on, with one
structured record a row (label, dense, ids), and `vocabulary-00.parquet` and so on. It
is written under a temporary name and renamed when complete. A folder that is opened is
untrusted input: regular files only, no pickles; sizes, shapes and digests are checked
here, ids batch by batch by the reader.
"""

import errno
import hashlib
import json
import os
import pathlib
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import parquet

from loka_jax.data.batch import Schema
from loka_jax.data.manifest import (
    MANIFEST,
    SPLITS,
    FileEntry,
    Manifest,
    Unusable,
    check_regular,
    read_manifest,
)
from loka_jax.terminal import one_line

SHARD_ROWS = 1 << 19
SHARD_BYTES = 1 << 27  # of fewer rows, if they are long
MAX_HEADER_BYTES = 1 << 16
# Digests of folders up to this size are verified at every opening, in about a second;
# those of larger ones only by `experiments/convert.py --verify`.
MAX_DIGEST_BYTES = 1 << 30


class ShardFolder(NamedTuple):
    """An opened folder of shards.

    Attributes:
        path: the folder.
        manifest: its manifest.
        shards: the memory-mapped records of each split; a split may have none.
    """

    path: pathlib.Path
    manifest: Manifest
    shards: dict[str, list[np.ndarray]]

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


def record_dtype_of(schema: Schema) -> np.dtype:
    """Returns the type of one row: numbers of 4 bytes without gaps.

    After the labels, dense columns and ids come the example's weight, the ids of each
    multi-valued field, and the weights of those values that have some.
    """
    tasks = len(schema.labels)
    label = ("label", "<f4") if tasks == 1 else ("label", "<f4", (tasks,))
    dense = ("dense", "<f4", (len(schema.dense),))
    ids = ("ids", "<i4", (len(schema.categorical),))
    weight = [("weight", "<f4")] if schema.weighted else []
    lists = [(f"bag_{i}", "<i4", (slots,)) for i, slots in enumerate(schema.slots)]
    weights = [
        (f"bag_weights_{i}", "<f4", (slots,))
        for i, slots in enumerate(schema.slots)
        if schema.multi[i] in schema.weighted_multi
    ]
    return np.dtype([label, dense, ids, *weight, *lists, *weights])


class ShardWriter:
    """Writes the files of a new folder of shards."""

    def __init__(self, folder: pathlib.Path):
        """Writes into `folder`, which exists and is empty."""
        self._folder = folder
        self._files: dict[str, FileEntry] = {}
        self._splits: dict[str, list[str]] = {split: [] for split in SPLITS}
        self._waiting: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}

    def add_rows(self, split: str, records: np.ndarray) -> None:
        """Appends records to a split; every full shard is written."""
        waiting = self._waiting[split]
        waiting.append(records)
        size = max(1, min(SHARD_ROWS, SHARD_BYTES // records.itemsize))
        if sum(map(len, waiting)) < size:
            return
        rows = np.concatenate(waiting)
        full = len(rows) // size * size
        for start in range(0, full, size):
            self.add_shard(split, rows[start : start + size])
        self._waiting[split] = [rows[full:].copy()]  # frees the others

    def add_shard(self, split: str, records: np.ndarray) -> None:
        """Writes records as the next shard of a split."""
        check_disk(self._folder, records.nbytes, f"the next {len(records):,} rows")
        name = f"{split}-{len(self._splits[split]):05d}.npy"
        with open(self._folder / name, "wb") as file:
            header = np.lib.format.header_data_from_array_1_0(records)
            np.lib.format.write_array_header_1_0(file, header)
            file.write(records.data)  # np.save would lose the reason of a failure
        self._splits[split].append(name)
        self._register(name, len(records))

    def add_vocabulary(self, field: int, values: pa.Array) -> None:
        """Writes a field's vocabulary: the values of its ids, from id 1 on."""
        name = vocabulary_name(field)
        table = pa.table({"value": values})
        with open(self._folder / name, "wb") as file:
            parquet.write_table(table, file, write_page_checksum=True)
        # The file's own digest differs between versions of Arrow.
        self._register(name, len(values), _digest_of_values(values))

    def _register(self, name: str, rows: int, values_sha256: str | None = None) -> None:
        with open(self._folder / name, "r+b") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.seek(0, os.SEEK_END)
        self._files[name] = FileEntry(
            rows=rows, bytes=size, sha256=digest, values_sha256=values_sha256
        )

    def finish(self, schema: Schema, **entries: Any) -> None:
        """Writes the remaining rows and the manifest, which completes the folder.

        Args:
            schema: the columns and table sizes.
            **entries: the other entries of the manifest that the writer does not know,
                see `Manifest`.
        """
        for split, waiting in self._waiting.items():
            if sum(map(len, waiting)):
                self.add_shard(split, np.concatenate(waiting))
        manifest = Manifest(
            schema=schema, splits=self._splits, files=self._files, **entries
        )
        with open(self._folder / MANIFEST, "w", encoding="utf-8") as file:
            json.dump(msgspec.to_builtins(manifest), file, indent=1, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())


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

    Who may read it follows the umask, as of any other output.

    Args:
        target: the folder, which must not exist yet.
        options: those that name another folder, for messages.

    Raises:
        ValueError: if the target exists already or cannot be written.
    """
    if target.is_symlink() or (target.exists() and not _is_empty_folder(target)):
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
    return f"{reason} after {written:,} bytes, {free_bytes(partial):,} are free"


def _remove_abandoned(folder: pathlib.Path, prefix: str) -> None:
    """Removes day-old folders that killed conversions to the same target left."""
    for path in folder.iterdir():
        if path.name.startswith(prefix) and path.lstat().st_mtime < time.time() - 86400:
            shutil.rmtree(path, ignore_errors=True)


def _is_empty_folder(path: pathlib.Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def is_shard_folder(path: pathlib.Path) -> bool:
    """Returns whether the folder has a manifest."""
    return (path / MANIFEST).is_file()


def open_shards(folder: pathlib.Path, *, verify: bool | None = None) -> ShardFolder:
    """Opens a folder of shards.

    Args:
        folder: the folder.
        verify: whether to compare all digests; if None, only in a small folder.

    Raises:
        ValueError: with the file, if anything is missing, damaged or not allowed.
    """
    manifest = read_manifest(folder)
    files, dtype = manifest.files, record_dtype_of(manifest.schema)
    if verify is None:
        verify = sum(entry.bytes for entry in files.values()) <= MAX_DIGEST_BYTES
    for name, entry in files.items():
        _check_file(folder / name, entry, verify)
    shards = {
        split: [_records(folder / name, files[name], dtype) for name in names]
        for split, names in manifest.splits.items()
    }
    return ShardFolder(folder, manifest, shards)


def _check_file(path: pathlib.Path, entry: FileEntry, digests: bool) -> None:
    check_regular(path)
    size = path.stat().st_size
    if size != entry.bytes:
        raise Unusable(path, f"{size} bytes, not {entry.bytes}")
    if digests:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != entry.sha256:
            raise Unusable(path, "its digest differs from the manifest's")


def _records(path: pathlib.Path, entry: FileEntry, dtype: np.dtype) -> np.ndarray:
    """Returns the memory-mapped records of a shard."""
    try:
        records = np.lib.format.open_memmap(
            path, mode="r", max_header_size=MAX_HEADER_BYTES
        )
    except Exception as error:  # of any kind, as the header is a stranger's
        reason = f"it is not a .npy file: {one_line(error)}"
        raise Unusable(path, reason) from None
    if (records.dtype, records.shape) != (dtype, (entry.rows,)):
        raise Unusable(path, f"it is not a .npy file of {entry.rows} x {dtype}")
    return records


def free_bytes(folder: pathlib.Path) -> int:
    """Returns the free space of the disk on which the folder lies."""
    return shutil.disk_usage(folder).free


def check_disk(folder: pathlib.Path, needed: int, rows: str) -> None:
    """Raises ValueError if the folder's disk has fewer than `needed` bytes free."""
    if needed > (free := free_bytes(folder)):
        # In bytes, as rounded amounts may look the same.
        raise ValueError(
            f"The disk of {folder.parent} has {free:,} bytes free, and {rows} take "
            f"{needed:,}: make room, or choose another folder with --out or "
            "--data.cache."
        )
