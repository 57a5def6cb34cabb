"""Options of a command line as a dataclass, with near names for wrong ones."""

import contextlib
import difflib
import io
import re
import sys
from collections.abc import Callable
from typing import Any

import tyro

from experiments.arguments import asks_for_help, expanded
from experiments.bad_values import one_sentence
from experiments.first_help import keep_help
from loka_jax.commands import called, spoken


def parse_options[T](
    default: T, arguments: list[str], script: str, *, config: str = ""
) -> T:
    """Returns a dataclass with the options of a command line.

    Args:
        default: the dataclass without them.
        arguments: the options.
        script: name of the script in experiments/.
        config: name of the configuration, if there is one; only the help of a
            registered one is kept.

    Raises:
        ValueError: for a bad value, or for an unknown option, with the nearest ones.
        SystemExit: with code 0 after `--help`.
    """
    prog = called(script) + (f" --config {config}" if config else "")

    def read(args: list[str]) -> Any:
        return tyro.cli(
            type(default),
            default=default,
            args=args,
            prog=prog,
            return_unknown_args=True,
        )

    if asks_for_help(arguments):
        text = _help_of(read)
        keep_help(script, config, text)
        print(text)
        raise SystemExit(0)
    with one_sentence(prog):
        parsed, unknown = read(expanded(arguments))
    if unknown:
        raise ValueError(_unknown(unknown[0], _help_of(read), prog))
    return parsed


def parse_alone[T](
    kind: type[T], arguments: list[str] | None, script: str, text: str | None
) -> T:
    """Returns a dataclass with the options of a command that has no configuration.

    Args:
        kind: the dataclass.
        arguments: the command line; that of this process if None.
        script: name of the script in experiments/.
        text: what the script does, for `--help`.

    Raises:
        ValueError: for a bad value, or for an unknown option.
        SystemExit: with code 0 after `--help`.
    """
    args = expanded(sys.argv[1:] if arguments is None else arguments)
    with one_sentence(prog := called(script)):
        return tyro.cli(kind, args=args, prog=prog, description=spoken(text or ""))


def _help_of(read: Callable[[list[str]], Any]) -> str:
    """Returns the help on all options."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        read(["--help"])
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _unknown(argument: str, text: str, prog: str) -> str:
    """Returns a sentence on an argument that is no option.

    Args:
        argument: the argument.
        text: the help on all options.
        prog: the command that has them.
    """
    if not argument.startswith("-"):
        return f"{argument!r} belongs to no option: quote values that have spaces."
    wrong = argument.partition("=")[0].replace("_", "-")
    options = sorted(set(re.findall(r"--[a-z][a-z0-9.-]*[a-z0-9]", text)))
    near = " or ".join(near_options(wrong, options))
    group = wrong.partition(".")[0]
    peers = [name for name in options if name.startswith(f"{group}.")]
    hint = f"there are {', '.join(peers)}; " if peers else ""
    if near:
        hint = f"did you mean {near}? "
    return f"there is no option {wrong}: {hint}{prog} --help lists all."


def near_options(wrong: str, options: list[str]) -> list[str]:
    """Returns at most three options that an unknown one may stand for, nearest first.

    They end in the same word, whatever their group, or are spelled alike. Of an option
    in an existing group only the rest is compared.
    """
    group, _, word = wrong.lstrip("-").rpartition(".")
    words = {name: name.lstrip("-").rpartition(".")[2] for name in options}
    same = [name for name in options if words[name] == word]
    peers = {words[o]: o for o in options if group and o.startswith(f"--{group}.")}
    if peers:
        alike = [peers[w] for w in difflib.get_close_matches(word, peers)]
    else:
        alike = difflib.get_close_matches(wrong, options, cutoff=0.7)
    return list(dict.fromkeys([*same, *alike]))[:3]
