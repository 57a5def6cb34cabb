"""Options in messages: their names, checks of their values, and names near a wrong one.

A field `loop.batch_size` of a configuration is the option `--loop.batch-size`.
"""

import argparse
import difflib
import pathlib
from collections.abc import Iterable
from typing import NoReturn


def require(holds: bool, option: str, value, requirement: str):
    """Raises ValueError "option value must be requirement." unless `holds`."""
    if not holds:
        raise ValueError(f"{option} {value} must be {requirement}.")


class Parser(argparse.ArgumentParser):
    """A parser for a command; what is wrong is a ValueError of one sentence."""

    def error(self, message: str) -> NoReturn:
        """Raises the ValueError."""
        raise ValueError(f"{message}; see {self.prog} --help.")


def require_folder(option: str, path: pathlib.Path | None) -> None:
    """Raises ValueError if there is no folder for a file to write; None is no file."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}: create it for {option}.")


def option_of(field: str) -> str:
    """Returns the option that sets a field, given by dotted name.

    The fields of the model, and those of this execution only, have no prefix.
    """
    if field in ("name", "model.kind"):
        return "--config"
    name = field.removeprefix("model.").removeprefix("run.")
    return f"--{name.replace('_', '-')}"


def did_you_mean(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns " (did you mean 'X'?)" with the name that is nearest, or nothing.

    Args:
        cutoff: the least similarity, from 0 to 1.
    """
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f" (did you mean {near[0]!r}?)" if near else ""


def pairs(option: str, values: tuple[str, ...], names: tuple[str, ...]) -> dict:
    """Returns what an option of entries NAME=VALUE says, by name.

    Raises:
        ValueError: for an entry of another form, a name that is not among `names`, or
            one that is named twice.
    """
    pairs: dict[str, str] = {}
    for entry in values:
        # A name may hold "=", too.
        known = [name for name in names if entry.startswith(f"{name}=")]
        name = max(known, key=len, default="")
        if not known or not entry.removeprefix(f"{name}="):
            choice = ", ".join(names) or "none"
            raise ValueError(
                f"{option} {entry!r} must be COLUMN=VALUE; the columns are {choice}."
            )
        if name in pairs:
            raise ValueError(f"{option} names {name!r} twice: leave one of them out.")
        pairs[name] = entry.removeprefix(f"{name}=")
    return pairs
