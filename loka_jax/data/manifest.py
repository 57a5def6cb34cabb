"""The manifest of a folder of shards, read as untrusted input.

It is JSON of a fixed form. Whatever else a file holds is refused in one sentence, as a
stranger's numbers would otherwise become sizes, offsets and lines on the console.
"""

import json
import math
import os
import pathlib
import re
import stat
from dataclasses import dataclass
from typing import Any

from loka_jax import saved_format
from loka_jax.data.batch import Schema

MANIFEST = "manifest.json"
FORMAT = "loka_jax shards"
SPLITS = ("train", "valid", "test")
MAX_MANIFEST_BYTES = 16 << 20
_FILE_NAME = re.compile(r"[a-z]+-[0-9]{2,6}\.(npy|parquet)")
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of the folder.

    Attributes:
        rows: the number of records, or of values of a vocabulary.
        bytes: its size.
        sha256: its digest.
        values_sha256: the digest of a vocabulary's values, whatever file holds them;
            that of the file for records.
    """

    rows: int
    bytes: int
    sha256: str
    values_sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a manifest.

    Attributes:
        schema: the columns and table sizes.
        files: all files by name.
        splits: the names of each split's shards.
        report: the conversion's counts, policies and sources.
        kind: the kind of the converted data.
        settings: the options of the conversion.
        standardizer: mean and standard deviation of each dense column, if they were
            standardized.
    """

    schema: Schema
    files: dict[str, FileEntry]
    splits: dict[str, list[str]]
    report: dict
    kind: str
    settings: dict
    standardizer: dict[str, list[float]] | None


class Unusable(ValueError):
    """A file or folder has to be made again.

    Attributes:
        reason: what is wrong with it.
    """

    def __init__(self, path: pathlib.Path, reason: str):
        """Takes the file or folder, and what is wrong with it."""
        super().__init__(f"{path} cannot be used ({reason}): convert the data again.")
        self.reason = reason


def unusable(path: pathlib.Path, reason: str) -> Unusable:
    """Returns the error for a file or folder that has to be made again."""
    return Unusable(path, reason)


def check_regular(path: pathlib.Path) -> None:
    """Raises ValueError if the file is missing, a link, or not a regular file."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        raise unusable(path, "it is missing") from None
    if not stat.S_ISREG(mode):
        raise unusable(path, "it is a link or not a regular file")


def read_manifest(folder: pathlib.Path) -> Manifest:
    """Returns the folder's manifest.

    Raises:
        ValueError: with the entry that is missing or not of its form.
    """
    path = folder / MANIFEST
    check_regular(path)
    try:
        return _parse(_load(path))
    except _Refused as error:
        raise unusable(path, str(error)) from None


def check_report(folder: pathlib.Path, report: dict) -> None:
    """Raises ValueError if the report lacks what a training run prints."""
    try:
        _typed(report, "split_rule", str)
        _names(report, "notes")
        for part in ("examples", "totals", "bad_rows"):
            counts = _typed(report, part, dict)
            for name in counts.keys() - {"samples"}:
                _count(counts, name)
        for facts in _typed(report, "categorical", dict).values():
            _check_facts(facts)
        for split, part in _typed(report, "splits", dict).items():
            if not isinstance(part, dict):
                raise _Refused(f"its split {split[:40]!r} is no object")
            for name, counts in _typed(part, "columns", dict).items():
                if not isinstance(counts, dict):
                    raise _Refused(f"its column {name[:40]!r} has no counts")
                for kind in counts:
                    _count(counts, kind)
    except _Refused as error:
        raise unusable(folder / MANIFEST, f"in its report, {error}") from None


def _check_facts(facts: object) -> None:
    """Refuses facts on a column that are not those of `column_facts`."""
    if not isinstance(facts, dict):
        raise _Refused("its 'categorical' has a column without facts")
    _count(facts, "rows")
    growth = ("new_values", "new_rows", "reserved") if "new_values" in facts else ()
    values = () if facts.get("values") is None else ("values",)
    for name in (*values, *growth):
        _count(facts, name)
    if facts.get("warning") is not None:
        _typed(facts, "warning", str)
    for pair in _typed(facts, "most_frequent", list):
        kinds = [type(part) for part in pair] if isinstance(pair, list) else None
        if kinds != [str, int]:
            raise _Refused("its 'most_frequent' are not values with counts")


class _Refused(Exception):
    """Why a manifest is not of its form."""


def _load(path: pathlib.Path) -> object:
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise _Refused(f"it is larger than {MAX_MANIFEST_BYTES} bytes")
    try:
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
        # Half of a surrogate pair could not be printed.
        json.dumps(value, ensure_ascii=False).encode()
    except (OSError, ValueError, RecursionError):
        raise _Refused("it is not JSON") from None
    return value


def _no_number(name: str):
    raise ValueError(f"{name} is not JSON")


def _parse(value: object) -> Manifest:
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise _Refused(f"its format is not {FORMAT!r}")
    why_not = saved_format.why_not(value.get("version"), saved_format.SHARDS)
    if why_not is not None:
        raise _Refused(why_not)
    files = {
        _file_name(name): _file_entry(entry, name)
        for name, entry in _typed(value, "files", dict).items()
    }
    schema = _schema(_typed(value, "schema", dict))
    return Manifest(
        schema=schema,
        files=files,
        splits=_splits(_typed(value, "splits", dict), files),
        report=_typed(value, "report", dict),
        kind=_typed(value, "kind", str),
        settings=_typed(value, "settings", dict),
        standardizer=_standardizer(value, len(schema.dense)),
    )


def _standardizer(parent: dict, num_dense: int) -> dict[str, list[float]] | None:
    if parent.get("standardizer") is None:
        return None
    entry = _typed(parent, "standardizer", dict)
    parts = {name: _typed(entry, name, list) for name in ("mean", "std")}
    for name, part in parts.items():
        is_finite = all(type(x) is float and math.isfinite(x) for x in part)
        if len(part) != num_dense or not is_finite:
            raise _Refused(f"its {name!r} is not a number for each dense column")
    return parts


def _typed(parent: dict, name: str, kind: type) -> Any:
    """Returns an entry of exactly this type: True is not a whole number."""
    if name not in parent:
        raise _Refused(f"it lacks {name!r}")
    if type(value := parent[name]) is not kind:
        shown = repr(value)[:40] if isinstance(value, str | int | float) else ""
        text = f"{type(value).__name__} {shown}".strip()
        raise _Refused(f"its {name!r} is {text}, not {kind.__name__}")
    return value


def _count(parent: dict, name: str) -> int:
    """Returns a whole number from 0 to 2^53."""
    if not 0 <= (value := _typed(parent, name, int)) <= 2**53:
        raise _Refused(f"its {name!r} is {str(value)[:40]}")
    return value


def _names(parent: dict, name: str) -> list[str]:
    names = _typed(parent, name, list)
    if not all(isinstance(item, str) for item in names):
        raise _Refused(f"its {name!r} are not all text")
    return names


def _file_name(name: str) -> str:
    # A name without separators cannot lead out of the folder.
    if not _FILE_NAME.fullmatch(name):
        raise _Refused(f"it names a file {name[:80]!r}")
    return name


def _file_entry(entry: object, name: str) -> FileEntry:
    if not isinstance(entry, dict):
        raise _Refused(f"its entry of {name} is not a dict")
    digest = _digest(entry, "sha256")
    has_values = "values_sha256" in entry
    return FileEntry(
        rows=_count(entry, "rows"),
        bytes=_count(entry, "bytes"),
        sha256=digest,
        values_sha256=_digest(entry, "values_sha256") if has_values else digest,
    )


def _digest(entry: dict, name: str) -> str:
    if not _DIGEST.fullmatch(digest := _typed(entry, name, str)):
        raise _Refused(f"its {name!r} is {digest[:40]!r}")
    return digest


def _splits(splits: dict, files: dict[str, FileEntry]) -> dict[str, list[str]]:
    if set(splits) != set(SPLITS):
        raise _Refused(f"its splits are not {', '.join(SPLITS)}")
    shards = {split: _names(splits, split) for split in SPLITS}
    for split, names in shards.items():
        for name in names:
            if name not in files:
                raise _Refused(f"it lacks an entry of {name[:80]!r}")
            if not re.fullmatch(rf"{split}-\d+\.npy", name):
                raise _Refused(f"its split {split} has {name}")
            if not files[name].rows:
                raise _Refused(f"its {name} has no rows")
        if len(set(names)) < len(names):
            raise _Refused(f"its split {split} has a shard twice")
    return shards


def _schema(entry: dict) -> Schema:
    sizes = _typed(entry, "vocab_sizes", list)
    if not all(type(rows) is int and 1 <= rows < 2**31 for rows in sizes):
        raise _Refused("its 'vocab_sizes' are not all whole numbers in [1, 2^31)")
    slots = _typed(entry, "slots", list)
    if not all(type(count) is int for count in slots):
        raise _Refused("its 'slots' are not all whole numbers")
    try:
        return Schema(
            label=_typed(entry, "label", str),
            dense=tuple(_names(entry, "dense")),
            categorical=tuple(_names(entry, "categorical")),
            vocab_sizes=tuple(sizes),
            multi=tuple(_names(entry, "multi")),
            owners=tuple(_names(entry, "owners")),
            slots=tuple(slots),
            weighted_multi=tuple(_names(entry, "weighted_multi")),
            weighted=_typed(entry, "weighted", bool),
            further_labels=tuple(_names(entry, "further_labels")),
        )
    except ValueError:
        raise _Refused("its schema contradicts itself") from None
