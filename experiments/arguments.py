"""Single arguments of a command line, read before anything heavy is imported."""

import os


def asks_for_help(arguments: list[str]) -> bool:
    """Returns whether a command line asks for help."""
    return "--help" in arguments or "-h" in arguments


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
