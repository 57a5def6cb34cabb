"""Reads, writes and compares the JSON files of a run.

They are written in one step, and in strict JSON: NaN and infinity become null.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np


def jsonable(value: object, *, nan_as_null: bool = True) -> object:
    """Returns `value` in JSON's types: tuples as lists, NumPy scalars as numbers.

    Args:
        value: numbers, text, paths, scalar arrays, and dicts and lists of these.
        nan_as_null: whether NaN and infinity become None; otherwise they are refused.

    Raises:
        ValueError: if JSON cannot represent the value.
    """
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = np.asarray(value).item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        if nan_as_null:
            return None
        raise ValueError(f"{value} has no form in JSON: use a finite number or None.")
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {
            str(key): jsonable(item, nan_as_null=nan_as_null)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [jsonable(item, nan_as_null=nan_as_null) for item in value]
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
    """Writes `text` to `path` in one step: temporary file, fsync, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_directory(path.parent)


def read(path: Path) -> object:
    """Returns the value in the JSON file `path`.

    Raises:
        ValueError: if the file is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not JSON ({error}): restore or delete it."
        ) from None


def as_dict(value: object) -> dict[str, Any]:
    """Returns a dict as it is, an empty one for any other value read from a file."""
    return value if isinstance(value, dict) else {}


def read_lines(path: Path) -> list[dict]:
    """Returns the objects of a JSON-lines file, up to the first broken line.

    A killed run may leave its last line incomplete.
    """
    if not path.is_file():
        return []
    lines = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except (json.JSONDecodeError, RecursionError):
                break
            if not isinstance(line, dict) or not text.endswith("\n"):
                break
            lines.append(line)
    return lines


def explain_mismatch(saved: object, current: object) -> list[str]:
    """Returns a line for each field in which two configs differ, by dotted name.

    A line reads "optim.lr: saved 0.001, now 0.003"; equal configs give no line.
    """
    before, now = _flatten(jsonable(saved)), _flatten(jsonable(current))
    lines = []
    for name in sorted(before.keys() | now.keys()):
        if name not in now:
            lines.append(f"{name}: saved {before[name]!r}, now absent")
        elif name not in before:
            lines.append(f"{name}: not saved, now {now[name]!r}")
        elif before[name] != now[name]:
            lines.append(f"{name}: saved {before[name]!r}, now {now[name]!r}")
    return lines


def _flatten(value: object, prefix: str = "") -> dict[str, object]:
    """Returns the leaves of nested dicts by dotted name; lists are leaves."""
    if not isinstance(value, dict) or not value:
        return {prefix or "value": value}
    leaves = {}
    for key, item in value.items():
        leaves |= _flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return leaves


def _sync_directory(directory: Path) -> None:
    """Makes a rename in `directory` survive a power cut, if the system allows it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems refuse it on a directory
        pass
    finally:
        os.close(descriptor)
