"""What was decided for a model, site by site: static under jit, and a file.

A plan is made before anything is traced, from a table or by rules, and does not change
while a step that was traced with it runs.
"""

import dataclasses
import fnmatch
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from loka_jax import jsonfile
from loka_jax.choice import PROVIDERS, Choice
from loka_jax.dispatch.candidates import SiteKey, bucket, why_not
from loka_jax.dispatch.policy import DEFAULT_LIMITS, Decision, Limits, decide
from loka_jax.dispatch.table import Table
from loka_jax.nn import Site
from loka_jax.recipe import ROLES, Role


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
    for site in sites:
        # A recipe in float32 was asked for by name.
        if table is None or not site.has_choice or site.recipe == "f32":
            continue
        decisions[site.path] = decide(
            table.sites.get(key_of(site)),
            limits,
            source=f"{config} {site.path}",
            roles=roles,
            may_be_fp8=site.recipe != "bf16",
        )
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


def _ruled(site: Site, pattern: str, name: str) -> Decision:
    known = name if name.partition(" ")[0] in PROVIDERS else f"xla {name}"
    choice = Choice.parse(known)
    reason = why_not(choice, key_of(site))
    if reason is not None:
        raise ValueError(
            f"rule {pattern!r}: {name} cannot run at {site.path}: {reason}."
        )
    return Decision(choice, f"rule {pattern!r}")


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
