"""The registry of configurations."""

from collections.abc import Callable

from loka_jax.options import did_you_mean
from loka_jax.train.config import Config

_CONFIGS: dict[str, Callable[[], Config]] = {}


def register[C: Config](make: Callable[[], C]) -> Callable[[], C]:
    """Registers a configuration under its function's name."""
    name = make.__name__
    assert name not in _CONFIGS, f"two configurations are called {name}"
    _CONFIGS[name] = make
    return make


def names() -> list[str]:
    """Returns the names of all configurations."""
    return sorted(_CONFIGS)


def get_config(name: str) -> Config:
    """Returns the configuration of that name.

    Raises:
        ValueError: if there is none; the message suggests the nearest name.
    """
    if name not in _CONFIGS:
        hint = did_you_mean(name, _CONFIGS, cutoff=0.4)
        raise ValueError(
            f"unknown configuration {name!r}: {hint}Use one of {', '.join(names())}, "
            "a file that --print-config printed (FILE.json), or a function of your own "
            "(FILE.py:FUNCTION)."
        )
    return _CONFIGS[name]()
