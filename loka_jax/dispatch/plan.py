"""The choices for the sites of a model: static under jit, saved as a file.

A plan is made before anything is traced, from a table or by rules, and does not change
while a step that was traced with it runs.
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from loka_jax import jsonfile
from loka_jax.dispatch.attention import decide_attention
from loka_jax.dispatch.candidates import why_no_fp8, why_not
from loka_jax.dispatch.chains import chain_times, fastest
from loka_jax.dispatch.groups import Deciding, Known, decide_group, groups_of
from loka_jax.dispatch.heads import BELOW_HEAD, below_heads
from loka_jax.dispatch.local import performance_of
from loka_jax.dispatch.performance import Estimates, PerformanceModel
from loka_jax.dispatch.policy import (
    DEFAULT_LIMITS,
    Decision,
    Limits,
    Terms,
    accurate,
    decide,
    largest_error,
    total_effect,
    why_harmful,
)
from loka_jax.dispatch.rules import by_rules
from loka_jax.dispatch.table import Entry, Positive, RoleErrors, Text
from loka_jax.group import Group
from loka_jax.measure.intervals import Interval
from loka_jax.measure.roofline import Roofline
from loka_jax.nn import Site
from loka_jax.recipe import ROLES, Role
from loka_jax.site import BF16, Choice


@dataclasses.dataclass(frozen=True)
class DispatchPlan:
    """Decisions by path, in calling order."""

    decisions: tuple[tuple[str, Decision], ...] = ()

    @property
    def choices(self) -> tuple[tuple[str, Choice], ...]:
        """Pairs of path and choice, as `nn.Planned` takes them."""
        return tuple((path, decision.choice) for path, decision in self.decisions)

    def changed(self, decisions: Mapping[str, Decision]) -> "DispatchPlan":
        """Returns the plan with other decisions at some paths."""
        return DispatchPlan(tuple({**dict(self.decisions), **decisions}.items()))


def make_plan(
    sites: Sequence[Site],
    performance: PerformanceModel | str | os.PathLike | None,
    *,
    limits: Limits = DEFAULT_LIMITS,
    rules: Mapping[str, str] | None = None,
    config: str = "",
    roles: tuple[Role, ...] = ROLES,
    errors: Mapping[str, RoleErrors] | None = None,
) -> DispatchPlan:
    """Returns the plan of a model.

    Args:
        performance: times and errors on this device, or the path of a table with them;
            without them only rules decide, and a GPU without FP8 runs bfloat16.
        rules: by pattern of paths ("top_mlp/*"), a recipe or a choice; of several that
            match, the last.
        config: the run whose operands' errors count, as `Config.source` names it. In
            training, a site of which there are only errors of other operands runs in
            bfloat16.
        roles: the roles that run: all in training, "fwd" alone in inference.
        errors: of the model's own products, by path, in place of those in tables.

    Raises:
        ValueError: for a rule that matches no site, names no choice, or cannot run; for
            a table that is none, or does not hold here.
    """
    if isinstance(performance, str | os.PathLike):
        performance = performance_of(performance)
    decisions = _without_fp8(sites)
    if performance is not None:
        heads = below_heads(sites) if roles == ROLES else {}
        options = _Options(performance, limits, config, roles, errors or {}, heads)
        decisions = _decide(sites, options)
        for site in sites:
            if site.attention is not None and site.recipe != "f32":
                decisions[site.path] = _decide_attention(site, options)
        decisions = {x.path: decisions[x.path] for x in sites if x.path in decisions}
    decisions |= by_rules(sites, rules or {})
    return DispatchPlan(tuple(decisions.items()))


class _Options(NamedTuple):
    """Arguments of `make_plan` that hold for all sites."""

    performance: PerformanceModel
    limits: Limits
    config: str
    roles: tuple[Role, ...]
    errors: Mapping[str, RoleErrors]
    below_heads: Mapping[str, bool]

    @property
    def tails_roofline(self) -> Roofline | None:
        """The roofline where operations of products and tails can be priced.

        None where the tails are no kernels of ours: such an operation is then XLA's,
        as sites apart are, and has their time.
        """
        performance = self.performance
        return None if performance.device.why_not_pallas else performance.roofline

    def estimates(self, site: Site) -> Estimates:
        return self.performance.estimates(site.spec)

    def source(self, site: Site) -> str:
        return f"{self.config} {site.path}"

    def effect(self, site: Site) -> Interval | None:
        """Returns the relative rise of the loss from FP8 at a site, if measured."""
        return self.estimates(site).entry.effects.get(self.source(site))

    def refused(self, site: Site) -> str | None:
        """Returns why a site has no FP8, by measurements of a whole plan."""
        return self.estimates(site).entry.refused.get(self.source(site))


def _decide(sites: Sequence[Site], options: _Options) -> dict[str, Decision]:
    """Returns the decisions on all sites, within the limit on the loss."""
    chains = chains_of(sites)
    by_path = {site.path: site for chain in chains for site in chain}
    not_fp8 = {
        path: reason
        for path, site in by_path.items()
        if (reason := _why_bf16(site, options)) is not None
    }
    while True:
        decisions: dict[str, Decision] = {}
        for chain in chains:
            decisions |= _decide_chain(chain, options, not_fp8)
        for group in groups_of([*by_path.values()]):
            decisions |= _decide_group(group, by_path, decisions, options, not_fp8)
        effects = {
            path: effect
            for path, decision in decisions.items()
            if decision.choice.recipe.fwd is not None
            and (effect := options.effect(by_path[path])) is not None
        }
        reason = why_harmful(total_effect(effects.values()), options.limits.loss)
        if reason is None:
            return decisions
        worst = max(effects, key=lambda path: effects[path].high)
        not_fp8[worst] = f"{reason}; here by {effects[worst].mean:.3%}"


def _without_fp8(sites: Sequence[Site]) -> dict[str, Decision]:
    """Returns bfloat16 for the FP8 sites of a GPU that has none."""
    return {
        site.path: Decision(BF16, reason)
        for site in sites
        if is_open(site) and site.plan.choice.is_fp8
        if (reason := why_no_fp8(site.plan.device)) is not None
    }


def _why_bf16(site: Site, options: _Options) -> str | None:
    if site.recipe == "bf16":
        return "its recipe is bf16"
    if options.below_heads.get(site.path, False):
        return f"{BELOW_HEAD}, and it is a small part of the work"
    return options.refused(site)


def is_open(site: Site) -> bool:
    """Returns True if Dispatch decides on a site: it keeps the explicit recipe f32."""
    return site.has_choice and site.recipe != "f32"


def chains_of(sites: Sequence[Site]) -> list[list[Site]]:
    """Returns the sites that are decided, those that follow each other together."""
    chains: list[list[Site]] = []
    before: Site | None = None
    for site in sites:
        if is_open(site):
            if site.follows and chains and chains[-1][-1] is before:
                chains[-1].append(site)
            else:
                chains.append([site])
        before = site
    return chains


def _decide_chain(
    chain: list[Site], options: _Options, not_fp8: Mapping[str, str]
) -> dict[str, Decision]:
    """Returns the decisions on a chain: site by site, or together if that is faster."""
    terms = [_terms(site, options, not_fp8) for site in chain]
    estimates = [options.estimates(site) for site in chain]
    entries = [of_site.entry for of_site in estimates]
    alone = [
        decide(entry, options.limits, site_terms)
        for entry, site_terms in zip(entries, terms, strict=True)
    ]
    together = _decide_together(entries, terms, alone, options.limits)
    name, paths = terms[0].pass_name, [site.path for site in chain]
    decisions = [
        decision._replace(spread=of_site.spread(name, decision.choice))
        for decision, of_site in zip(together or alone, estimates, strict=True)
    ]
    return dict(zip(paths, decisions, strict=True))


def _decide_group(
    group: Group,
    by_path: Mapping[str, Site],
    apart: Mapping[str, Decision],
    options: _Options,
    not_fp8: Mapping[str, str],
) -> dict[str, Decision]:
    """Returns the decisions on the sites that run in their group."""
    roofline = options.tails_roofline
    sites = [by_path[x.path] for x in group.members if x.path in by_path]
    if roofline is None:
        return {}
    known = {
        site.path: Known(
            site, options.estimates(site).entry, _terms(site, options, not_fp8)
        )
        for site in sites
    }
    return decide_group(Deciding(group, known, apart, options.limits, roofline))


def _decide_attention(site: Site, options: _Options) -> Decision:
    reason = _why_bf16(site, options)
    terms = _terms(site, options, {} if reason is None else {site.path: reason})
    return decide_attention(site, options.performance, options.limits, terms)


def _terms(site: Site, options: _Options, not_fp8: Mapping[str, str]) -> Terms:
    return Terms(
        source=options.source(site),
        errors=options.errors.get(site.path),
        roles=options.roles,
        why_not_fp8=not_fp8.get(site.path),
        why_not_dlhs=BELOW_HEAD if site.path in options.below_heads else None,
        why_not=functools.partial(
            why_not, spec=site.spec, device=options.performance.device
        ),
    )


def _decide_together(
    entries: list[Entry], terms: list[Terms], alone: list[Decision], limits: Limits
) -> list[Decision] | None:
    """Returns the decisions on a chain as a whole, if they are faster than `alone`."""
    name = terms[0].pass_name
    has_times = all(BF16.name in entry.times.get(name, {}) for entry in entries)
    if not has_times or len(entries) == 1:
        return None

    def time(choices: Sequence[Choice]) -> float:
        return sum(chain_times(entries, choices, name))

    allowed = [
        accurate(entry, limits, site_terms)
        for entry, site_terms in zip(entries, terms, strict=True)
    ]
    separate = [decision.choice for decision in alone]
    together = fastest(entries, allowed, name)
    in_bf16 = [[c for c in choices if not c.is_fp8] for choices in allowed]
    bf16_chain = fastest(entries, in_bf16, name)
    # FP8 must be worth it, here for the chain as a whole; so must leaving XLA.
    if time(bf16_chain) / time(together) < limits.speedup:
        together = min(separate, bf16_chain, key=time)
    by_xla = sum(entry.times[name][BF16.name] for entry in entries)
    if together == separate or by_xla / time(together) < limits.leave_xla:
        return None
    times = chain_times(entries, together, name)
    return [
        _in_chain(
            alone[i],
            together[i],
            entry.times[name][BF16.name] / times[i],
            largest_error(together[i], entry, terms[i]),
        )
        for i, entry in enumerate(entries)
    ]


def _in_chain(
    alone: Decision, choice: Choice, speedup: float, error: float | None
) -> Decision:
    runner_up = alone.runner_up
    if alone.choice != choice:
        runner_up = f"{alone.choice.name}: faster by itself, not in this chain"
    return Decision(
        choice,
        "the fastest chain of sites that are accurate enough",
        speedup=speedup,
        error=error,
        runner_up=runner_up,
    )


def plan_rows(plan: DispatchPlan) -> list[dict[str, Any]]:
    """Returns the decisions as JSON-ready rows, in calling order."""
    return [{"path": path, **row} for path, row in as_json(plan).items()]


def as_json(plan: DispatchPlan) -> dict[str, Any]:
    """Returns a plan as JSON values."""
    return {
        site: decision._asdict() | {"choice": decision.choice.name}
        for site, decision in plan.decisions
    }


def save(path: pathlib.Path, plan: DispatchPlan):
    """Writes a plan as JSON."""
    jsonfile.write(path, as_json(plan))


def load(path: pathlib.Path, sites: Sequence[Site]) -> DispatchPlan:
    """Returns the plan of a model's sites that `save` wrote.

    Raises:
        ValueError: if the file is not a plan, or has a plan for other sites.
    """
    try:
        value = jsonfile.read(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
    return from_json(value, sites, str(path))


def from_json(value: Any, sites: Sequence[Site], source: str) -> DispatchPlan:
    """Returns the plan of a model's sites from the values of `as_json`.

    Raises:
        ValueError: if they are not a plan, or a plan for other sites.
    """
    try:
        saved = jsonfile.typed(value, dict[str, _Saved])
        decisions = {path: decision.parsed() for path, decision in saved.items()}
    except ValueError as error:
        raise ValueError(f"{source} is not a plan: {error}") from None
    paths = {site.path for site in sites}
    unknown = sorted(set(decisions) - paths)
    if unknown:
        raise ValueError(
            f"{source} has choices for {', '.join(unknown)}, which are not sites of "
            f"this model: there are {', '.join(sorted(paths))}."
        )
    return DispatchPlan(tuple(decisions.items()))


@dataclasses.dataclass
class _Saved:
    """A decision in JSON: its choice by name."""

    choice: Text
    reason: Text
    speedup: Positive | None = None
    error: float | None = None
    runner_up: Text | None = None
    spread: Positive | None = None

    def parsed(self) -> Decision:
        fields: dict[str, Any] = dict(vars(self))
        return Decision(Choice.parse(fields.pop("choice")), **fields)
