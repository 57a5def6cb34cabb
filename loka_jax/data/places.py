"""Where files lie: paths, folders, globs, and object stores by pyarrow's file systems.

A local file is a `pathlib.Path`, one of `s3://`, `gs://` and the like a `RemoteFile`.
The values of Hive partitions, as in `dt=2026-11-01/part-0.parquet`, are columns.
"""

import dataclasses
import functools
import os
import pathlib
import re
import stat
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import fs

from loka_jax.options import did_you_mean
from loka_jax.terminal import one_line

# What changes whenever a file's contents do: size, the time of the last writing, which
# programs can set back, and that of the last writing or renaming, which they cannot
# (0 in an object store). Not the inode: some network disks renumber a file that is not
# open.
type Stamp = tuple[int, int, int]
_WILD = re.compile(r"[*?[]")


@dataclasses.dataclass(frozen=True, order=True)
class RemoteFile:
    """A file of an object store.

    Attributes:
        uri: its address, such as s3://bucket/logs/part-0.parquet.
        written: the time of the last writing, in nanoseconds since 1970.
    """

    uri: str
    size: int = dataclasses.field(compare=False)
    written: int = dataclasses.field(compare=False)

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.uri.rpartition("/")[2]

    def __str__(self) -> str:
        return self.uri


type DataFile = pathlib.Path | RemoteFile


def is_remote(path: str | os.PathLike) -> bool:
    """Returns whether a path is an address, as s3://bucket/file is."""
    return re.match("[a-z][a-z0-9+.-]+://", str(path)) is not None


def open_file(path: str) -> Any:
    """Returns a local or remote file, opened to be read anywhere in it."""
    if not is_remote(path):
        return open(path, "rb")
    system, place = _system(path)
    return system.open_input_file(place)


def bytes_of(path: str) -> int:
    """Returns the size of a local or remote file."""
    if not is_remote(path):
        return os.path.getsize(path)
    system, place = _system(path)
    return int(system.get_file_info(place).size)


def address_of(file: DataFile) -> str:
    """Returns what tells a file from all others, wherever it is named from."""
    return str(file.resolve()) if isinstance(file, pathlib.Path) else file.uri


def stamp_of(file: DataFile) -> Stamp:
    """Returns the file's stamp; refuses one that is gone or not a regular file."""
    if isinstance(file, RemoteFile):
        (found,) = _listed(file.uri) or (None,)
        if found is None:
            raise ValueError(f"{file} is gone: put it back, or correct --data.path.")
        return found.size, found.written, 0
    try:
        status = os.stat(file)
    except OSError as error:
        raise ValueError(
            f"{file} cannot be read ({error.strerror}): mend that, or correct "
            "--data.path."
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(
            f"{file} is a pipe or a device, and data are read twice: write them to a "
            "file."
        )
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def partitions_of(file: DataFile) -> dict[str, str]:
    """Returns the columns that a file's folders name, as country=AT does."""
    folders = str(file).split("/")[:-1]
    pairs = (re.fullmatch(r"(\w[\w.-]*)=(.*)", folder) for folder in folders)
    return {p[1]: urllib.parse.unquote(p[2]) for p in pairs if p is not None}


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Returns what became of files since, each with its size and time by its address.

    Of several splits: by their names.
    """
    said = []
    for split in now:
        was, is_now = before.get(split, {}), now[split]
        both = was.keys() & is_now.keys()
        kinds = {
            "is new": is_now.keys() - was.keys(),
            "is gone": was.keys() - is_now.keys(),
            "has changed": {k for k in both if [*is_now[k]] != [*was[k]]},
        }
        for what, files in kinds.items():
            said += [f"{file} of the {split} files {what}" for file in sorted(files)]
    return said


def shown(file: DataFile) -> str:
    """Returns a file's name, with the folders that say its partitions."""
    parts = str(file).split("/")
    return "/".join([*(part for part in parts[:-1] if "=" in part), parts[-1]])


def existing(path: str | pathlib.Path) -> pathlib.Path:
    """Returns the path with `~` expanded."""
    path = pathlib.Path(path).expanduser()
    if path.exists():
        return path
    folder = path.parent
    if not folder.is_dir():
        raise ValueError(f"{path} does not exist: there is no folder {folder} either.")
    names = sorted(entry.name for entry in folder.iterdir())
    hint = did_you_mean(path.name, names, cutoff=0.5)
    raise ValueError(
        f"{path} does not exist{hint}: the folder holds {listed(names) or 'nothing'}."
    )


def files_at(path: str) -> tuple[DataFile, ...]:
    """Returns the file of a path, those below a folder, or those that a glob matches.

    In the order of their names; names that begin with a dot or an underscore, which
    Hive and Spark write beside data, are left out below folders. `*` and `?` stand for
    characters of a name, `**` for any folders.

    Raises:
        ValueError: if there is none, or a store cannot be asked.
    """
    if is_remote(path):
        files = _matching(path, _remote_files(path))
    elif _WILD.search(path) and not os.path.exists(os.path.expanduser(path)):
        path = os.path.expanduser(path)
        root = pathlib.Path(_root(path) or ".")
        files = _matching(path, below(root) if root.is_dir() else ())
    else:
        found = existing(path)
        files = below(found) if found.is_dir() else (found,)
    if not files:
        raise ValueError(f"there is no file at {path}: correct --data.path.")
    return tuple(files)


def below(folder: pathlib.Path) -> tuple[pathlib.Path, ...]:
    """Returns the files below a folder."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        own = (name for name in names if not name.startswith((".", "_")))
        found += [pathlib.Path(root, name) for name in own]
    return tuple(sorted(found))


def _remote_files(path: str) -> Iterator[RemoteFile]:
    root = _root(path) if _WILD.search(path) else path.rstrip("/")
    base = root.rstrip("/")
    for file in _listed(base):
        folders = file.uri.removeprefix(base).split("/")
        if file.uri == base or not any(x.startswith((".", "_")) for x in folders):
            yield file


def _listed(uri: str) -> tuple[RemoteFile, ...]:
    """Returns the file at an address, or those below it."""
    system, place = _system(uri)
    prefix = uri.removesuffix(place)
    try:
        info = system.get_file_info(place)
        if info.type == fs.FileType.NotFound:
            return ()
        infos = [info]
        if info.type == fs.FileType.Directory:
            infos = system.get_file_info(fs.FileSelector(place, recursive=True))
    except (OSError, pa.ArrowException) as error:
        raise ValueError(
            f"{uri} cannot be listed ({one_line(error)}): check the address, and the "
            "credentials and region in the environment."
        ) from None
    files = (info for info in infos if info.type == fs.FileType.File)
    return tuple(
        sorted(RemoteFile(prefix + x.path, x.size, x.mtime_ns or 0) for x in files)
    )


@functools.cache
def _system_of(store: str) -> fs.FileSystem:
    return fs.FileSystem.from_uri(store)[0]


def _system(uri: str) -> tuple[fs.FileSystem, str]:
    """Returns the file system of an address, and the path in it."""
    scheme, _, rest = uri.partition("://")
    bucket, _, query = rest.partition("/")
    try:
        return _system_of(f"{scheme}://{bucket}"), f"{bucket}/{query}".rstrip("/")
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ValueError(
            f"{uri} cannot be opened ({one_line(error)}): use a local path, or an "
            "address of s3:// or gs://."
        ) from None


def _root(path: str) -> str:
    """Returns the folders of a glob before its first wild card."""
    parts = path.split("/")
    wild = next(i for i, part in enumerate(parts) if _WILD.search(part))
    return "/".join(parts[:wild]) or ("/" if path.startswith("/") else "")


def _matching(path: str, files: Any) -> tuple[Any, ...]:
    """Returns the files that a glob matches, or that lie below what it matches."""
    if not _WILD.search(path):
        return tuple(files)
    parts = [_regex(part) for part in path.removeprefix("./").rstrip("/").split("/")]
    pattern = re.compile("/".join(parts).replace("**/", "(?:.*/)?") + "(?:/.*)?")
    return tuple(file for file in files if pattern.fullmatch(str(file)))


def _regex(part: str) -> str:
    if part == "**":
        return "**"
    pieces = re.split(r"(\*|\?|\[[^]]+\])", part)
    known = {"*": "[^/]*", "?": "[^/]"}
    return "".join(
        known.get(x) or (x.replace("[!", "[^") if x[:1] == "[" else re.escape(x))
        for x in pieces
    )


def listed(names: Sequence[str], limit: int = 5) -> str:
    """Returns the first names, and how many more there are."""
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
