"""Finds the files of each split, and explains what is wrong when it cannot."""

import difflib
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from loka_jax.data.config import DataConfig

Format = Literal["csv", "tsv", "parquet"]
_FORMATS: dict[str, Format] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
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


def data_format(path: pathlib.Path) -> Format | None:
    """Returns the format that the file's name implies, or None."""
    name = path.name.lower().removesuffix(".gz")
    return _FORMATS.get(os.path.splitext(name)[1])


def existing(path: str | pathlib.Path) -> pathlib.Path:
    """Returns the path with `~` expanded.

    Raises:
        ValueError: if it does not exist; the message suggests similar names.
    """
    path = pathlib.Path(path).expanduser()
    if path.exists():
        return path
    folder = path.parent
    if not folder.is_dir():
        raise ValueError(f"{path} does not exist: there is no folder {folder} either.")
    names = sorted(entry.name for entry in folder.iterdir())
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    else:
        hint = f"the folder holds {', '.join(names[:5]) or 'nothing'}."
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
            f"{folder} has no data file (.csv, .tsv, .parquet, also .gz) with the word "
            f"train in its name, only {listed(names) or 'other files'}: put it into "
            "the names of all training files, or name a file with --data.path, which "
            "leaves out the others."
        )
    return Sources(*(tuple(splits[split]) for split in Sources._fields))


def _may_be_data(path: pathlib.Path) -> bool:
    is_text = path.name.lower().removesuffix(".gz").endswith(".txt")
    return is_text or data_format(path) is not None


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
