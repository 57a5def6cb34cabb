"""Cross networks as one operation (`ops.cross`): predicted times, choices.

Timed by itself, a site casts what in the operation a tail has written, and its time
lacks what lies between the products, which moves more bytes than a tail where XLA does
it. So the network is decided as a whole, by products as in `stacks`, launches, bytes:

    one operation   each pass reads x0 and the products of all layers so far, and
                    writes the forms of the next operand; the last one makes dx0
    layer by layer  26 bytes an element in training, 8 in inference: x0 * h + x reads
                    three arrays and writes one; its gradients are five passes

Layers beside the network, which read the same features, are a part of the operation if
that is faster: no other x0 is joined, and a head takes what it reads where it is made.

The factor on the bytes of passes is fitted on the kernels of `wide_models_h200.json`,
448 and 3,456 features at 8,192 and 65,536 rows: 23 % off at worst.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from loka_jax import triton
from loka_jax.dispatch.candidates import table_key
from loka_jax.dispatch.policy import (
    Decision,
    Limits,
    Terms,
    accurate,
    largest_error,
    why_inaccurate,
)
from loka_jax.dispatch.stacks import (
    SPREAD,
    Layers,
    launches_us,
    layer_us,
    products_us,
    written_bytes,
)
from loka_jax.measure.roofline import Roofline
from loka_jax.nn import Site
from loka_jax.ops import cross, crossed_stack
from loka_jax.ops.plan import KernelPlan, resolve
from loka_jax.recipe import OPERANDS, Recipe
from loka_jax.site import BF16, Choice

PASSES = 1.2  # times at the copy rate
# Of a site: in training its weight's cast, three products, passes and their sums. Of
# the operation: what reads and joins features, makes their gradient and next states.
_OF_A_SITE = {"training": 9, "inference": 2}
_OF_ALL = {"training": 10, "inference": 1}
# Bytes of an element: of a layer between its products by XLA, of the join of features,
# and of the features that a head reads.
_BY_XLA = {"training": 26, "inference": 8}
_JOIN = 4
_HEAD = {"training": 6, "inference": 2}


class Network(NamedTuple):
    """A cross network that may run as one operation.

    Attributes:
        sites: of the network.
        beside: of the layers that read the same features, if they may be part of it.
    """

    sites: Sequence[Site]
    beside: Sequence[Site]


def networks(chains: Sequence[Sequence[Site]]) -> list[Network]:
    """Returns the cross networks that may run as one operation.

    None where their tails, Triton's, are not installed.

    Args:
        chains: of sites that follow each other, in calling order.
    """
    if triton.why_not_installed() is not None:
        return []
    by_path: dict[str, Network] = {}
    for chain in chains:
        if chain[0].crosses:
            path = chain[0].path.rpartition("/")[0]
            before = by_path.get(path, Network((), ()))
            by_path[path] = before._replace(sites=[*before.sites, *chain])
        elif chain[0].beside and by_path:
            path = next(reversed(by_path))
            by_path[path] = by_path[path]._replace(beside=chain)
    return list(by_path.values())


def decide_network(
    network: Layers,
    beside: Layers,
    apart: Mapping[str, Decision],
    limits: Limits,
    roofline: Roofline,
) -> dict[str, Decision]:
    """Returns the decisions on sites that run as one operation; none if that is slower.

    They have one choice, in FP8, which must beat bfloat16 by enough; of those beside
    the network, the sites that may have no FP8 keep bfloat16. Where no choice is
    accurate enough, the decisions are those of `apart` and say so.

    Args:
        network: the sites of the network.
        beside: the sites that may be part of it, or none.
        apart: the decisions on each site by itself, by path.
        limits: on errors and speed.
        roofline: of the device.
    """
    times = _Times(network, beside, roofline)
    if not times.are_known:
        return {}
    candidates = [
        (times.alone(choice, apart), choice, (network,))
        for choice in _allowed(network, limits)
        if _why_not(network, choice) is None
    ]
    if beside.sites:
        both = _allowed(_with_fp8(beside), limits)
        candidates += [
            (times.together(choice), choice, (network, beside))
            for _, choice, _ in candidates
            if choice in both and _why_not_beside(network, beside, choice) is None
        ]
    if not candidates:
        return _refused(times, apart, limits)
    us, choice, parts = min(candidates, key=lambda candidate: candidate[0])
    if us > times.apart(apart) or times.in_bf16() / us < limits.speedup:
        return {}
    return {
        site.path: Decision(
            choice,
            "the fastest as one operation, of the whole cross network",
            speedup=times.in_bf16() / us,
            error=largest_error(choice, entry, terms),
            runner_up=f"{apart[site.path].choice.name}: the fastest of the site alone",
            spread=SPREAD,
        )
        for layers in parts
        for site, entry, terms in zip(*layers, strict=True)
        if _choice_of(terms, choice).is_fp8
    }


def _refused(
    times: "_Times", apart: Mapping[str, Decision], limits: Limits
) -> dict[str, Decision]:
    """Returns decisions that name a faster choice of a network, and what bars it."""
    network = times.network
    names = set.intersection(*(set(x.times[network.name]) for x in network.entries))
    choices = [c for c in map(Choice.parse, sorted(names)) if c.is_fp8]
    served = [c for c in choices if _why_not(network, c) is None]
    best = min(served, key=lambda c: times.alone(c, apart), default=None)
    if best is None or times.alone(best, apart) * limits.speedup > times.apart(apart):
        return {}
    each = zip(network.entries, network.terms, strict=True)
    reasons = (why_inaccurate(best, entry, limits, terms) for entry, terms in each)
    reason = next(filter(None, reasons), "no choice is accurate at all of its sites")
    said = f"{best.name} of the whole cross network: {reason}"
    return {s.path: apart[s.path]._replace(runner_up=said) for s in network.sites}


class _Times(NamedTuple):
    """Predicted microseconds of a network and the layers beside it.

    Attributes:
        network, beside, roofline: as of `decide_network`.
    """

    network: Layers
    beside: Layers
    roofline: Roofline

    @property
    def are_known(self) -> bool:
        """True if all sites have a time in bfloat16."""
        entries = (*self.network.entries, *self.beside.entries)
        return all(BF16.name in x.times.get(self.network.name, {}) for x in entries)

    def in_bf16(self) -> float:
        """Returns the time of all sites by themselves in bfloat16."""
        return self.apart({})

    def apart(self, decisions: Mapping[str, Decision]) -> float:
        """Returns the time of all sites by themselves; bfloat16 if not decided."""
        is_read = bool(self.beside.sites)
        us = _sites_us(self.network, decisions) + _sites_us(self.beside, decisions)
        depth = len(self.network.sites) // self.network.sites[0].crosses
        moved = _BY_XLA[self.network.name] * depth + _JOIN * is_read
        return us + self._us_of(moved + _HEAD[self.network.name] * is_read)

    def alone(self, choice: Choice, decisions: Mapping[str, Decision]) -> float:
        """Returns the time of the network as one operation, layers beside it apart."""
        us = self._network(choice) + _sites_us(self.beside, decisions)
        is_read = bool(self.beside.sites)  # x0 in bfloat16, and the features
        return us + self._us_of((_JOIN + 2 * _HEAD[self.network.name]) * is_read)

    def together(self, choice: Choice) -> float:
        """Returns the time of all sites as one operation."""
        name, first = self.network.name, self.beside.sites[0].spec
        us = self._network(choice)
        for site, terms in zip(self.beside.sites, self.beside.terms, strict=True):
            recipe = _choice_of(terms, choice).recipe
            us += layer_us(site.spec, recipe, name, self.roofline)
        given = first.m * first.k * (2 + written_bytes("lhs", choice.recipe, name))
        return us - given / self.roofline.bytes_per_us

    def _network(self, choice: Choice) -> float:
        sites, name = self.network.sites, self.network.name
        return network_us(sites, choice.recipe, name, self.roofline)

    def _us_of(self, bytes_an_element: int) -> float:
        spec = self.network.sites[0].spec
        return bytes_an_element * spec.m * spec.k / self.roofline.bytes_per_us


def network_us(
    sites: Sequence[Site], recipe: Recipe, pass_name: str, roofline: Roofline
) -> float:
    """Returns the predicted microseconds of a cross network as one operation.

    Args:
        sites: of the network, of a layer after those of the layer before it.
        recipe: of all of them.
        pass_name: "training" or "inference".
        roofline: of the device.
    """
    us = sum(products_us(site.spec, recipe, pass_name, roofline) for site in sites)
    kernels = len(sites) * _OF_A_SITE[pass_name] + _OF_ALL[pass_name]
    us += launches_us(kernels, roofline)
    moved = PASSES * passes_bytes(sites, recipe, pass_name)
    if pass_name == "training":
        lhs, rhs, g = (written_bytes(x, recipe, pass_name) for x in OPERANDS)
        for site in sites:  # in float32, and so is its gradient
            moved += site.spec.k * site.spec.n * (8 + rhs)
        if sites[0].crosses > 1:  # what a product leaves in bfloat16 for the next one
            narrow = sites[0].spec.m * sites[0].spec.n * len(sites) // 2
            moved += narrow * (2 + lhs + 2 + g)
    return us + moved / roofline.bytes_per_us


def passes_bytes(sites: Sequence[Site], recipe: Recipe, pass_name: str) -> int:
    """Returns the bytes that the passes over all features move, without weights.

    Arguments are those of `network_us`.
    """
    depth = len(sites) // sites[0].crosses
    lhs = written_bytes("lhs", recipe, pass_name)
    # Products leave in FP8, and x0 is read so.
    an_element = 2 + lhs + sum(layer + 1 + lhs for layer in range(1, depth + 1))
    if pass_name == "training":
        g = written_bytes("g", recipe, pass_name)
        an_element += sum(layer + 1 + g for layer in range(1, depth + 1))
        an_element += (depth + 1) + depth + 2
    return sites[0].spec.m * sites[0].spec.k * an_element


def _sites_us(layers: Layers, decisions: Mapping[str, Decision]) -> float:
    """Returns the time of sites by themselves, in bfloat16 if not decided."""
    us = 0.0
    for site, entry, terms in zip(*layers, strict=True):
        decision = decisions.get(site.path)
        speedup = 1.0 if decision is None else decision.speedup or 1.0
        us += entry.times[terms.pass_name][BF16.name] / speedup
    return us


def _choice_of(terms: Terms, choice: Choice) -> Choice:
    """Returns a choice at a site, bfloat16 if that may not have all of its FP8."""
    return BF16 if terms.why_not_fp8 or terms.why_not_dlhs else choice


def _with_fp8(layers: Layers) -> Layers:
    """Returns the sites that may have FP8 in all products."""
    may = [not (terms.why_not_fp8 or terms.why_not_dlhs) for terms in layers.terms]
    each = list(itertools.compress(zip(*layers, strict=True), may))
    return Layers(*zip(*each, strict=True)) if each else Layers((), (), ())


def _allowed(layers: Layers, limits: Limits) -> list[Choice]:
    """Returns the choices in FP8 that are accurate at all sites."""
    of_each = [
        accurate(entry, limits, terms)
        for entry, terms in zip(layers.entries, layers.terms, strict=True)
    ]
    first = of_each[0] if of_each else []
    common = [c for c in first if all(c in others for others in of_each[1:])]
    return [choice for choice in common if choice.is_fp8]


def _why_not(network: Layers, choice: Choice) -> str | None:
    plans = [_plan(site, choice) for site in network.sites]
    return cross.why_not(tuple(itertools.batched(plans, network.sites[0].crosses)))


def _why_not_beside(network: Layers, beside: Layers, choice: Choice) -> str | None:
    plans = tuple(
        _plan(site, _choice_of(terms, choice))
        for site, terms in zip(beside.sites, beside.terms, strict=True)
    )
    return crossed_stack.why_not_beside(_plan(network.sites[0], choice), plans)


def _plan(site: Site, choice: Choice) -> KernelPlan:
    """Returns the plan of a site by a choice once its scales are initialized."""
    choice = choice.with_initialized_scales()
    return resolve(table_key(site.spec), choice, site.plan.device)
