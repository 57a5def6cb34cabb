"""The command line of the experiments: a named configuration and typed overrides."""

import dataclasses
import pathlib
import sys
from collections.abc import Callable
from typing import Annotated, Any

import jax
import tyro

from experiments.configs import find_config, names
from loka_jax.terminal import printable
from loka_jax.train.config import Config
from loka_jax.train.config_file import read_config
from loka_jax.train.guard import TrainingFailed
from loka_jax.train.next_day import default_config
from loka_jax.train.record import CONFIG

_USAGE = "usage: python experiments/{script} --config NAME [--option value ...]"


def parse(arguments: list[str]) -> Config:
    """Returns the configuration that `--config NAME` and the overrides describe.

    Raises:
        ValueError: if the name is missing or unknown.
        SystemExit: with code 2 for an unknown option or a bad value (tyro's message),
            with 0 after `--help`.
    """
    default, rest = _default(arguments, "train.py")
    prog = f"train.py --config {default.name}"
    return tyro.cli(type(default), default=default, args=rest, prog=prog)


def parse_with(
    arguments: list[str], script: str, **options: Any
) -> tuple[Config, dict[str, Any]]:
    """Returns the configuration like `parse`, and further options by name.

    Args:
        arguments: the command line.
        script: name of the script in experiments/.
        **options: the defaults of the further options: dataclasses or plain values.
    """
    default, rest = _default(arguments, script)
    combined = dataclasses.make_dataclass(
        "Options",
        [
            ("run", Annotated[type(default), tyro.conf.arg(name="")]),
            *((name, _type(value)) for name, value in options.items()),
        ],
    )
    parsed = tyro.cli(
        combined,
        default=combined(default, **options),
        args=rest,
        prog=f"{script} --config {default.name}",
    )
    return parsed.run, {name: getattr(parsed, name) for name in options}


def _type(value: Any) -> type:
    return pathlib.Path if isinstance(value, pathlib.Path) else type(value)


def _default(arguments: list[str], script: str) -> tuple[Config, list[str]]:
    """Returns the configuration before overrides, and the arguments without `--config`.

    It is the one named by `--config`, or else that of the run in `--init-from`, or in
    `--workdir`.
    """
    name, rest = _take(arguments, "--config")
    if name is not None:
        return find_config(name), rest
    source, _ = _take(rest, "--init-from")
    if source is not None:
        return default_config(pathlib.Path(source)), rest
    workdir, _ = _take(rest, "--workdir")
    if workdir is not None:
        saved = pathlib.Path(workdir) / CONFIG
        if saved.exists():
            return read_config(saved), rest
        if "--resume" in rest:
            raise ValueError(
                f"{workdir} holds no run to resume ({CONFIG} is missing): name the "
                "folder of a run, or begin one with --config NAME."
            )
    if "--help" in rest or "-h" in rest:
        print(_USAGE.format(script=script))
        print(f"configurations: {', '.join(names())}")
        raise SystemExit(0)
    raise ValueError(
        f"--config NAME is missing: use one of {', '.join(names())}; or resume a run "
        "with --resume --workdir FOLDER."
    )


def run_cli(command: Callable[[], int]) -> int:
    """Runs a command and returns the exit code; a failure becomes one sentence.

    An error that another command line or file mends is a ValueError and gives 2; a
    failed save, a lost file, a full device or a failed training gives 1; Ctrl-C gives
    130.
    """
    try:
        return command()
    except ValueError as error:
        return _fail(str(error), 2)
    except TrainingFailed as error:
        return _fail(str(error), 1)
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        return _fail(f"{name}{error.strerror or error}", 1)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _fail(
            "the device is out of memory: lower --loop.batch-size or --embedding.dim, "
            "or raise --loop.microbatches.",
            1,
        )
    except KeyboardInterrupt:
        return 130


def _fail(sentence: str, code: int) -> int:
    print(f"error: {printable(sentence)}", file=sys.stderr)
    return code


def _take(arguments: list[str], option: str) -> tuple[str | None, list[str]]:
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
