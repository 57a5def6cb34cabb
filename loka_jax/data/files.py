"""The files of each split: found, opened by their format, watched for changes."""

import functools
import os
import pathlib
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import pyarrow as pa

from loka_jax.data.blocks import Reader
from loka_jax.data.config import (
    CRITEO_CATEGORICAL,
    CRITEO_DENSE,
    CRITEO_LABEL,
    DataConfig,
)
from loka_jax.data.parquet import read_parquet, read_schema
from loka_jax.data.text import read_header, read_text
from loka_jax.options import did_you_mean

_commas = functools.partial(read_text, delimiter=",")
_tabs = functools.partial(read_text, delimiter="\t")
# The readers of tables by the ending of their file.
READERS: dict[str, Reader] = {
    ".csv": _commas,
    ".tsv": _tabs,
    ".tab": _tabs,
    ".parquet": read_parquet,
    ".pq": read_parquet,
    ".csv.gz": _commas,
    ".tsv.gz": _tabs,
    ".tab.gz": _tabs,
}
# Whole words only: `latest.csv` is not a test file.
_WORDS = {
    "train": re.compile(r"(?<![a-z])train(ing)?(?![a-z])"),
    "valid": re.compile(r"(?<![a-z])val(id|idation)?(?![a-z])"),
    "test": re.compile(r"(?<![a-z])test(ing)?(?![a-z])"),
}


class Sources(NamedTuple):
    """The files of each split; without `valid`, rows of `train` are split off."""

    train: tuple[pathlib.Path, ...]
    valid: tuple[pathlib.Path, ...]
    test: tuple[pathlib.Path, ...]


def _by_ending(path: pathlib.Path) -> Reader | None:
    """Returns the reader of files whose names end so, or None."""
    name = path.name.lower()
    return next((r for ending, r in READERS.items() if name.endswith(ending)), None)


def existing(path: str | pathlib.Path) -> pathlib.Path:
    """Returns the path with `~` expanded."""
    path = pathlib.Path(path).expanduser()
    if path.exists():
        return path
    folder = path.parent
    if not folder.is_dir():
        raise ValueError(f"{path} does not exist: there is no folder {folder} either.")
    names = sorted(entry.name for entry in folder.iterdir())
    hint = did_you_mean(path.name, names, cutoff=0.5).strip()
    hint = hint or f"the folder holds {listed(names) or 'nothing'}."
    raise ValueError(f"{path} does not exist: {hint}")


def find_sources(config: DataConfig) -> Sources:
    """Returns the files that `config` names, or those in the folder that it names.

    Raises:
        ValueError: if a file is missing, or no file in the folder is named as the
            training file.
    """
    if config.path is None:
        raise ValueError(
            f"Data of kind {config.kind} needs --data.path, a file or a folder."
        )
    path = existing(config.path)
    sources = _in_folder(path) if path.is_dir() else Sources((path,), (), ())
    if config.valid is not None:
        sources = sources._replace(valid=(_file(config.valid),))
    if config.test is not None:
        sources = sources._replace(test=(_file(config.test),))
    return sources


def _file(name: str) -> pathlib.Path:
    path = existing(name)
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name one file.")
    return path


def _in_folder(folder: pathlib.Path) -> Sources:
    """Assigns the folder's files to splits by the words in their names."""
    splits: dict[str, list[pathlib.Path]] = {split: [] for split in _WORDS}
    names = []
    for path in sorted(folder.iterdir()):
        if path.is_dir() or not _may_be_data(path):
            continue
        names.append(path.name)
        stem = path.name.lower()
        splits_of_file = [s for s, word in _WORDS.items() if word.search(stem)]
        if len(splits_of_file) > 1:
            raise ValueError(
                f"{path} could be {' or '.join(splits_of_file)}: rename it, or name "
                "the files with --data.path, --data.valid and --data.test."
            )
        if splits_of_file:
            splits[splits_of_file[0]].append(path)
    if not splits["train"]:
        raise ValueError(
            f"{folder} has no data file ({', '.join(READERS)}) with the word train in "
            f"its name, only {listed(names) or 'other files'}: put it into "
            "the names of all training files, or name a file with --data.path, which "
            "leaves out the others."
        )
    return Sources(*(tuple(splits[split]) for split in Sources._fields))


def _may_be_data(path: pathlib.Path) -> bool:
    is_text = path.name.lower().removesuffix(".gz").endswith(".txt")
    return is_text or _by_ending(path) is not None


def left_out(config: DataConfig, sources: Sources) -> tuple[str, ...]:
    """Returns the names of what may be data in the folder, but is in no split."""
    folder = pathlib.Path(config.path or "").expanduser()
    if config.path is None or not folder.is_dir():
        return ()
    found = {path.name for path in folder.iterdir() if _may_be_data(path)}
    used = {path.name for paths in sources for path in paths if path.parent == folder}
    return tuple(sorted(found - used))


def listed(names: Sequence[str], limit: int = 5) -> str:
    """Returns the first names, and how many more there are."""
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def reader_of(config: DataConfig, path: pathlib.Path) -> Reader:
    """Returns the reader of a file: of its kind, or of the format its name implies.

    Criteo's files are tab separated and have no header; those of `test.txt` have no
    label either.
    """
    if config.kind == "criteo":
        names = (CRITEO_LABEL, *CRITEO_DENSE, *CRITEO_CATEGORICAL)
        return functools.partial(_tabs, names=names)
    reader = _by_ending(path)
    if reader is None:
        raise ValueError(
            f"{path} must end in one of {', '.join(READERS)}, so that its format is "
            "known: rename it."
        )
    return reader


def column_types(
    config: DataConfig, path: pathlib.Path
) -> dict[str, pa.DataType | None]:
    """Returns the type of each column of a table; None in text, which has no types."""
    reader = reader_of(config, path)
    if reader is read_parquet:
        schema = read_schema(str(path))
        return dict(zip(schema.names, schema.types, strict=True))
    delimiter = "\t" if reader is _tabs else ","
    return dict.fromkeys(read_header(str(path), delimiter=delimiter))


# What changes whenever a file's contents do: size, the time of the last writing, which
# programs can set back, and that of the last writing or renaming, which they cannot.
# Not the inode: some network disks renumber a file that is not open.
type Stamp = tuple[int, int, int]


def stamp_of(path: pathlib.Path) -> Stamp:
    """Returns the file's stamp; refuses one that is gone or not a regular file."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): mend that, or correct "
            "--data.path."
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(
            f"{path} is a pipe or a device, and data are read twice: write them to a "
            "file."
        )
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


@contextmanager
def unchanged(stamps: dict[pathlib.Path, Stamp]) -> Iterator[None]:
    """Checks the files after the block, also when it fails with a ValueError."""
    try:
        yield
    except ValueError:  # a change explains what looks like damage
        check_unchanged(stamps)
        raise
    check_unchanged(stamps)


def check_unchanged(stamps: dict[pathlib.Path, Stamp]) -> None:
    """Raises ValueError with the first file whose stamp is not the given one."""
    for path, stamp in stamps.items():
        if stamp_of(path) != stamp:
            raise ValueError(
                f"{path} changed while it was read: wait until it is complete, then "
                "start again."
            )
