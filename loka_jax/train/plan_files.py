"""Plans that `--plan` or a checkpoint gives, read and found to run here."""

import pathlib
from collections.abc import Sequence
from typing import Any

from loka_jax import jsonfile
from loka_jax.commands import command
from loka_jax.dispatch import plan as plans
from loka_jax.dispatch.candidates import why_not_runnable
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.nn import Site
from loka_jax.train.config import Config

AUTO, TUNE, OFF = "auto", "tune", "off"


def saved_plan(value: Any, sites: Sequence[Site]) -> DispatchPlan:
    """Returns the plan of a checkpoint from its JSON values.

    Raises:
        ValueError: if it cannot run here.
    """
    source = "the checkpoint's plan"
    return runnable(plans.from_json(value, sites, source), source, sites)


def named_file(config: Config) -> pathlib.Path | None:
    """Returns the file that `--plan` names, if it names one.

    Raises:
        ValueError: if there is no such file.
    """
    if config.plan in (AUTO, TUNE, OFF):
        return None
    path = pathlib.Path(config.plan)
    if not path.is_file():
        raise ValueError(
            f"--plan {path} is not a file: give a table of {command('tune.py')!r}, a "
            f"plan, or one of {AUTO!r}, {TUNE!r} and {OFF!r}."
        )
    return path


def require_readable(config: Config) -> None:
    """Raises ValueError if `--plan` names a file that holds no JSON."""
    if (path := named_file(config)) is not None:
        is_plan(path)


def is_plan(path: pathlib.Path) -> bool:
    """Returns whether a file is a plan rather than a table."""
    try:
        value = jsonfile.read(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
    return not (isinstance(value, dict) and "schema" in value)


def runnable(plan: DispatchPlan, source: str, sites: Sequence[Site]) -> DispatchPlan:
    """Returns a plan; raises ValueError, which names its source, if it cannot run."""
    if reason := why_not_runnable(dict(plan.choices), sites):
        raise ValueError(f"{source}: {reason}: leave --plan out, or give --plan off.")
    return plan
