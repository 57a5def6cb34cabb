"""The registry of configurations."""

from collections.abc import Callable

from loka_jax.options import did_you_mean
from loka_jax.train.config import Config

_CONFIGS: dict[str, Callable[[], Config]] = {}
_OTHER_NAMES: dict[str, str] = {}


def register[C: Config](make: Callable[[], C]) -> Callable[[], C]:
    """Registers a configuration under its function's name."""
    name = make.__name__
    assert name not in _CONFIGS, f"two configurations are called {name}"
    _CONFIGS[name] = make
    return make


def also_called(other: str, name: str):
    """Gives a registered configuration another name."""
    assert name in _CONFIGS and other not in _CONFIGS
    _OTHER_NAMES[other] = name


def names() -> list[str]:
    """Returns one name of each configuration."""
    return sorted(_CONFIGS)


def all_names() -> list[str]:
    """Returns all names that a configuration can be had by."""
    return sorted((*_CONFIGS, *_OTHER_NAMES))


def get_config(name: str) -> Config:
    """Returns the configuration of that name.

    Raises:
        ValueError: if there is none; the message suggests the nearest name.
    """
    make = _CONFIGS.get(_OTHER_NAMES.get(name, name))
    if make is None:
        hint = did_you_mean(name, all_names(), cutoff=0.4)
        raise ValueError(
            f"unknown configuration {name!r}: {hint}Use one of "
            f"{', '.join(all_names())}, "
            "a file that --print-config printed (FILE.json), or a function of your own "
            "(FILE.py:FUNCTION)."
        )
    return make()
