"""What was decided for a model, site by site: static under jit, and a file.

A plan is made before anything is traced, from a table or by rules, and does not change
while a step that was traced with it runs.
"""

import dataclasses
import fnmatch
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from loka_jax import jsonfile
from loka_jax.dispatch.candidates import BF16, SiteKey, bucket, why_not
from loka_jax.dispatch.chains import fastest, row_times
from loka_jax.dispatch.policy import (
    DEFAULT_LIMITS,
    Decision,
    Limits,
    accurate,
    decide,
    largest_error,
    pass_of,
)
from loka_jax.dispatch.table import Table
from loka_jax.nn import Site
from loka_jax.recipe import ROLES, Role
from loka_jax.site import PROVIDERS, Choice


@dataclasses.dataclass(frozen=True)
class Plan:
    """Decisions by path.

    Attributes:
        decisions: pairs of path and decision, in calling order.
    """

    decisions: tuple[tuple[str, Decision], ...] = ()

    @property
    def choices(self) -> tuple[tuple[str, Choice], ...]:
        """What `nn.Planned` takes."""
        return tuple((path, decision.choice) for path, decision in self.decisions)

    def demoted(self, path: str, choice: Choice, reason: str) -> "Plan":
        """Returns the plan with another choice at a path."""
        decisions = dict(self.decisions)
        assert path in decisions
        decisions[path] = Decision(choice, reason)
        return Plan(tuple(decisions.items()))


def key_of(site: Site) -> SiteKey:
    """Returns what the time of a model's site depends on."""
    return SiteKey(
        bucket(site.m), site.k, site.n, site.norm, site.activation, site.use_bias
    )


def make_plan(
    sites: Sequence[Site],
    table: Table | None,
    *,
    limits: Limits = DEFAULT_LIMITS,
    rules: Mapping[str, str] | None = None,
    config: str = "",
    roles: tuple[Role, ...] = ROLES,
) -> Plan:
    """Returns the plan of a model.

    Args:
        sites: of the model, as `list_sites` returns them.
        table: what was measured here; without one only rules decide.
        limits: on errors and speed.
        rules: by pattern of paths ("top_mlp/*"), a recipe or a choice; of several that
            match, the last.
        config: whose operands the table's errors are of, where it has them.
        roles: that run: all in training, "fwd" alone in inference.

    Raises:
        ValueError: for a rule that matches no site, names nothing, or cannot run.
    """
    decisions: dict[str, Decision] = {}
    if table is not None:
        decisions = _decide(sites, table, limits, config, roles)
    for pattern, name in (rules or {}).items():
        matched = [
            site
            for site in sites
            if site.has_choice and fnmatch.fnmatchcase(site.path, pattern)
        ]
        if not matched:
            paths = ", ".join(site.path for site in sites)
            raise ValueError(f"rule {pattern!r} matches no site: there are {paths}.")
        for site in matched:
            decisions[site.path] = _ruled(site, pattern, name)
    return Plan(tuple(decisions.items()))


def _decide(
    sites: Sequence[Site], table: Table, limits: Limits, config: str, roles
) -> dict[str, Decision]:
    """Returns the decisions on all sites, within the limit on the loss."""
    rows = _rows(sites)
    by_path = {site.path: site for row in rows for site in row}
    wide = {
        path: "FP8 was not asked for"
        for path, site in by_path.items()
        if site.recipe == "bf16"
    }
    while True:
        decisions: dict[str, Decision] = {}
        for row in rows:
            decisions |= _decide_row(row, table, limits, config, roles, wide)
        effects = {
            path: _effect(table, by_path[path], config)
            for path, decision in decisions.items()
            if decision.choice.recipe.fwd is not None
        }
        total = sum(effects.values())
        if total <= limits.loss:
            return decisions
        worst = max(effects, key=lambda path: effects[path])
        wide[worst] = (
            f"FP8 in the forward products raises the loss by {total:.2%} or more, "
            f"above {limits.loss:.2%}, and here by {effects[worst]:.2%}"
        )


def _effect(table: Table, site: Site, config: str) -> float:
    """Returns the relative rise of the loss that FP8 at a site surely causes."""
    entry = table.sites.get(key_of(site))
    found = None if entry is None else entry.effects.get(f"{config} {site.path}")
    return 0.0 if found is None else max(0.0, found.low)


def _rows(sites: Sequence[Site]) -> list[list[Site]]:
    """Returns the sites with a choice, those that follow each other together."""
    rows: list[list[Site]] = []
    before: Site | None = None
    for site in sites:
        # A recipe in float32 was asked for by name.
        if site.has_choice and site.recipe != "f32":
            if site.follows and rows and rows[-1][-1] is before:
                rows[-1].append(site)
            else:
                rows.append([site])
        before = site
    return rows


def _decide_row(
    row: list[Site],
    table: Table,
    limits: Limits,
    config: str,
    roles,
    wide: Mapping[str, str],
) -> dict[str, Decision]:
    """Returns the decisions on a row: site by site, or together if that is faster.

    Args:
        row: the sites.
        table, limits, config, roles: as in `make_plan`.
        wide: by path, why a site may have no FP8.
    """
    arguments = [
        {
            "source": f"{config} {site.path}",
            "roles": roles,
            "why_wide": wide.get(site.path),
            "why_cannot": functools.partial(why_not, site=key_of(site)),
        }
        for site in row
    ]
    entries = [table.sites.get(key_of(site)) for site in row]
    alone = [
        decide(entry, limits, **one)
        for entry, one in zip(entries, arguments, strict=True)
    ]
    what = pass_of(roles)
    known = [
        entry
        for entry in entries
        if entry is not None and BF16.name in entry.times.get(what, {})
    ]
    if len(known) < len(row) or len(row) == 1:
        return {site.path: found for site, found in zip(row, alone, strict=True)}
    allowed = [
        accurate(entry, limits, **one)
        for entry, one in zip(known, arguments, strict=True)
    ]

    def time(choices: Sequence[Choice]) -> float:
        return sum(row_times(known, choices, what))

    own = [found.choice for found in alone]
    together = fastest(known, allowed, what)
    without = [[one for one in choices if not one.is_fp8] for choices in allowed]
    wide_row = fastest(known, without, what)
    # FP8 must be worth it, here for the row as a whole; so must leaving XLA.
    if time(wide_row) / time(together) < limits.speedup:
        together = min(own, wide_row, key=time)
    by_xla = sum(entry.times[what][BF16.name] for entry in known)
    if together == own or by_xla / time(together) < limits.leave_xla:
        return {site.path: found for site, found in zip(row, alone, strict=True)}
    times = row_times(known, together, what)
    found = {}
    for i, site in enumerate(row):
        source = f"{config} {site.path}"
        error = largest_error(together[i], known[i], source, roles)
        speedup = known[i].times[what][BF16.name] / times[i]
        found[site.path] = _in_row(alone[i], together[i], speedup, error)
    return found


def _in_row(
    alone: Decision, choice: Choice, speedup: float, error: float | None
) -> Decision:
    runner_up = alone.runner_up
    if alone.choice != choice:
        runner_up = f"{alone.choice.name}: faster by itself, not in this row"
    return Decision(
        choice,
        "the fastest row of sites that are accurate enough",
        speedup=speedup,
        error=error,
        runner_up=runner_up,
    )


def _ruled(site: Site, pattern: str, name: str) -> Decision:
    known = name if name.partition(" ")[0] in PROVIDERS else f"xla {name}"
    choice = Choice.parse(known)
    reason = why_not(choice, key_of(site))
    # XLA runs whatever a recipe cannot have in FP8 in its compute dtype, and says so.
    if reason is not None and choice.provider != "xla":
        raise ValueError(
            f"rule {pattern!r}: {name} cannot run at {site.path}: {reason}."
        )
    return Decision(choice, f"rule {pattern!r}")


def plan_rows(plan: Plan) -> list[dict[str, Any]]:
    """Returns the decisions as JSON-ready rows, in calling order."""
    return [
        {"path": path, **decision._asdict(), "choice": decision.choice.name}
        for path, decision in plan.decisions
    ]


def save(path: pathlib.Path, plan: Plan):
    """Writes a plan as JSON."""
    jsonfile.write(
        path,
        {
            where: decision._asdict() | {"choice": decision.choice.name}
            for where, decision in plan.decisions
        },
    )


def load(path: pathlib.Path, sites: Sequence[Site]) -> Plan:
    """Returns a plan that `save` wrote, for the sites of a model.

    Raises:
        ValueError: if it is no plan, or one for other sites.
    """
    try:
        value: Any = jsonfile.read(path)
        decisions = {
            where: Decision(**one | {"choice": Choice.parse(one["choice"])})
            for where, one in value.items()
        }
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no plan ({error}): make it again.") from None
    paths = {site.path for site in sites}
    unknown = sorted(set(decisions) - paths)
    if unknown:
        raise ValueError(
            f"{path} is about {', '.join(unknown)}, which this model has not: there "
            f"are {', '.join(sorted(paths))}."
        )
    return Plan(tuple(decisions.items()))
