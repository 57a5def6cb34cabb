"""Reads, writes and compares JSON files.

They are written in one step, and in strict JSON: NaN and infinity become null.

A file that is read may come from others. So its size is checked before it is parsed,
its depth and its numbers are bounded, and a name may occur only once in an object;
msgspec's own parser would take the last of two, and integers of any length. The types
of the values are msgspec's to check: `typed`.
"""

import dataclasses
import functools
import json
import logging
import math
import os
import reprlib
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from loka_jax.options import did_you_mean
from loka_jax.terminal import clip, printable

MAX_BYTES = 16 << 20  # empty lists take 27 times as much memory as their text
MAX_LINES_BYTES = 64 << 20  # of the lines that a page shows
_MAX_LINE_BYTES = 4 << 20
_MAX_DEPTH = 64
_TOO_DEEP = f"it is nested more than {_MAX_DEPTH} deep"
_INTEGERS = range(-(1 << 63), 1 << 64)  # what 64 bits hold, signed or not

_log = logging.getLogger(__name__)
_short = reprlib.Repr(maxstring=200, maxlist=30).repr


def jsonable(value: object, *, nan_as_null: bool = True) -> object:
    """Returns `value` in JSON's types: tuples as lists, NumPy scalars as numbers.

    NaN and infinity become None, or are refused.

    Raises:
        ValueError: if JSON cannot represent the value.
    """
    plain = functools.partial(jsonable, nan_as_null=nan_as_null)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = np.asarray(value).item()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        if int(value) in _INTEGERS:
            return value
        raise ValueError("an integer that does not fit into 64 bits cannot be read.")
    if isinstance(value, float):
        if nan_as_null or math.isfinite(value):
            return value if math.isfinite(value) else None
        raise ValueError(f"{value} has no form in JSON: use a finite number or None.")
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    raise ValueError(
        f"a {type(value).__name__} has no form in JSON: use numbers, text, lists and "
        "dicts."
    )


def dumps(value: object, *, indent: int | None = None) -> str:
    """Returns `value` as strict JSON text."""
    return json.dumps(jsonable(value), indent=indent, allow_nan=False)


def write(path: Path, value: object) -> None:
    """Writes `value` as JSON to `path`; a crash leaves the old file or the new one."""
    write_text(path, dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes `text` to `path` in one step; what is no UTF-8 in it becomes escapes."""
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Writes `content` to `path` in one step: temporary file, fsync, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def read(path: Path, *, max_bytes: int = MAX_BYTES) -> object:
    """Returns the value in the JSON file `path`.

    Raises:
        ValueError: if it is not a file, larger than `max_bytes`, or not strict JSON.
        OSError: if it does not exist or must not be read.
    """
    _require_file(path)
    with open(path, "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"{path} is larger than {max_bytes >> 20} MiB: replace it.")
    try:
        return _parsed(content)
    except ValueError as error:
        raise ValueError(
            f"{path} is not JSON ({error}): restore it, or name another file."
        ) from None


def typed[T](value: object, kind: type[T] | Any) -> T:
    """Returns a JSON value as one of a type, such as a dataclass.

    An integer serves as any number, a text as a path; `true` is no number. A field that
    a dataclass does not have is refused, as is a value that it refuses itself.
    `Annotated[float, msgspec.Meta(gt=0)]` bounds a number.

    Raises:
        ValueError: one sentence with the place and the reason.
    """
    try:
        built = msgspec.convert(value, kind, dec_hook=_path)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ValueError):  # a dataclass refuses its values
            raise ValueError(str(error.__cause__)) from None
        reason, _, place = str(error).replace("`", "").partition(" - at ")
        place = place.replace("$.", "").removeprefix("$")
        remedy = _use_one_of(kind, place.split(".")) or "correct it"
        text = f"{place or 'it'} is wrong ({reason}): {remedy}."
        raise ValueError(printable(text)) from None
    _require_known(value, msgspec.to_builtins(built, enc_hook=str))
    return built


def _path(kind: type, value: Any) -> Any:
    if isinstance(value, str | kind):
        return kind(value)
    raise TypeError(f"Expected str, got {type(value).__name__}")


def _use_one_of(kind: Any, names: Sequence[str]) -> str:
    """Returns what a field of nested dataclasses may be, if that are a few texts."""
    for name in filter(None, names):
        hints = get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}
        kind = hints.get(name)
    literals = [x for x in (kind, *get_args(kind)) if get_origin(x) is Literal]
    values = [str(value) for x in literals for value in get_args(x)]
    return f"use one of {', '.join(values)}" if values else ""


def _require_known(value: Any, kept: Any, name: str = "") -> None:
    """Raises ValueError at the first field of an object that its type does not have."""
    if isinstance(value, dict):
        for key, item in value.items():
            place = f"{name}.{key}" if name else key
            if key not in kept:
                hint = did_you_mean(key, kept) or f" (it has {', '.join(kept)})"
                raise ValueError(
                    f"{clip(place)} is no field of this version{hint}: rename or "
                    "remove it."
                )
            _require_known(item, kept[key], place)
    elif isinstance(value, list):
        for i, pair in enumerate(zip(value, kept, strict=True)):
            _require_known(*pair, f"{name}[{i}]")


def as_dict(value: object) -> dict[str, Any]:
    """Returns a dict as it is, an empty one for any other value read from a file."""
    return value if isinstance(value, dict) else {}


def read_lines(
    path: Path,
    say: Callable[[str], None] = _log.warning,
    *,
    max_bytes: int | None = None,
    say_cut: Callable[[str], None] = _log.warning,
) -> list[dict[str, Any]]:
    """Returns the objects of a JSON-lines file without its damaged lines.

    A missing file has none. A killed run may leave its last line incomplete: that is
    left out without a word. `say` takes a sentence that counts the damaged lines,
    `say_cut` one that lines beyond `max_bytes` are left out.

    Raises:
        ValueError: if it is not a file.
        OSError: if it must not be read.
    """
    try:
        _require_file(path)
    except FileNotFoundError:
        return []
    lines, damaged = [], 0
    with open(path, "rb") as file:
        for content in _whole_lines(file):
            if max_bytes is not None and file.tell() > max_bytes:
                say_cut(printable(f"{path}: lines after {max_bytes:,} bytes left out."))
                break
            line = _line(content)
            if line is None:
                damaged += 1
            else:
                lines.append(line)
    if damaged:
        lines_are = "line is" if damaged == 1 else "lines are"
        say(printable(f"{path}: {damaged} damaged {lines_are} left out."))
    return lines


def explain_mismatch(saved: object, current: object) -> list[str]:
    """Returns a line for each field in which two configs differ, by dotted name.

    A line reads "optim.lr: saved 0.001, now 0.003"; equal configs give no line.
    """
    before, now = _flatten(jsonable(saved)), _flatten(jsonable(current))
    lines = []
    for name in sorted(before.keys() | now.keys()):
        was = f"saved {_short(before[name])}" if name in before else "not saved"
        is_now = _short(now[name]) if name in now else "absent"
        if name not in before or name not in now or before[name] != now[name]:
            lines.append(f"{name}: {was}, now {is_now}")
    return lines


def _flatten(value: object, prefix: str = "") -> dict[str, object]:
    """Returns the leaves of nested dicts by dotted name; lists are leaves."""
    if not isinstance(value, dict) or not value:
        return {prefix or "value": value}
    leaves = {}
    for key, item in value.items():
        leaves |= _flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return leaves


def _require_file(path: Path) -> None:
    """Raises ValueError for a directory or a pipe, which can block or have no end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is not a regular file: replace it.")


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yields the lines that end in a newline, and an empty one for a line too long."""
    while line := file.readline(_MAX_LINE_BYTES):
        if line.endswith(b"\n"):
            yield line
            continue
        while rest := file.readline(_MAX_LINE_BYTES):
            if rest.endswith(b"\n"):
                yield b""
                break


def _line(content: bytes) -> dict[str, Any] | None:
    """Returns the object in a line of JSON, None for anything else."""
    try:
        value = _parsed(content)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _parsed(content: bytes) -> object:
    """Returns the value of a JSON text."""
    try:
        value = json.loads(
            content.decode("utf-8-sig"),  # some editors put a byte order mark first
            object_pairs_hook=_unique,
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=_finite,
        )
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    # What the parser can nest, others that recurse cannot.
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            item
            for part in level
            if isinstance(part, dict | list)
            for item in (part.values() if isinstance(part, dict) else part)
        ]
        if not level:
            return value
    raise ValueError(_TOO_DEEP)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a name occurs twice in an object")
    return value


def _integer(text: str) -> int:
    # Longer ones are not parsed at all: that takes quadratic time.
    if len(text) <= 20 and int(text) in _INTEGERS:
        return int(text)
    raise ValueError(f"the integer {text[:20]}... does not fit into 64 bits")


def _finite(text: str) -> float:
    value = float(text)
    if math.isfinite(value):
        return value
    raise ValueError(f"{text[:20]} is not a finite number")


def sync_directory(directory: Path) -> None:
    """Makes a rename in `directory` survive a power cut, if the system allows it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems refuse it on a directory
        pass
    finally:
        os.close(descriptor)
