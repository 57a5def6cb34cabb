"""The files of each split: found, opened by their format, watched for changes."""

import functools
import os
import pathlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pyarrow as pa

from loka_jax.data.blocks import BadRows, Block, Reader
from loka_jax.data.config import (
    CRITEO_CATEGORICAL,
    CRITEO_DENSE,
    CRITEO_LABEL,
    DataConfig,
    as_paths,
)
from loka_jax.data.filters import Filter, is_filter, parse_filter
from loka_jax.data.parquet import read_parquet, read_schema
from loka_jax.data.places import (
    DataFile,
    Stamp,
    below,
    existing,
    files_at,
    is_remote,
    listed,
    partitions_of,
    stamp_of,
)
from loka_jax.data.text import read_header, read_text

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

    train: tuple[DataFile, ...]
    valid: tuple[DataFile, ...]
    test: tuple[DataFile, ...]


def _by_ending(path: DataFile) -> Reader | None:
    """Returns the reader of files whose names end so, or None."""
    name = path.name.lower()
    return next((r for ending, r in READERS.items() if name.endswith(ending)), None)


def find_sources(config: DataConfig) -> Sources:
    """Returns the files that `config` names, or those in the folder that it names.

    Raises:
        ValueError: if a file is missing, no file in the folder is named as the training
            file, or a filter takes none.
    """
    if not config.paths:
        raise ValueError(
            f"Data of kind {config.kind} needs --data.path, a file or a folder."
        )
    parts = [_at(path) for path in config.paths]
    sources = Sources(*(sum(files, ()) for files in zip(*parts, strict=True)))
    everything = sources.train
    filters = filters_of(config)
    for split in ("valid", "test"):
        if split not in filters and (paths := as_paths(getattr(config, split))):
            files = sum((_data_at(path) for path in paths), ())
            sources = sources._replace(**{split: files})
    for split, rows in filters.items():
        files = tuple(file for file in everything if rows.takes(partitions_of(file)))
        if not files:
            raise ValueError(
                f"--data.{split} {getattr(config, split)!r} takes none of the "
                f"{len(everything):,} files: correct it, or --data.path."
            )
        sources = sources._replace(**{split: files})
    return sources


def find_files(paths: tuple[str, ...], rows: Filter) -> tuple[DataFile, ...]:
    """Returns the files of paths, but for those of whose partitions no row is taken.

    Raises:
        ValueError: if there is none.
    """
    found = sum((_data_at(path) for path in paths), ())
    files = tuple(file for file in found if rows.takes(partitions_of(file)))
    if not files:
        raise ValueError(
            f"no file of {', '.join(paths)} holds such rows: correct --data.where."
        )
    return files


def filters_of(config: DataConfig) -> dict[str, Filter]:
    """Returns the filters of the splits that have one, in place of files of their own.

    A file of the same name is meant where there is one.
    """
    filters = {}
    for split in Sources._fields:
        value = getattr(config, split)
        if split == "train" and value is not None:
            filters[split] = parse_filter(value, "--data.train")
        elif isinstance(value, str) and is_filter(value) and not os.path.exists(value):
            filters[split] = parse_filter(value, f"--data.{split}")
    return filters


def _at(path: str) -> Sources:
    """Returns the files of a path: of a folder by the words in their names."""
    if is_remote(path) or not os.path.isdir(os.path.expanduser(path)):
        return Sources(_data_at(path), (), ())
    folder = existing(path)
    own = [file for file in sorted(folder.iterdir()) if file.is_file()]
    own = [file for file in own if may_be_data(file)]
    if any(_splits_of(file.name) for file in own):
        return _by_words(folder, own)
    files = [file for file in below(folder) if may_be_data(file)]
    if not files:
        raise _no_data(path)
    if any(_splits_of(str(file.relative_to(folder))) for file in files):
        return _by_words(folder, files)
    return Sources(tuple(files), (), ())


def _data_at(path: str) -> tuple[DataFile, ...]:
    """Returns the files of a path that may be data; one alone is named on purpose."""
    files = files_at(path)
    if len(files) == 1:
        return files
    if data := tuple(file for file in files if may_be_data(file)):
        return data
    raise _no_data(path)


def _no_data(path: str) -> ValueError:
    return ValueError(
        f"{path} has no data file ({', '.join(READERS)}): correct --data.path."
    )


def _splits_of(name: str) -> list[str]:
    return [split for split, word in _WORDS.items() if word.search(name.lower())]


def _by_words(folder: pathlib.Path, files: list[pathlib.Path]) -> Sources:
    """Assigns the folder's files to splits by the words in their names."""
    splits: dict[str, list[pathlib.Path]] = {split: [] for split in _WORDS}
    names = []
    for path in files:
        names.append(str(path.relative_to(folder)))
        splits_of_file = _splits_of(names[-1])
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
            f"its name, only {listed(names)}: put it into "
            "the names of all training files, or name a file with --data.path, which "
            "leaves out the others."
        )
    return Sources(*(tuple(splits[split]) for split in Sources._fields))


def may_be_data(file: DataFile) -> bool:
    """Returns whether a file's name is one of a table, or of Criteo's format."""
    is_text = file.name.lower().removesuffix(".gz").endswith(".txt")
    return is_text or _by_ending(file) is not None


def left_out(config: DataConfig, sources: Sources) -> tuple[str, ...]:
    """Returns the names of what may be data in the folder, but is in no split."""
    path = config.paths[0] if len(config.paths) == 1 else ""
    folder = pathlib.Path(path).expanduser()
    if not path or is_remote(path) or not folder.is_dir():
        return ()
    found = {path.name for path in folder.iterdir() if may_be_data(path)}
    used = {str(file) for files in sources for file in files}
    return tuple(sorted(name for name in found if str(folder / name) not in used))


def reader_of(config: DataConfig, path: DataFile) -> Reader:
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
            "known: rename it, or name the table's files alone, as in --data.path "
            "'logs/*.csv'."
        )
    return _with_partitions(reader, partitions_of(path))


def _with_partitions(reader: Reader, partitions: dict[str, str]) -> Reader:
    """Returns a reader of a file whose folders name columns, too."""
    if not partitions:
        return reader

    def read(
        path: str, columns: tuple[str, ...], bad_rows: BadRows, **options: int
    ) -> Iterator[Block]:
        own = tuple(name for name in columns if name not in partitions)
        # Of no column, the rows would be unknown.
        asked = own or tuple(_types(path))[:1]
        for block in reader(path, asked, bad_rows, **options):
            table = block.table.select(own)
            for name in columns:
                if name in partitions:
                    value = pa.scalar(partitions[name], pa.large_string())
                    constant = pa.repeat(value, len(block.rows))
                    table = table.append_column(name, constant)
            yield block._replace(table=table.select(columns))

    return read


def column_types(config: DataConfig, path: DataFile) -> dict[str, pa.DataType | None]:
    """Returns the type of each column of a table; None for text, which has no types."""
    reader_of(config, path)  # which refuses other endings
    return dict.fromkeys(partitions_of(path)) | _types(str(path))


def _types(path: str) -> dict[str, pa.DataType | None]:
    name = path.lower()
    if name.endswith((".parquet", ".pq")):
        schema = read_schema(path)
        return dict(zip(schema.names, schema.types, strict=True))
    is_csv = name.endswith((".csv", ".csv.gz"))
    return dict.fromkeys(read_header(path, delimiter="," if is_csv else "\t"))


@contextmanager
def unchanged(stamps: dict[DataFile, Stamp]) -> Iterator[None]:
    """Checks the files after the block, also when it fails with a ValueError."""
    try:
        yield
    except ValueError:  # a change explains what looks like damage
        check_unchanged(stamps)
        raise
    check_unchanged(stamps)


def check_unchanged(stamps: dict[DataFile, Stamp]) -> None:
    """Raises ValueError with the first file whose stamp is not the given one."""
    for path, stamp in stamps.items():
        if stamp_of(path) != stamp:
            raise ValueError(
                f"{path} changed while it was read: wait until it is complete, then "
                "start again."
            )
