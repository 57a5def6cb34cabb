"""Which plan a run follows, and what is said of it."""

import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax

from loka_jax import jsonfile
from loka_jax.dispatch import plan as plans
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.candidates import table_key, why_not
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.dispatch.table import BadTable, Table
from loka_jax.nn import Site
from loka_jax.ops.device import local_device
from loka_jax.train.config import Config
from loka_jax.train.record import CHECKPOINTS, latest_step

AUTO, OFF = "auto", "off"
_SHIPPED = pathlib.Path(tables.__file__).parent / "tables"


class Planned(NamedTuple):
    """A plan, and what the user should know.

    Attributes:
        plan: empty where the modules decide.
        notes: sentences.
    """

    plan: DispatchPlan
    notes: tuple[str, ...] = ()


def choose_plan(config: Config, sites: Sequence[Site]) -> Planned:
    """Returns the plan that `--plan` asks for.

    Raises:
        ValueError: if it names no file, or a rule fits nothing.
    """
    options = config.dispatch
    if config.plan == OFF:
        plan = plans.make_plan(sites, None, rules=options.by_pattern)
        return Planned(plan)
    if config.plan == AUTO:
        table, notes = _shipped_table()
    else:
        path = pathlib.Path(config.plan)
        if not path.is_file():
            raise ValueError(
                f"--plan {path} is no file: give a table that tune.py wrote, a plan, "
                f"or one of {AUTO!r} and {OFF!r}."
            )
        if _is_plan(path):
            return Planned(_runnable(plans.load(path, sites), path, sites))
        table, notes = _believed(path)
    plan = plans.make_plan(
        sites,
        table,
        limits=options.limits,
        rules=options.by_pattern,
        config=config.name,
    )
    return Planned(plan, notes)


def load_frozen(path: pathlib.Path, sites: Sequence[Site]) -> Planned:
    """Returns the plan that a run was begun with, which it keeps.

    Raises:
        ValueError: if the file is damaged, or the plan cannot run here.
    """
    return Planned(_runnable(plans.load(path, sites), path, sites))


def find_plan(workdir: pathlib.Path) -> pathlib.Path | None:
    """Returns the file of the plan that a run's newest checkpoint was made with.

    Plans are kept by the step from which they held, so that whatever checkpoint is gone
    on with, its plan is there. None if the run was not begun.
    """
    newest = latest_step(workdir / CHECKPOINTS) or 0
    found = [
        (step, path)
        for path in workdir.glob("plan-*.json")
        if (step := int(path.stem.removeprefix("plan-"))) <= newest
    ]
    return max(found)[1] if found else None


def shipped_path(device_kind: str) -> pathlib.Path:
    """Returns where the table of a kind of device is, if one is shipped."""
    name = re.sub(r"\W+", "_", device_kind.lower())
    return _SHIPPED / f"{name}.json"


def _shipped_table() -> tuple[Table | None, tuple[str, ...]]:
    device = jax.devices()[0]
    path = shipped_path(device.device_kind)
    if path.is_file():
        return _believed(path)
    if device.platform != "gpu":
        return None, ()
    return None, (
        f"No dispatch table for {device.device_kind}: sites run as the configuration "
        "says; experiments/tune.py measures one.",
    )


def _believed(path: pathlib.Path) -> tuple[Table | None, tuple[str, ...]]:
    """Returns a table if it holds here, else None and why not."""
    try:
        table = tables.read(path)
    except BadTable as error:
        return None, (f"Dispatch table ignored: {error}",)
    why_not = table.header.why_not(tables.header_here())
    if why_not is not None:
        return None, (f"Dispatch table {path} ignored: {why_not}.",)
    return table, ()


def _is_plan(path: pathlib.Path) -> bool:
    try:
        value = jsonfile.read(path)
    except ValueError:
        return False
    return isinstance(value, dict) and "schema" not in value


def _runnable(
    plan: DispatchPlan, path: pathlib.Path, sites: Sequence[Site]
) -> DispatchPlan:
    choices = dict(plan.choices)
    kernels = [where for where, choice in plan.choices if choice.provider != "xla"]
    if kernels and local_device().why_not_pallas is not None:
        raise ValueError(
            f"{path} wants kernels for a Hopper GPU at {', '.join(kernels)}, and there "
            "is none here: leave --plan out, or give --plan off."
        )
    for site in sites:
        if site.path in kernels:
            choice = choices[site.path]
            reason = why_not(choice, table_key(site.spec))
            if reason is not None:
                raise ValueError(
                    f"{path}: {choice.name} cannot run at {site.path}: {reason}."
                )
    return plan
