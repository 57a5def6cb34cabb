"""The manifest of a folder of shards, read as untrusted input.

It is JSON of the form of `Manifest`. Whatever else a file holds is refused in one
sentence, as a stranger's numbers would otherwise become sizes, offsets and lines on the
console.
"""

import os
import pathlib
import re
import stat
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from loka_jax import saved_format
from loka_jax.data.batch import Schema
from loka_jax.terminal import clip

MANIFEST = "manifest.json"
FORMAT = "loka_jax shards"
SPLITS = ("train", "valid", "test")
MAX_MANIFEST_BYTES = 16 << 20

type Count = Annotated[int, Meta(ge=0, le=2**53)]
type Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
# A name without separators cannot lead out of the folder.
type FileName = Annotated[str, Meta(pattern=r"^[a-z]+-[0-9]{2,6}\.(npy|parquet)\Z")]


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file of the folder.

    Attributes:
        rows: the number of records, or of values of a vocabulary.
        bytes: its size.
        sha256: its digest.
        values_sha256: the digest of a vocabulary's values, whatever file holds them;
            None for records.
    """

    rows: Count
    bytes: Count
    sha256: Digest
    values_sha256: Digest | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a manifest.

    Attributes:
        format: what kind of file it is.
        version: the number of the format.
        schema: the columns and table sizes.
        splits: the names of each split's shards.
        files: all files by name.
        kind: the kind of the converted data.
        sources: name, size and time of the files that were converted.
        settings: the options of the conversion.
        forms: how the values of each table were written as text.
        standardizer: mean and standard deviation of each dense column, if they were
            standardized.
        report: the conversion's counts, policies and sources.
    """

    format: Literal["loka_jax shards"] = FORMAT
    version: int = saved_format.SHARDS
    schema: Schema
    splits: dict[str, list[FileName]]
    files: dict[FileName, FileEntry]
    kind: str = "table"
    sources: list[dict[str, Any]]
    settings: dict[str, Any]
    forms: dict[str, str] = {}
    standardizer: dict[str, list[float]] | None = None
    report: dict[str, Any]

    def __post_init__(self):
        """Checks that the parts agree."""
        if set(self.splits) != set(SPLITS):
            raise ValueError(f"its splits are not {', '.join(SPLITS)}")
        for split, names in self.splits.items():
            for name in names:
                if name not in self.files:
                    raise ValueError(f"it lacks an entry of {name!r}")
                if not re.fullmatch(rf"{split}-\d+\.npy", name):
                    raise ValueError(f"its split {split} has {name}")
                if not self.files[name].rows:
                    raise ValueError(f"its {name} has no rows")
            if len(set(names)) < len(names):
                raise ValueError(f"its split {split} has a shard twice")
        sizes = {k: len(v) for k, v in (self.standardizer or {}).items()}
        num_dense = len(self.schema.dense)
        if sizes not in ({}, {"mean": num_dense, "std": num_dense}):
            raise ValueError(
                "its standardizer has not a mean and a std of each dense column"
            )


class Unusable(ValueError):
    """A file or folder has to be made again.

    Attributes:
        reason: what is wrong with it.
    """

    def __init__(self, path: pathlib.Path, reason: str):
        """Takes the file or folder, and what is wrong with it."""
        super().__init__(f"{path} cannot be used ({reason}): convert the data again.")
        self.reason = reason


def check_regular(path: pathlib.Path) -> None:
    """Raises ValueError if the file is missing, a link, or not a regular file."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        raise Unusable(path, "it is missing") from None
    if not stat.S_ISREG(mode):
        raise Unusable(path, "it is a link or not a regular file")


class _Header(msgspec.Struct):
    format: Literal["loka_jax shards"]
    version: Any = None


def read_manifest(folder: pathlib.Path) -> Manifest:
    """Returns the folder's manifest.

    Raises:
        ValueError: with the entry that is missing or not of its form.
    """
    path = folder / MANIFEST
    check_regular(path)
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise Unusable(path, f"it is larger than {MAX_MANIFEST_BYTES} bytes")
    try:
        text = path.read_bytes()
        header = msgspec.json.decode(text, type=_Header)
        reason = saved_format.why_not(header.version, saved_format.SHARDS)
        if reason is None:
            return msgspec.json.decode(text, type=Manifest)
    except (OSError, ValueError, RecursionError) as error:
        reason = _reason(error)
    raise Unusable(path, reason)


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
    """What a training run prints."""

    split_rule: str
    notes: list[str]
    examples: dict[str, Count]
    totals: dict[str, Count]
    bad_rows: _BadRows
    categorical: dict[str, _Facts]
    splits: dict[str, _Split]


def check_report(folder: pathlib.Path, report: dict) -> None:
    """Raises ValueError if the report lacks what a training run prints."""
    try:
        msgspec.convert(report, _Report)
    except msgspec.ValidationError as error:
        raise Unusable(folder / MANIFEST, f"in its report, {_reason(error)}") from None


def _reason(error: BaseException) -> str:
    """Returns what is wrong, with the place, in one line."""
    return clip(error, 200)
