"""Chooses the plan that a run follows, with notes for the user."""

import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from loka_jax import jsonfile
from loka_jax.dispatch import plan as plans
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.candidates import table_key, why_not
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.dispatch.table import Table
from loka_jax.nn import Site
from loka_jax.ops.device import local_device
from loka_jax.train.config import Config

AUTO, OFF = "auto", "off"
_SHIPPED = pathlib.Path(tables.__file__).parent / "tables"


class ChosenPlan(NamedTuple):
    """A plan, and notes for the user.

    Attributes:
        plan: without the sites for which the modules decide.
        notes: sentences.
    """

    plan: DispatchPlan
    notes: tuple[str, ...] = ()


def choose_plan(config: Config, sites: Sequence[Site]) -> ChosenPlan:
    """Returns the plan that `--plan` asks for.

    Raises:
        ValueError: if it names a file that is no plan and no table for this machine, or
            a rule matches no site.
    """
    options = config.dispatch
    table: Table | None = None
    notes: tuple[str, ...] = ()
    if config.plan == AUTO:
        table, notes = _shipped_table()
    elif config.plan != OFF:
        path = pathlib.Path(config.plan)
        if not path.is_file():
            raise ValueError(
                f"--plan {path} is not a file: give a table that tune.py wrote, a "
                f"plan, or one of {AUTO!r} and {OFF!r}."
            )
        if _is_plan(path):
            return ChosenPlan(_runnable(plans.load(path, sites), str(path), sites))
        table = _table_for_here(path)
    plan = plans.make_plan(
        sites,
        table,
        limits=options.limits,
        rules=options.by_pattern,
        config=config.name,
    )
    return ChosenPlan(plan, notes)


def saved_plan(value: Any, sites: Sequence[Site]) -> DispatchPlan:
    """Returns the plan of a checkpoint from its JSON values.

    Raises:
        ValueError: if it cannot run here.
    """
    source = "the checkpoint's plan"
    return _runnable(plans.from_json(value, sites, source), source, sites)


def shipped_path(device_kind: str) -> pathlib.Path:
    """Returns the path of the shipped table of a kind of device, if there is one."""
    name = re.sub(r"\W+", "_", device_kind.lower())
    return _SHIPPED / f"{name}.json"


def _shipped_table() -> tuple[Table | None, tuple[str, ...]]:
    device = jax.devices()[0]
    path = shipped_path(device.device_kind)
    if path.is_file():
        try:
            return _table_for_here(path), ()
        except ValueError as error:
            return None, (f"The shipped dispatch table is ignored: {error}",)
    if device.platform != "gpu":
        return None, ()
    return None, (
        f"No dispatch table for {device.device_kind}: sites run as the configuration "
        "says; experiments/tune.py measures one.",
    )


def _table_for_here(path: pathlib.Path) -> Table:
    """Returns a table that holds here.

    Raises:
        ValueError: with the reason, if it does not.
    """
    table = tables.read(path)
    reason = table.header.why_not(tables.header_here())
    if reason is not None:
        raise ValueError(
            f"{path} does not hold here, because {reason}: measure a table with "
            "experiments/tune.py, or leave --plan out."
        )
    return table


def _is_plan(path: pathlib.Path) -> bool:
    """Returns whether a file is a plan rather than a table.

    Raises:
        ValueError: if it is not JSON, or cannot be read.
    """
    try:
        value = jsonfile.read(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
    return not (isinstance(value, dict) and "schema" in value)


def _runnable(plan: DispatchPlan, source: str, sites: Sequence[Site]) -> DispatchPlan:
    choices = dict(plan.choices)
    kernels = [where for where, choice in plan.choices if choice.provider != "xla"]
    if kernels and local_device().why_not_pallas is not None:
        raise ValueError(
            f"{source} has kernels for a Hopper GPU at {', '.join(kernels)}, and this "
            "machine has none: leave --plan out, or give --plan off."
        )
    for site in sites:
        if site.path in kernels:
            choice = choices[site.path]
            reason = why_not(choice, table_key(site.spec))
            if reason is not None:
                raise ValueError(
                    f"{source}: {choice.name} cannot run at {site.path}: {reason}."
                )
    return plan
