"""What `--config` names: a registered configuration, a JSON file, or a user's function.

--config fp8_dlrm
--config bf16_dlrm               its baseline: the same in bfloat16
--config config.json             what --print-config printed, or a run's config.json
--config my_configs.py:my_dlrm   a function without arguments that returns a Config
"""

import dataclasses
import importlib.util
import pathlib
import sys
import traceback
from collections.abc import Callable
from types import ModuleType

from loka_jax.commands import command
from loka_jax.options import did_you_mean
from loka_jax.terminal import one_line
from loka_jax.train.config import Config
from loka_jax.train.folder.config_file import read_config

_CONFIGS: dict[str, Callable[[], Config]] = {}
# On a Hopper GPU the command line takes a wide one for the name without "_small".
_OTHER_NAMES = {"fp8_dlrm_small": "fp8_dlrm", "table": "table_dlrm"}
_OF_TABLES = "table_"  # what begins the names of those with settings by the data


def register[C: Config](make: Callable[[], C]) -> Callable[[], C]:
    """Registers a configuration under its function's name."""
    assert make.__name__ not in _CONFIGS, f"two are called {make.__name__}"
    _CONFIGS[make.__name__] = make
    return make


def names() -> list[str]:
    """Returns one name of each configuration, without the baselines."""
    return sorted(_CONFIGS)


def all_names() -> list[str]:
    """Returns all names that a configuration can be had by."""
    own = (*_CONFIGS, *_OTHER_NAMES)
    twins = (name.replace("fp8", "bf16") for name in own if name.startswith("fp8_"))
    return sorted((*own, *twins))


def has_settings_by_data(name: str | None) -> bool:
    """Returns whether the value of `--config` leaves columns and settings to the data.

    A file does not, such as the `config.json` of a run that was begun so.
    """
    own = _OTHER_NAMES.get(name or "", name or "")
    return own.startswith(_OF_TABLES) and own in _CONFIGS


def with_model(name: str, model: str) -> str:
    """Returns the name of the configuration of tables with a model.

    Raises:
        ValueError: if there is none.
    """
    models = [n.removeprefix(_OF_TABLES) for n in names() if n.startswith(_OF_TABLES)]
    if name != "table" or model not in models:
        raise ValueError(
            f"--model {model} must be one of {', '.join(models)}, with --config table; "
            "other configurations have their model in their name."
        )
    return f"{_OF_TABLES}{model}"


def descriptions() -> dict[str, str]:
    """Returns the first line that describes each configuration, by name."""
    return {k: (_CONFIGS[k].__doc__ or "").partition("\n")[0] for k in names()}


def get_config(name: str) -> Config:
    """Returns the configuration of that name; `bf16_NAME` is `fp8_NAME` in bfloat16.

    Raises:
        ValueError: if there is none; the message suggests the nearest name.
    """
    if name.startswith("bf16_") and name in all_names():
        config = get_config(name.replace("bf16", "fp8"))
        model = config.model.clone(recipe="bf16")
        own = config.name.replace("fp8", "bf16")
        return dataclasses.replace(config, name=own, model=model)
    make = _CONFIGS.get(_OTHER_NAMES.get(name, name))
    if make is None:
        hint = did_you_mean(name, all_names(), cutoff=0.4)
        raise ValueError(
            f"unknown configuration {name!r}{hint}: use one that "
            f"{command('train.py')} --help lists, a file that --print-config printed "
            "(FILE.json), or a function of your own (FILE.py:FUNCTION)."
        )
    return make()


def find_config(name: str) -> Config:
    """Returns the configuration that the value of `--config` names.

    Raises:
        ValueError: one sentence with the name, file or field, and the remedy.
    """
    path, _, function = name.rpartition(":")
    if name.endswith(".py"):
        return _from_python(pathlib.Path(name), "")
    if path.endswith(".py"):
        return _from_python(pathlib.Path(path), function)
    if name.endswith(".json"):
        return read_config(pathlib.Path(name).expanduser())
    return get_config(name)


def _from_python(path: pathlib.Path, function: str) -> Config:
    """Returns what a function in a user's file returns."""
    path = path.expanduser()
    if not path.is_file():
        raise ValueError(f"--config {path}: this file does not exist.")
    path = path.resolve()  # as tracebacks name it
    try:
        module = _imported(path)
        make = vars(module).get(function)
        if not callable(make):
            own = [k for k, v in vars(module).items() if _is_own_function(v, module)]
            hint = did_you_mean(function, own, cutoff=0.4)
            there = f"there are {', '.join(own)}" if own else "define one"
            raise ValueError(
                f"--config {path}:{function or 'FUNCTION'} must name a function of the "
                f"file that returns a configuration{hint}: {there}."
            )
        config = make()
    except Exception as error:  # a user's file may raise any kind
        line = _line_in(path, error)
        if line is None:
            raise
        reason = str(error) if isinstance(error, ValueError) else one_line(error)
        raise ValueError(f"{path}, line {line}: {reason.rstrip('.')}.") from None
    if not isinstance(config, Config):
        raise ValueError(
            f"--config {path}:{function} returned a {type(config).__name__}, and must "
            "return a configuration, such as DlrmConfig of loka_jax.train.config."
        )
    return config


def _imported(path: pathlib.Path) -> ModuleType:
    """Returns the module in a file, which may import others of its folder."""
    name = f"config_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # type hints of its classes are looked up there
    sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop()
    return module


def _is_own_function(value: object, module: ModuleType) -> bool:
    is_here = getattr(value, "__module__", None) == module.__name__
    return callable(value) and is_here and not isinstance(value, type)


def _line_in(path: pathlib.Path, error: Exception) -> int | None:
    """Returns the line of a file where an error arose, or None if not there."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return lines[-1] if lines else None
