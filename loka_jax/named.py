"""What a user's file defines, by the name that a run keeps: "module:Name".

The module is looked for in the current folder, too.
"""

import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from loka_jax.options import did_you_mean
from loka_jax.terminal import one_line


def found(what: str, name: str, is_one: Callable[[Any], bool], kind: str) -> Any:
    """Returns what "module:Name" names.

    Args:
        what: what it is to the user, such as "the model".
        is_one: whether a value is of the kind that is asked for.

    Raises:
        ValueError: one sentence if there is none.
    """
    module_name, _, last = name.partition(":")
    value, names = _attribute(_module(what, name, module_name), last, is_one)
    if value is None:
        hint = did_you_mean(last, names, cutoff=0.4)
        raise ValueError(
            f"{what} {name!r} is no {kind}: {hint}{module_name} has "
            f"{', '.join(names) or 'none'}."
        )
    return value


def name_of(value: Any) -> str:
    """Returns the name of a class or function, by which it is found again.

    Raises:
        ValueError: without the remedy, if it is not.
    """
    module, last = (getattr(value, x, "") for x in ("__module__", "__qualname__"))
    if module == "__main__" or vars(sys.modules.get(module, sys)).get(last) != value:
        raise ValueError("it is not in a module that can be imported")
    return f"{module}:{last}"


def _module(what: str, name: str, module_name: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # a user's file may raise any kind
        raise ValueError(
            f"{what} {name!r} cannot be imported ({one_line(error)}): name it as "
            "module:Name, with the module's folder in PYTHONPATH or as the current one."
        ) from None


def _attribute(
    module: ModuleType, name: str, is_one: Callable[[Any], bool]
) -> tuple[Any, list[str]]:
    """Returns an attribute of a module if it is one, and the names of those."""
    ones = {k: v for k, v in vars(module).items() if is_one(v)}
    return ones.get(name), list(ones)
