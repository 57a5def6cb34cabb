"""The command line of the experiments: a named configuration and typed overrides."""

import dataclasses
import difflib
import errno
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Annotated, Any

import jax
import tyro

from experiments.configs import (
    descriptions,
    find_config,
    get_config,
    has_settings_by_data,
    with_model,
)
from experiments.options import (
    asks_for_help,
    expanded,
    help_of,
    parse_options,
    take,
)
from loka_jax.commands import command, interruptible
from loka_jax.terminal import printable
from loka_jax.train.config import Config
from loka_jax.train.settings import table_config


def parse(arguments: list[str], script: str = "train.py") -> Config:
    """Returns the configuration that the command line describes.

    It is that of `--config`, or of the run in `--workdir`, with the other options over
    it.

    Args:
        arguments: the command line.
        script: name of the script in experiments/.

    Raises:
        ValueError: in one sentence, for an unknown configuration or option.
        SystemExit: with code 0 after `--help`, with code 2 for a bad value.
    """
    return parse_with(arguments, script)[0]


def parse_with(
    arguments: list[str], script: str, **options: Any
) -> tuple[Config, dict[str, Any]]:
    """Returns the configuration like `parse`, and further options by name.

    Of a table, columns and settings without an option are chosen by the data, and told.
    On a Hopper GPU `fp8_dlrm` and its baseline have a width at which FP8 pays; says so
    on the error output. A GPU takes seconds to start, so options are read first.

    Args:
        arguments: the command line.
        script: name of the script in experiments/.
        **options: the defaults of the further options: dataclasses or plain values.
    """
    default, rest = _default(arguments, script)
    config, others = _parse(default, rest, script, options)
    name, _ = take(arguments, "--config")
    if has_settings_by_data(name):
        from loka_jax.train.settings import settings_for  # after --help

        out = sys.stderr if config.run.print_config else sys.stdout
        by_data = settings_for(config, lambda line: print(line, file=out))
        config, others = _parse(by_data, rest, script, options)
        # Those that are named, and others.
        data = dataclasses.replace(config.data, transform=by_data.data.transform)
        return dataclasses.replace(config, data=data), others
    if name not in _WIDE or not _is_on_hopper():
        return config, others
    wide = get_config(_WIDE[name])
    print(
        f"On a Hopper GPU {name} is {wide.name}: a width at which FP8 is faster than "
        f"any bfloat16. --config {name}_small is the one that a CPU trains.",
        file=sys.stderr,
    )
    return _parse(wide, rest, script, options)


# What `--help` shows of a model on a table, in this order; `--help-all` shows all.
_FIRST = """
data.path data.train data.valid data.test data.label data.labels data.dense
data.categorical data.multi data.time data.weight workdir resume init-from dry-run track
seed recipe plan top-mlp dropout-rate embedding.dim embedding.crosses optim.lr
optim.rows-lr optim.plateau-patience loop.batch-size loop.epochs
""".split()
_WIDE = {"fp8_dlrm": "fp8_dlrm_wide", "bf16_dlrm": "bf16_dlrm_wide"}


def _is_on_hopper() -> bool:
    from loka_jax.ops.device import HOPPER, local_device
    from loka_jax.train.processes.group import start

    start()  # the processes of a run, before any of them asks for its devices
    try:
        return local_device().compute_capability == HOPPER.compute_capability
    except (RuntimeError, AssertionError):
        return False  # the session says why JAX cannot run


def _parse(
    default: Config, arguments: list[str], script: str, options: dict[str, Any]
) -> tuple[Config, dict[str, Any]]:
    """Returns a configuration and further options with those of a command line."""
    combined = dataclasses.make_dataclass(
        "Options",
        [
            ("run", Annotated[type(default), tyro.conf.arg(name="")]),
            *((name, _type(value)) for name, value in options.items()),
        ],
    )
    if {"-h", "--help"} & {*arguments} and default.data.kind == "table" and not options:
        print(
            help_of(
                combined(default), _FIRST, f"{command(script)} --config {default.name}"
            )
        )
        raise SystemExit(0)
    parsed = parse_options(
        combined(default, **options), arguments, script, config=default.name
    )
    return parsed.run, {name: getattr(parsed, name) for name in options}


def _type(value: Any) -> type:
    return pathlib.Path if isinstance(value, pathlib.Path) else type(value)


def _default(arguments: list[str], script: str) -> tuple[Config, list[str]]:
    """Returns the configuration before overrides, and the arguments without `--config`.

    It is the one named by `--config`, or else that of the run in `--init-from`, or in
    `--workdir`.
    """
    name, rest = take(expanded(arguments), "--config")
    if name is not None:
        model, others = take(rest, "--model")
        if model is None:
            return find_config(name), rest
        if ":" in model and name == "table":
            return table_config(model), others
        return find_config(with_model(name, model)), others
    config = _of_a_run(rest)
    if config is not None:
        return config, rest
    print(f"usage: {command(script)} --config NAME [--option value ...]\n")
    for name, text in descriptions().items():
        print(f"  {name:20} {text}")
    print("\n  table --model NAME is table_NAME, for a table of your own.")
    print("  bf16_NAME is fp8_NAME in bfloat16, its baseline.")
    print("\nWith --config NAME, --help-all lists all options and defaults.")
    if asks_for_help(rest):
        raise SystemExit(0)
    print()
    near = difflib.get_close_matches("--config", rest, n=1, cutoff=0.7)
    hint = f" (did you mean --config by {near[0]}?)" if near else ""
    raise ValueError(
        f"--config NAME is missing{hint}: use one of the above; or resume a run with "
        "--resume --workdir FOLDER."
    )


def _of_a_run(arguments: list[str]) -> Config | None:
    """Returns the configuration of the run in `--init-from` or `--workdir`, or None."""
    from loka_jax.train.folder.record import CONFIG
    from loka_jax.train.folder.source_run import read_config_of
    from loka_jax.train.next_day import default_config

    source, _ = take(arguments, "--init-from")
    if source is not None:
        return default_config(pathlib.Path(source))
    workdir, _ = take(arguments, "--workdir")
    if workdir is None:
        return None
    if (pathlib.Path(workdir) / CONFIG).exists():
        return read_config_of(pathlib.Path(workdir))
    if "--resume" in arguments:
        raise ValueError(
            f"{workdir} holds no run to resume ({CONFIG} is missing): name the folder "
            "of a run, or begin one with --config NAME."
        )
    return None


def run_cli(command: Callable[[], int]) -> int:
    """Runs a command and returns the exit code; a failure becomes one sentence.

    An error that another command line or file mends is a ValueError and gives 2; a
    failed save, a lost file, a full device or a failed training gives 1; Ctrl-C gives
    130.

    Takes a GPU's memory as it is needed, unless the environment says otherwise: what
    checks kernels is a process of its own, for which three quarters taken at the start
    left too little.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    interruptible()
    try:
        return command()
    except ValueError as error:
        return _fail(str(error), 2)
    except OSError as error:
        return _fail(_reason(error), 1)
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
    except Exception as error:  # its own kind is imported only where one was raised
        from loka_jax.train.watch.guard import TrainingFailed  # a second of imports

        if not isinstance(error, TrainingFailed):
            raise
        return _fail(str(error), 1)


def _reason(error: OSError) -> str:
    """Returns what failed, with the remedy where there is no room."""
    name = f"{error.filename}: " if error.filename else ""
    reason = f"{name}{error.strerror or error}"
    if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        return reason
    return f"{reason}: make room and run it again, a training run with --resume."


def _fail(sentence: str, code: int) -> int:
    print(f"error: {printable(sentence)}", file=sys.stderr)
    return code
