"""The sites of a model as a table for the terminal.

    print(site_table(nn.list_sites(model, x)))

Layers alike are one line: `Block_{0..11}/Dense_0 (12)`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from loka_jax.dispatch.group_times import dense_us
from loka_jax.dispatch.local import local_performance
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.printing import folded
from loka_jax.nn import Site
from loka_jax.recipe import ROLES
from loka_jax.site import BF16
from loka_jax.terminal import printable

_PASS = "training"
_HEADS = ("FLOPs", "site", "m x k x n", "what runs", "us", "best", "why")


class Cost(NamedTuple):
    """The microseconds of a site in a training step, and those of its fastest choice.

    Attributes:
        best: name of that choice, whatever its errors.
    """

    us: float
    best_us: float
    best: str


def cost(site: Site, performance: PerformanceModel) -> Cost | None:
    """Returns what a site costs, measured or predicted; None if that is unknown."""
    times = dict(performance.estimates(site.spec).entry.times.get(_PASS, {}))
    if site.left is not None or site.batch is not None:
        return None
    choice = site.plan.choice
    if site.group is not None and performance.roofline is not None and site.in_group:
        for recipe in (BF16.recipe, choice.recipe):
            us = dense_us(site.spec, recipe, _PASS, performance.roofline)
            times[f"group {recipe.name}"] = us
    if choice.name not in times:
        return None
    best = min(times, key=times.__getitem__)
    return Cost(times[choice.name], times[best], best)


def site_table(
    sites: Sequence[Site], performance: PerformanceModel | None = None
) -> str:
    """Returns a table: a line for each site, or for all that are alike in their layers.

    It says what share of the forward pass's FLOPs they are, what runs, what that costs
    in a training step and what the fastest choice would, in microseconds; and, by
    numbers that are explained below the table, what kept a site from FP8, from its
    group, and what follows from being part of it.

    Args:
        performance: times of this device; what is known of it if None. Without a GPU
            with FP8 there are none.
    """
    performance = performance or local_performance().performance
    reasons: dict[str, int] = {}
    keyed = (
        (x.path, (x.plan, x.batch, _why(x), x.in_group, x.count), x) for x in sites
    )
    rows = [_row(path, alike, performance, reasons) for path, _, alike in folded(keyed)]
    widths = [max(map(len, column)) for column in zip(_HEADS, *rows, strict=True)]
    lines = [_line(row, widths) for row in (_HEADS, ["-" * x for x in widths], *rows)]
    in_fp8 = sum(site.is_fp8 for site in sites)
    in_group = sum(site.in_group for site in sites)
    lines.append(
        f"{len(sites)} products: {in_fp8} in FP8, {in_group} in groups. "
        f"Shares of forward FLOPs: {sum(x.share for x in sites):.0%}."
    )
    lines += [f"{number}: {printable(reason)}." for reason, number in reasons.items()]
    return "\n".join(lines)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
    return "  ".join(cells).rstrip()


def _row(
    path: str,
    alike: list[Site],
    performance: PerformanceModel | None,
    reasons: dict[str, int],
) -> list[str]:
    site, spec = alike[0], alike[0].spec
    times = (site.batch or 1) * site.count
    sizes = f"{spec.m} x {spec.k} x {spec.n}" + (f", {times} times" * (times > 1))
    known = None if performance is None else cost(site, performance)
    us = best = ""
    if known is not None:
        us = f"{known.us:,.0f}"
        best = f"{known.best_us:,.0f}: {known.best}" if known.us > known.best_us else ""
    share = f"{sum(x.share for x in alike):.1%}"
    why = [str(reasons.setdefault(x, len(reasons) + 1)) for x in _why(site)]
    return [share, printable(path), sizes, _runs(site), us, best, ", ".join(why)]


def _runs(site: Site) -> str:
    texts: dict[str, list[str]] = {}
    for role in ROLES:
        texts.setdefault(site.runs[role], []).append(role)
    if len(texts) == 1:
        return next(iter(texts))
    return "; ".join(f"{', '.join(roles)}: {text}" for text, roles in texts.items())


def _why(site: Site) -> tuple[str, ...]:
    """Returns what kept a site from FP8, from its group, and what from the site."""
    reasons = [site.why_not]
    if site.left is None and site.not_joined not in (None, site.why_not):
        where = "in no group" if site.group is None else "not in its group"
        reasons.append(f"{where}, as {site.not_joined}")
    if site.left is None and site.why_not_fused is not None:
        reasons.append(f"a product alone, as {site.why_not_fused}")
    return tuple(filter(None, reasons))
