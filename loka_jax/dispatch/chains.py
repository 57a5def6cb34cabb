"""Sites in a row: a group in which each hands its activations on in FP8.

What a site costs depends on its neighbours: an lhs that comes in FP8 needs no cast, and
activations that go out in FP8 cost their writing. So a row of sites is decided as one,
by the cheapest way through all choices (Viterbi):

    min over choices c  of  sum_i time_i(c_i, in = hands(c_(i-1), c_i), out = ...)
"""

import itertools
import math
from collections.abc import Sequence

from loka_jax.dispatch.table import Entry
from loka_jax.fp8 import E4M3
from loka_jax.site import Choice


def hands_on(first: Choice, second: Choice) -> bool:
    """Returns True if a site hands its activations to the next in FP8.

    As `nn.Mlp` does: kernels run both, and the next reads E4M3 with one scale or one a
    row.
    """
    if not first.provider == second.provider == "pallas":
        return False
    gemm = second.recipe.fwd
    if gemm is None or gemm.first.granularity == "blockwise":
        return False
    return gemm.first.dtype == E4M3


def time_of(
    entry: Entry, choice: Choice, what: str, *, is_in: bool, is_out: bool
) -> float:
    """Returns the microseconds of a site within a row; infinity if not measured so."""
    form = (" in" if is_in else "") + (" out" if is_out else "")
    return entry.times.get(f"{what}{form}", {}).get(choice.name, math.inf)


def row_times(
    entries: Sequence[Entry], choices: Sequence[Choice], what: str
) -> list[float]:
    """Returns the time of each site of a row."""
    links = [False, *(hands_on(a, b) for a, b in itertools.pairwise(choices)), False]
    return [
        time_of(entry, choice, what, is_in=links[i], is_out=links[i + 1])
        for i, (entry, choice) in enumerate(zip(entries, choices, strict=True))
    ]


def fastest(
    entries: Sequence[Entry], allowed: Sequence[Sequence[Choice]], what: str
) -> list[Choice]:
    """Returns the choices of a row that take the least time together.

    Args:
        entries: what was measured of each site.
        allowed: the choices of each, all of them measured.
        what: "training" or "inference".
    """
    # By the choice of the site before and of this one: its cost waits for the next.
    best: dict[tuple[Choice | None, Choice], tuple[float, list[Choice]]] = {
        (None, choice): (0.0, [choice]) for choice in allowed[0]
    }
    for i, following in enumerate(allowed[1:]):
        best = _step(best, entries[i], following, what)
    ended = [
        (cost + _cost(entries[-1], before, own, None, what), row)
        for (before, own), (cost, row) in best.items()
    ]
    return min(ended, key=lambda one: one[0])[1]


def _step(best, entry: Entry, following: Sequence[Choice], what: str):
    found: dict[tuple[Choice | None, Choice], tuple[float, list[Choice]]] = {}
    for (before, own), (cost, row) in best.items():
        for after in following:
            total = cost + _cost(entry, before, own, after, what)
            old = found.get((own, after))
            if old is None or total < old[0]:
                found[own, after] = (total, [*row, after])
    return found


def _cost(entry: Entry, before, own: Choice, after, what: str) -> float:
    return time_of(
        entry,
        own,
        what,
        is_in=before is not None and hands_on(before, own),
        is_out=after is not None and hands_on(own, after),
    )
