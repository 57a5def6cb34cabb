"""Converted data on disk: memory-mapped `.npy` shards and a manifest.

A folder holds `manifest.json` and, beside it, `train-00000.npy` and so on, with one
structured record a row (label, dense, ids), and `vocabulary-00.parquet` and so on. It
is written under a temporary name and renamed when complete. A folder that is opened is
untrusted input: regular files only, no pickles; sizes, shapes and digests are checked
here, ids batch by batch by the reader.
"""

import hashlib
import json
import operator
import os
import pathlib
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from loka_jax.data.batch import Schema

MANIFEST = "manifest.json"
FORMAT = "loka_jax shards"
VERSION = 1
SPLITS = ("train", "valid", "test")
SHARD_ROWS = 1 << 19
SHARD_BYTES = 1 << 27  # of fewer rows, if they are long
MAX_MANIFEST_BYTES = 16 << 20
# Digests of folders up to this size are verified at every opening, in about a second;
# those of larger ones only by `experiments/convert.py --verify`.
MAX_DIGEST_BYTES = 1 << 30
_FILE_NAME = re.compile(r"[a-z]+-[0-9]{2,6}\.(npy|parquet)")


@dataclass(frozen=True, kw_only=True)
class ShardFolder:
    """An opened folder of shards.

    Attributes:
        path: the folder.
        schema: the columns and table sizes.
        shards: the memory-mapped records of each split; a split may have none.
        digests: the SHA-256 digests of each split's shards, as the manifest has them.
        vocabulary_digests: a SHA-256 digest of the values of each field with a
            vocabulary.
        report: the conversion's counts, policies and sources.
        settings: the options of the conversion.
    """

    path: pathlib.Path
    schema: Schema
    shards: dict[str, list[np.ndarray]]
    digests: dict[str, list[str]]
    vocabulary_digests: dict[str, str]
    report: dict
    settings: dict


def record_dtype(num_dense: int, num_fields: int) -> np.dtype:
    """Returns the type of one row: 4 (1 + n + F) bytes without gaps."""
    dense, ids = ("dense", "<f4", (num_dense,)), ("ids", "<i4", (num_fields,))
    return np.dtype([("label", "<f4"), dense, ids])


class ShardWriter:
    """Writes the files of a new folder of shards."""

    def __init__(self, folder: pathlib.Path):
        """Writes into `folder`, which exists and is empty."""
        self._folder = folder
        self._files: dict[str, dict] = {}
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
        name = f"{split}-{len(self._splits[split]):05d}.npy"
        with open(self._folder / name, "wb") as file:
            np.save(file, records, allow_pickle=False)
        self._splits[split].append(name)
        self._register(name, rows=len(records))

    def add_vocabulary(self, field: int, values: pa.Array) -> None:
        """Writes a field's vocabulary: the values of its ids, from id 1 on."""
        name = vocabulary_name(field)
        table = pa.table({"value": values})
        parquet.write_table(table, self._folder / name, write_page_checksum=True)
        self._register(name, rows=len(values))
        # The file's own digest differs between versions of Arrow.
        self._files[name]["values_sha256"] = _digest_of_values(values)

    def _register(self, name: str, *, rows: int) -> None:
        with open(self._folder / name, "r+b") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.seek(0, os.SEEK_END)
        self._files[name] = {"rows": rows, "bytes": size, "sha256": digest}

    def finish(
        self, schema: Schema, *, sources: list[dict], settings: dict, report: dict
    ) -> None:
        """Writes the remaining rows and the manifest, which completes the folder."""
        for split, waiting in self._waiting.items():
            if sum(map(len, waiting)):
                self.add_shard(split, np.concatenate(waiting))
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "schema": asdict(schema),
            "splits": self._splits,
            "files": self._files,
            "sources": sources,
            "settings": settings,
            "report": report,
        }
        with open(self._folder / MANIFEST, "w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1, allow_nan=False)
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
def new_folder(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary folder, renamed to `target` on success or else removed.

    Raises:
        ValueError: if the target exists already or cannot be written.
    """
    if target.is_symlink() or (target.exists() and not _is_empty_folder(target)):
        raise ValueError(f"{target} exists already: remove it, or choose another name.")
    partial = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{target.name}.partial-"
        _remove_abandoned(target.parent, prefix)
        partial = pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        yield partial
        os.rename(partial, target)
    except OSError as error:
        raise ValueError(
            f"{target} cannot be written ({error.strerror or error}): mend that, or "
            "choose another folder with --out or --data.cache."
        ) from None
    finally:  # also after Ctrl-C; after the rename there is nothing to remove
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


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
    manifest = _read_manifest(folder)
    files, splits = manifest["files"], manifest["splits"]
    try:
        schema = _schema(manifest["schema"])
        dtype = record_dtype(len(schema.dense), len(schema.categorical))
        total = sum(entry["bytes"] for entry in files.values())
        digests = total <= MAX_DIGEST_BYTES if verify is None else verify
        for name, entry in files.items():
            _check_file(folder, name, entry, digests)
        shards = {
            split: [
                _records(folder, name, files[name]["rows"], dtype) for name in names
            ]
            for split, names in splits.items()
        }
        split_digests = {
            split: [files[name]["sha256"] for name in names]
            for split, names in splits.items()
        }
        vocabulary_digests = _vocabulary_digests(schema, files)
    except (KeyError, TypeError, AttributeError):
        raise ValueError(_unusable(folder, "its manifest lacks an entry")) from None
    report, settings = manifest.get("report", {}), manifest.get("settings", {})
    return ShardFolder(
        path=folder,
        schema=schema,
        shards=shards,
        digests=split_digests,
        vocabulary_digests=vocabulary_digests,
        report=report,
        settings=settings,
    )


def _vocabulary_digests(schema: Schema, files: dict) -> dict[str, str]:
    entries = {
        column: files.get(vocabulary_name(field))
        for field, column in enumerate(schema.categorical)
    }
    # Older folders have no digest of the values, only that of the file.
    return {
        column: entry.get("values_sha256", entry["sha256"])
        for column, entry in entries.items()
        if entry is not None
    }


def _unusable(path: pathlib.Path, reason: str) -> str:
    return f"{path} cannot be used ({reason}): convert the data again."


def _schema(entry: dict) -> Schema:
    """Returns the schema, forcing the manifest's entries to text and whole numbers."""
    return Schema(
        label=str(entry["label"]),
        dense=tuple(str(name) for name in entry["dense"]),
        categorical=tuple(str(name) for name in entry["categorical"]),
        vocab_sizes=tuple(operator.index(rows) for rows in entry["vocab_sizes"]),
    )


def _read_manifest(folder: pathlib.Path) -> dict:
    path = folder / MANIFEST
    _check_regular(path)
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise ValueError(
            _unusable(path, f"it is larger than {MAX_MANIFEST_BYTES} bytes")
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(_unusable(path, "it is not JSON")) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(_unusable(path, f"its format is not {FORMAT!r}"))
    if manifest.get("version") != VERSION:
        raise ValueError(_unusable(path, f"its version is not {VERSION}"))
    parts = [manifest.get(key) for key in ("schema", "files", "splits")]
    if not all(isinstance(part, dict) for part in parts):
        raise ValueError(_unusable(path, "it lacks schema, files or splits"))
    if set(manifest["splits"]) != set(SPLITS):
        raise ValueError(_unusable(path, f"its splits are not {', '.join(SPLITS)}"))
    return manifest


def _check_regular(path: pathlib.Path) -> None:
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        raise ValueError(_unusable(path, "it is missing")) from None
    if not stat.S_ISREG(mode):
        raise ValueError(_unusable(path, "it is a link or not a regular file"))


def _check_file(folder: pathlib.Path, name: str, entry: dict, digests: bool) -> None:
    # A name without separators cannot lead out of the folder.
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(_unusable(folder / MANIFEST, f"it names a file {name[:80]!r}"))
    path = folder / name
    _check_regular(path)
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise ValueError(_unusable(path, f"{size} bytes, not {entry['bytes']}"))
    if digests:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != entry["sha256"]:
            raise ValueError(_unusable(path, "its digest differs from the manifest's"))


def _records(folder: pathlib.Path, name: str, rows: int, dtype: np.dtype) -> np.ndarray:
    path = folder / name
    try:
        records = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError):
        raise ValueError(_unusable(path, "it is not a .npy file")) from None
    if records.dtype != dtype or records.shape != (rows,):
        raise ValueError(_unusable(path, f"{records.dtype} x {records.shape}"))
    return records
