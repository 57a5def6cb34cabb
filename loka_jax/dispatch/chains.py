"""Chains of sites: the fastest choices where sites hand activations on in FP8.

The cost of a site depends on its neighbours: an lhs that comes in FP8 needs no cast,
and activations that go out in FP8 must be written. So a chain is decided as a whole, by
the cheapest path through all choices (Viterbi):

    min over choices c  of  sum_i time_i(c_i, in = hands_on(c_(i-1), c_i), out = ...)
"""

import itertools
import math
from collections.abc import Sequence

from loka_jax.dispatch.table import Entry
from loka_jax.fp8 import E4M3
from loka_jax.site import Choice


def hands_on(first: Choice, second: Choice) -> bool:
    """Returns True if a site hands its activations to the next in FP8.

    As in `nn.Mlp`: kernels run both, and the next reads E4M3 with one scale in all or
    one per row.
    """
    if not first.provider == second.provider == "pallas":
        return False
    gemm = second.recipe.fwd
    if gemm is None or gemm.is_tiled:
        return False
    return gemm.first.dtype == E4M3


def time_within(
    entry: Entry, choice: Choice, name: str, *, is_in: bool, is_out: bool
) -> float:
    """Returns the microseconds of a site within a chain; infinity if not measured."""
    form = (" in" if is_in else "") + (" out" if is_out else "")
    return entry.times.get(f"{name}{form}", {}).get(choice.name, math.inf)


def chain_times(
    entries: Sequence[Entry], choices: Sequence[Choice], name: str
) -> list[float]:
    """Returns the time of each site of a chain."""
    links = [False, *(hands_on(a, b) for a, b in itertools.pairwise(choices)), False]
    return [
        time_within(entry, choice, name, is_in=links[i], is_out=links[i + 1])
        for i, (entry, choice) in enumerate(zip(entries, choices, strict=True))
    ]


def fastest(
    entries: Sequence[Entry], allowed: Sequence[Sequence[Choice]], name: str
) -> list[Choice]:
    """Returns the choices of a chain that take the least time together.

    Args:
        allowed: the choices of each site, all of them measured.
        name: of the pass, "training" or "inference".
    """
    best: _Chains = {("", choice.name): (0.0, [choice]) for choice in allowed[0]}
    for i, following in enumerate(allowed[1:]):
        best = _step(best, entries[i], following, name)
    ends = [
        (cost + _cost(entries[-1], _before_last(chain), chain[-1], None, name), chain)
        for cost, chain in best.values()
    ]
    return min(ends, key=lambda end: end[0])[1]


# Times and choices by the names of the last two, whose cost depends on the next. Names
# are hashed many times as fast as choices.
type _Chains = dict[tuple[str, str], tuple[float, list[Choice]]]


def _step(
    best: _Chains, entry: Entry, following: Sequence[Choice], name: str
) -> _Chains:
    """Returns the cheapest chains with one more site."""
    longer: _Chains = {}
    for cost, chain in best.values():
        before, choice = _before_last(chain), chain[-1]
        for after in following:
            total = cost + _cost(entry, before, choice, after, name)
            old = longer.get((choice.name, after.name))
            if old is None or total < old[0]:
                longer[choice.name, after.name] = (total, [*chain, after])
    return longer


def _before_last(chain: list[Choice]) -> Choice | None:
    return chain[-2] if len(chain) > 1 else None


def _cost(entry: Entry, before, choice: Choice, after, name: str) -> float:
    return time_within(
        entry,
        choice,
        name,
        is_in=before is not None and hands_on(before, choice),
        is_out=after is not None and hands_on(choice, after),
    )
