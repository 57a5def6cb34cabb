"""What a user's file defines, by the name that a run keeps: "module:Name".

The module is looked for in the current folder, too.
"""

import importlib
import os
import sys
from collections.abc import Callable
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
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's file may raise any kind
        raise ValueError(
            f"{what} {name!r} cannot be imported ({one_line(error)}): name it as "
            "module:Name, with the module's folder in PYTHONPATH or as the current one."
        ) from None
    ones = {k: v for k, v in vars(module).items() if is_one(v)}
    if last not in ones:
        raise ValueError(
            f"{what} {name!r} is no {kind}{did_you_mean(last, ones, cutoff=0.4)}: "
            f"{module_name} has {', '.join(ones) or 'none'}."
        )
    return ones[last]


def name_of(what: str, value: Any) -> str:
    """Returns the name of a class or function, by which it is found again.

    Raises:
        ValueError: one sentence, if it is not.
    """
    module, last = (getattr(value, x, "") for x in ("__module__", "__qualname__"))
    if module == "__main__" or vars(sys.modules.get(module, sys)).get(last) != value:
        raise ValueError(
            f"{what} could not be read again from the run's folder, as it has no name "
            "in a module that can be imported: define it in a file, by `class` or "
            "`def` outside of functions."
        )
    return f"{module}:{last}"
