"""The command line of the experiments: a named configuration and typed overrides."""

import sys
from collections.abc import Callable

import tyro

from experiments.configs import get_config, names
from loka_jax.train.config import Config

_USAGE = "usage: python experiments/train.py --config NAME [--option value ...]"


def parse(arguments: list[str]) -> Config:
    """Returns the configuration that `--config NAME` and the overrides describe.

    Raises:
        ValueError: if the name is missing or unknown.
        SystemExit: with code 2 for an unknown option or a bad value (tyro's message),
            with 0 after `--help`.
    """
    name, rest = _take_config_name(arguments)
    if name is None:
        if "--help" in rest or "-h" in rest:
            print(f"{_USAGE}\nconfigurations: {', '.join(names())}")
            raise SystemExit(0)
        raise ValueError(f"--config NAME is missing: use one of {', '.join(names())}.")
    default = get_config(name)
    return tyro.cli(type(default), default=default, args=rest, prog="train.py")


def run_cli(command: Callable[[], int]) -> int:
    """Runs a command; what a user can mend becomes one sentence and exit code 2."""
    try:
        return command()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _take_config_name(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Returns the value of `--config`, and the other arguments."""
    for i, argument in enumerate(arguments):
        if argument.startswith("--config="):
            return argument.partition("=")[2], arguments[:i] + arguments[i + 1 :]
        if argument == "--config":
            value = arguments[i + 1] if i + 1 < len(arguments) else None
            return value, arguments[:i] + arguments[i + 2 :]
    return None, arguments
