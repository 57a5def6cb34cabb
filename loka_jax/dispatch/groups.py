"""Groups of sites: by themselves and in chains, or as one operation.

The time of sites in a group is predicted (`group_times`). Dense layers in a row take
each its fastest choice; a cross network has one, in FP8, and the layers behind or
beside it take the same, where that is faster than two operations.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from loka_jax import triton
from loka_jax.dispatch.candidates import table_key
from loka_jax.dispatch.group_times import (
    SPREAD,
    apart_us,
    beside_us,
    dense_us,
    group_us,
)
from loka_jax.dispatch.policy import (
    Decision,
    Limits,
    Terms,
    accurate,
    largest_error,
    why_inaccurate,
)
from loka_jax.dispatch.table import Entry
from loka_jax.group import Cross, Dense, Group
from loka_jax.measure.roofline import Roofline
from loka_jax.nn import Site
from loka_jax.nn.group import WIDE
from loka_jax.ops.group import why_not
from loka_jax.ops.plan import KernelPlan, resolve
from loka_jax.site import BF16, Choice


class Known(NamedTuple):
    """A site, its measurements, and the terms on it."""

    site: Site
    entry: Entry
    terms: Terms

    @property
    def path(self) -> str:
        """The path of the site."""
        return self.site.path

    @property
    def bf16_us(self) -> float | None:
        """The time of the site in bfloat16 by XLA; None if unknown."""
        return self.entry.times.get(self.terms.pass_name, {}).get(BF16.name)

    def plan(self, choice: Choice) -> KernelPlan:
        """Returns the plan of the site in its group, its delayed scales initialized."""
        choice = Choice("group", choice.recipe).with_initialized_scales()
        return resolve(table_key(self.site.spec), choice, self.site.plan.device)

    def joins(self, choice: Choice) -> bool:
        """Returns True if the site may run in its group by a recipe."""
        return choice.provider == "xla" and self.plan(choice).why_not is None

    def apart_us(self, decision: Decision) -> float:
        """Returns the time of the site by itself, or in a chain."""
        assert self.bf16_us is not None
        return self.bf16_us / (decision.speedup or 1.0)

    def in_group(self, choice: Choice, reason: str, **values) -> Decision:
        """Returns the decision that the site runs in its group."""
        return Decision(
            Choice("group", choice.recipe),
            reason,
            error=largest_error(choice, self.entry, self.terms),
            spread=SPREAD,
            **values,
        )


class Deciding(NamedTuple):
    """What decisions on a group depend on.

    Attributes:
        known: of its sites that are decided, by path.
        apart: the decisions on each site by itself, or in a chain, by path.
    """

    group: Group
    known: Mapping[str, Known]
    apart: Mapping[str, Decision]
    limits: Limits
    roofline: Roofline

    @property
    def name(self) -> str:
        """The pass that is decided, "training" or "inference"."""
        return next(iter(self.known.values())).terms.pass_name

    def us(self, group: Group, choices: Mapping[str, Choice]) -> float:
        """Returns the predicted time of sites as one operation."""
        recipes = {path: choice.recipe for path, choice in choices.items()}
        return group_us(group, recipes, self.name, self.roofline)

    def dense_us(self, known: Known, choice: Choice) -> float:
        """Returns the predicted time of a dense layer within the group."""
        return dense_us(known.site.spec, choice.recipe, self.name, self.roofline)


def groups_of(sites: Sequence[Site]) -> list[Group]:
    """Returns the groups of sites, in calling order."""
    return list(dict.fromkeys(site.group for site in sites if site.group is not None))


def cross_networks(sites: Sequence[Site]) -> list[list[str]]:
    """Returns the paths of each cross network, whose sites have one choice."""
    return [
        [member.path for own in layer.members for member in own]
        for group in groups_of(sites)
        for layer in group.layers
        if isinstance(layer, Cross)
    ]


def decide_group(deciding: Deciding) -> dict[str, Decision]:
    """Returns the decisions on the sites that run in their group; none if none do."""
    known = deciding.known
    if triton.why_not_installed() or any(x.bf16_us is None for x in known.values()):
        return {}
    decisions: dict[str, Decision] = {}
    for run in _dense_runs(deciding.group, known):
        decisions |= _decide_run(deciding, run)
    deciding = deciding._replace(apart={**deciding.apart, **decisions})
    for layer in deciding.group.layers:
        if isinstance(layer, Cross):
            members = [x.path for own in layer.members for x in own]
            if all(path in known for path in members):
                decisions |= _decide_cross(deciding, layer)
    return decisions


def _dense_runs(group: Group, known: Mapping[str, Known]) -> Iterator[list[Known]]:
    """Yields dense layers in a row that bfloat16 runs as one operation."""
    run: list[Known] = []
    for layer in group.layers:
        member = layer.member if isinstance(layer, Dense) else None
        site = None if member is None else known.get(member.path)
        if site is not None and site.joins(BF16):
            if run and not group.follows(site.path):
                yield from _if_wide(run)
                run = []
            run.append(site)
        elif site is not None or isinstance(layer, Cross):
            yield from _if_wide(run)
            run = []
    yield from _if_wide(run)


def _if_wide(run: list[Known]) -> list[list[Known]]:
    """Returns a run, if one of its layers is wide."""
    sizes = [size for x in run for size in (x.site.spec.k, x.site.spec.n)]
    return [run] if max(sizes, default=0) >= WIDE else []


def _decide_run(deciding: Deciding, run: list[Known]) -> dict[str, Decision]:
    """Returns the decisions on layers in a row as one operation, if that is faster.

    FP8 must beat the fastest in bfloat16 by enough, here of the run as a whole; so must
    kernels in bfloat16 beat XLA in training, where it has passes of its own.
    """
    limits, fastest = deciding.limits, {}
    for x in run:
        allowed = [c for c in accurate(x.entry, limits, x.terms) if x.joins(c)]
        us = {c: deciding.dense_us(x, c) for c in (BF16, *allowed)}
        fastest[x.path] = min(us, key=us.__getitem__)
    in_bf16 = dict.fromkeys(fastest, BF16)
    together = {
        name: sum(deciding.dense_us(x, choices[x.path]) for x in run)
        for name, choices in (("bf16", in_bf16), ("fastest", fastest))
    }
    decided = [deciding.apart[x.path] for x in run]
    apart = sum(x.apart_us(decision) for x, decision in zip(run, decided, strict=True))
    times = together | {"apart": apart}
    has_fp8 = any(decision.choice.is_fp8 for decision in decided)
    least = limits.leave_xla if deciding.name == "training" else 1.0
    gains = times["apart"] / times["bf16"] >= least
    best_bf16 = "bf16" if has_fp8 or gains else "apart"
    best = min(times, key=times.__getitem__)
    if times[best_bf16] / times[best] < limits.speedup:
        best = best_bf16
    if best == "apart":
        return {}
    choices = fastest if best == "fastest" else in_bf16
    return {x.path: _in_run(deciding, x, choices[x.path]) for x in run}


def _in_run(deciding: Deciding, x: Known, choice: Choice) -> Decision:
    apart, runner_up = deciding.apart[x.path], _refused(deciding, x, choice)
    if runner_up is None and apart.choice.recipe == choice.recipe:
        runner_up = apart.runner_up
    elif runner_up is None:
        runner_up = f"{apart.choice.name}: the fastest of the site by itself"
    assert x.bf16_us is not None
    return x.in_group(
        choice,
        "the fastest as one operation with the layers beside it",
        speedup=x.bf16_us / deciding.dense_us(x, choice),
        runner_up=runner_up,
    )


def _refused(deciding: Deciding, x: Known, choice: Choice) -> str | None:
    """Returns a faster choice of a layer, and which limit on errors it breaks."""
    limit = deciding.dense_us(x, choice)
    times = {c: deciding.dense_us(x, c) for c in _measured(x) if x.joins(c)}
    for faster in sorted((c for c in times if times[c] < limit), key=times.__getitem__):
        reason = why_inaccurate(faster, x.entry, deciding.limits, x.terms)
        if reason is not None:
            return f"{faster.name}: {reason}"
    return None


def _measured(x: Known) -> list[Choice]:
    return [*map(Choice.parse, x.entry.times[x.terms.pass_name])]


def _decide_cross(deciding: Deciding, layer: Cross) -> dict[str, Decision]:
    """Returns the decisions on a cross network, and on layers that run with it.

    Where no choice is accurate enough, the decisions are those by themselves and say
    so. Of the other layers, those that may have no FP8 keep bfloat16.
    """
    known = deciding.known
    alone = [known[x.path] for own in layer.members for x in own]
    others = [x for x in known.values() if x not in alone]
    us = sum(x.apart_us(deciding.apart[x.path]) for x in known.values())
    by_apart = us + apart_us(deciding.group, deciding.name, deciding.roofline)
    in_bf16 = sum(x.bf16_us or 0.0 for x in known.values())
    in_bf16 += apart_us(deciding.group, deciding.name, deciding.roofline)
    times = {
        (choice, is_joint): us
        for choice in _common(alone, deciding.limits)
        for is_joint, us in _crossed_us(deciding, layer, choice, others)
    }
    if not times:
        return _barred(deciding, layer, alone, by_apart)
    best = min(times, key=times.__getitem__)
    us, (choice, is_joint) = times[best], best
    if us > by_apart or in_bf16 / us < deciding.limits.speedup:
        return {}
    return {
        x.path: x.in_group(
            _choice_of(x, choice),
            "the fastest as one operation, of the whole cross network",
            speedup=in_bf16 / us,
            runner_up=f"{deciding.apart[x.path].choice.name}: the fastest of the site "
            "alone",
        )
        for x in (*alone, *(others if is_joint else ()))
    }


def _crossed_us(
    deciding: Deciding, layer: Cross, choice: Choice, others: Sequence[Known]
) -> Iterator[tuple[bool, float]]:
    """Yields the times of a cross network by a choice: alone, and with all others."""
    group = deciding.group
    network = Group(rows=group.rows, inputs=group.inputs, layers=(layer,), outputs=())
    choices = {x.path: choice for x in network.members}
    plans = [deciding.known[path].plan(choice) for path in choices]
    if why_not(network, plans) is not None:
        return
    us = deciding.us(network, choices)
    apart = sum(x.apart_us(deciding.apart[x.path]) for x in others)
    between = beside_us(group, deciding.name, deciding.roofline)
    yield False, us + apart + between * bool(others)
    with_fp8 = [x for x in others if _choice_of(x, choice).is_fp8]
    if not others or choice not in _common(with_fp8, deciding.limits):
        return
    choices |= {x.path: _choice_of(x, choice) for x in others}
    members = [x.path for x in group.members]
    if any(path not in choices for path in members):
        return
    plans = [deciding.known[path].plan(choices[path]) for path in members]
    if why_not(group, plans) is None:
        yield True, deciding.us(group, choices)


def _barred(
    deciding: Deciding, layer: Cross, alone: Sequence[Known], by_apart: float
) -> dict[str, Decision]:
    """Returns decisions that name a faster choice of a network, and what bars it."""
    others = [x for x in deciding.known.values() if x not in alone]
    names = set.intersection(*({c.name for c in _measured(x)} for x in alone))
    times = {
        choice: us
        for choice in map(Choice.parse, sorted(names))
        if choice.is_fp8
        for is_joint, us in _crossed_us(deciding, layer, choice, others)
        if not is_joint
    }
    best = min(times, key=times.__getitem__, default=None)
    if best is None or times[best] * deciding.limits.speedup > by_apart:
        return {}
    reasons = (why_inaccurate(best, x.entry, deciding.limits, x.terms) for x in alone)
    reason = next(filter(None, reasons), "no choice is accurate at all of its sites")
    said = f"{best.name} of the whole cross network: {reason}"
    return {x.path: deciding.apart[x.path]._replace(runner_up=said) for x in alone}


def _choice_of(x: Known, choice: Choice) -> Choice:
    """Returns a choice at a site, bfloat16 if that may not have all of its FP8."""
    return BF16 if x.terms.why_not_fp8 or x.terms.why_not_dlhs else choice


def _common(sites: Sequence[Known], limits: Limits) -> list[Choice]:
    """Returns the choices in FP8 by XLA's products that are accurate at all sites."""
    of_each = [accurate(x.entry, limits, x.terms) for x in sites]
    first = of_each[0] if of_each else []
    common = [c for c in first if all(c in others for others in of_each[1:])]
    return [c for c in common if c.is_fp8 and c.provider == "xla"]
