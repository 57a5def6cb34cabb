"""Options of a command line as a dataclass, by tyro; near names for wrong ones.

What is wrong with one is a ValueError of one sentence. Needs no JAX.
"""

import contextlib
import dataclasses
import difflib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tyro

from loka_jax.commands import as_commands, command, unwind_on_sigterm
from loka_jax.options import option_of
from loka_jax.terminal import printable

_OF_FLAX = {"name", "parent"}  # fields of its modules


def parse_options[T](
    default: T, arguments: list[str], script: str, *, config: str = ""
) -> T:
    """Returns a dataclass with the options of a command line.

    Args:
        default: the dataclass without them.
        arguments: the options.
        script: name of the script in experiments/.
        config: name of the configuration, if there is one.

    Raises:
        ValueError: for an unknown option, with the nearest ones, or a bad value.
        SystemExit: with code 0 after `--help`.
    """
    prog = command(script) + (f" --config {config}" if config else "")
    line = _line(arguments)
    with _one_sentence(line, prog, names := option_names(default)):
        parsed, unknown = tyro.cli(
            type(default),
            default=default,
            args=line,
            prog=prog,
            return_unknown_args=True,
        )
    if unknown:
        raise ValueError(_unknown(unknown[0], names, prog))
    return parsed


def parse_alone[T](
    kind: type[T], arguments: list[str], script: str, text: str | None
) -> T:
    """Returns a dataclass with the options of a command that has no configuration.

    Args:
        kind: the dataclass.
        arguments: the command line.
        script: name of the script in experiments/.
        text: what the script does, for `--help`.

    Raises:
        ValueError: for what is wrong.
        SystemExit: with code 0 after `--help`.
    """
    line, prog = _line(arguments), command(script)
    with _one_sentence(line, prog, option_names(kind)):
        return tyro.cli(kind, args=line, prog=prog, description=as_commands(text or ""))


def _line(arguments: list[str]) -> list[str]:
    return ["--help" if x == "--help-all" else x for x in expanded(arguments)]


@contextlib.contextmanager
def _one_sentence(line: list[str], prog: str, names: list[str]) -> Iterator[None]:
    """Makes the box in which tyro says what is wrong a ValueError of one sentence."""
    if asks_for_help(line):
        yield
        return
    width, said = os.environ.get("COLUMNS"), io.StringIO()
    os.environ["COLUMNS"] = "10000"  # so that tyro breaks no line
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit:
        raise ValueError(_sentence(said.getvalue(), names, prog)) from None
    finally:
        if width is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = width


def _sentence(box: str, names: list[str], prog: str) -> str:
    """Returns what a box of tyro says as one sentence.

    Args:
        box: lines in a frame, with what is wrong first, then help.
        names: of all options.
        prog: what `--help` is an option of.
    """
    frame = r"^[│|╭╰+]|[─-]{5,}|[│|╮╯+]$"  # in ASCII, too; a rule becomes empty
    lines = [re.sub(frame, "", line.strip()).strip() for line in box.splitlines()[1:]]
    said, _, more = "\n".join(lines).strip().partition("\n\n")
    _, is_unknown, unknown = f"{said}\n{more}".partition("Unrecognized options:")
    if is_unknown:
        return _unknown(re.split(r",\s|\s", unknown.strip())[0], names, prog)
    if said.startswith("Missing from"):
        missing = " and ".join(re.findall(r"^--[\w.-]+", said, re.MULTILINE))
        return f"{missing} must be given: see {prog} --help."
    taken = re.search(r"^Argument helptext:\n(--.*)", more, re.MULTILINE)
    said = said.replace(". Expected", ": expected").removesuffix(".")
    if said.startswith("Error parsing"):
        said = said.partition(": ")[2]
        if taken is None:
            return f"{said}."  # of a dataclass itself, which names its options
        option, _, kind = taken[1].partition(" ")
        found = re.search(r": ('.*'|\[.*\])$", said)
        why = f"not {found[1]}" if found else f"{said[:1].lower()}{said[1:]}"
        return f"{option} takes {kind}, {why}; see {prog} --help."
    return f"{said[:1].lower()}{said[1:]}; see {prog} --help."


def run_alone[T](
    kind: type[T],
    arguments: list[str],
    script: str,
    text: str | None,
    run: Callable[[T], int],
) -> int:
    """Runs a command on the run in `workdir`; returns the exit code.

    Arguments but `run` are those of `parse_alone`. JAX is imported when they are right.
    """
    try:
        options: Any = parse_alone(kind, arguments, script, text)
    except ValueError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2
    print(f"Reading {options.workdir} ...", flush=True)
    from experiments.cli import run_cli  # imports JAX: not before --help

    unwind_on_sigterm()
    return run_cli(lambda: run(options))


def asks_for_help(arguments: list[str]) -> bool:
    """Returns whether a command line asks for help."""
    return bool({"-h", "--help", "--help-all"} & {*arguments})


def help_of(default: Any, first: Sequence[str], prog: str) -> str:
    """Returns the help of some options of a dataclass, in their order."""
    os.environ["COLUMNS"] = "80"  # in which tyro lists options one after another
    with contextlib.redirect_stdout(shown := io.StringIO()):
        with contextlib.suppress(SystemExit):
            tyro.cli(type(default), default=default, args=["--help"], prog=prog)
    listed = r"^  (--([\w.-]+).*(?:\n   .*)*)"
    found = re.findall(listed, shown.getvalue(), re.MULTILINE)
    entries = {name: re.sub(r" *\n  ", "\n", entry).rstrip() for entry, name in found}
    parts = [f"usage: {prog} [OPTIONS]\n", *(entries.get(x, "") for x in first)]
    parts.append(f"\n--help-all shows all {len(option_names(default))} options.")
    return "\n".join(filter(None, parts))


def expanded(arguments: list[str]) -> list[str]:
    """Returns a command line with the home folder for `~/` at the start of a value.

    A shell leaves that of `--workdir=~/run` as it is.
    """
    return [_expanded(argument) for argument in arguments]


def _expanded(argument: str) -> str:
    option, equals, value = argument.partition("=")
    if option.startswith("--") and value.startswith("~/"):
        return f"{option}{equals}{os.path.expanduser(value)}"
    return os.path.expanduser(argument) if argument.startswith("~/") else argument


def take(arguments: list[str], option: str) -> tuple[str | None, list[str]]:
    """Returns the value of an option, or None, and the other arguments."""
    for i, argument in enumerate(arguments):
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2], arguments[:i] + arguments[i + 1 :]
        if argument == option:
            values = arguments[i + 1 : i + 2]
            if not values or values[0].startswith("-"):
                return None, arguments[:i] + arguments[i + 1 :]
            return values[0], arguments[:i] + arguments[i + 2 :]
    return None, arguments


def option_names(default: Any, prefix: str = "") -> list[str]:
    """Returns the options of a dataclass, those of its dataclasses included.

    Args:
        default: the dataclass, or its class.
        prefix: of the names.
    """
    names = []
    for field in dataclasses.fields(default):
        value = getattr(default, field.name, field.type)
        marks = getattr(field.type, "__metadata__", ())
        if tyro.conf.Suppress in marks or field.name in _OF_FLAX:
            continue
        if not dataclasses.is_dataclass(value):
            names.append(option_of(f"{prefix}{field.name}"))
        elif any(getattr(mark, "name", None) == "" for mark in marks):
            names += option_names(value, prefix)
        else:
            names += option_names(value, f"{prefix}{field.name}.")
    return names


def _unknown(argument: str, options: list[str], prog: str) -> str:
    """Returns a sentence on an argument that is no option."""
    if not argument.startswith("-"):
        return f"{argument!r} belongs to no option: quote values that have spaces."
    wrong = argument.partition("=")[0].replace("_", "-")
    if near := " or ".join(near_options(wrong, options)):
        return (
            f"there is no option {wrong} (did you mean {near}?): {prog} --help-all "
            "lists all."
        )
    return f"there is no option {wrong}: {prog} --help-all lists all."


def near_options(wrong: str, options: list[str]) -> list[str]:
    """Returns at most three options that an unknown one may stand for, nearest first.

    They end in the same word, whatever their group, or are spelled alike.
    """
    word = wrong.lstrip("-").rpartition(".")[2]
    same = [name for name in options if name.lstrip("-").rpartition(".")[2] == word]
    alike = difflib.get_close_matches(wrong, options, cutoff=0.7)
    return list(dict.fromkeys([*same, *alike]))[:3]
