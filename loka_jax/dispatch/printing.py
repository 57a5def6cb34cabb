"""Console output on the sites of a model and its plan: tables of 100 columns at most.

Identical layers are one row, see `folded`.

Texts come from files, compilers and paths too. So none is read as markup of Rich, and
control characters are shown as escapes.
"""

import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.dispatch.policy import Decision
from loka_jax.nn import Site
from loka_jax.recipe import ROLES
from loka_jax.terminal import printable

_MOST_COLUMNS = 100  # of a table
_LEAST_WIDTH = 10  # of a column that may be wrapped
_LONGEST_LINE = 30  # of a path
_MOST_NUMBERS = 4  # of layers, named one by one
_NUMBER = re.compile(r"(\d+)")


def plain(text: str) -> Text:
    """Returns a text that a console prints as it is, on one line."""
    return Text(printable(text))


def print_table(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Iterable[tuple[Sequence[str | Text], bool]],
    *,
    wrapped: Collection[str],
    numbers: Collection[str] = (),
):
    """Prints a table of rows, each with whether it is dim."""
    heads = (
        Column(
            name,
            no_wrap=name not in wrapped,
            min_width=_LEAST_WIDTH if name in wrapped else None,
            overflow="fold",
            justify="right" if name in numbers else "left",
        )
        for name in columns
    )
    how: Any = dict(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table = Table(*heads, title=plain(title), **how)
    for cells, is_dim in rows:
        texts = (x if isinstance(x, Text) else plain(x) for x in cells)
        table.add_row(*texts, style="dim" if is_dim else None)
    console.print(table, width=min(console.width, _MOST_COLUMNS))


def print_sites(console: Console, sites: tuple[Site, ...]):
    """Prints a table of the sites: shape, kernel of each role, reason against FP8."""
    # A name may hold a recipe for each role; the table says where bfloat16 runs.
    names = (part for s in sites if s.is_fp8 for part in s.recipe.split("/"))
    recipes = dict.fromkeys(name for name in names if name != "bf16")
    title = f"Sites, recipe {', '.join(recipes)}" if recipes else "Sites"
    heads = ("site", "m x k x n", "role", "what runs", "why not FP8")
    found = ((site.path, _site_cells(site), site) for site in sites)
    rows = (
        ((_lines(path), *(Text(x) for x in cells)), not alike[0].is_fp8)
        for path, cells, alike in folded(found)
    )
    print_table(console, title, heads, rows, wrapped=("what runs", "why not FP8"))
    in_fp8 = sum(site.is_fp8 for site in sites)
    console.print(f"{in_fp8} of {len(sites)} sites in FP8.")
    unfused = ((s.path, s.why_not_fused, s) for s in sites if s.why_not_fused)
    reasons: dict[str, list[str]] = {}
    for path, reason, _ in folded(unfused):
        reasons.setdefault(reason, []).append(path)
    for reason, paths in reasons.items():
        console.print(plain(f"No fused kernel at {', '.join(paths)}: {reason}."))


def _site_cells(site: Site) -> tuple[str, ...]:
    """Returns the cells of a site, with a line for each kernel that runs there."""
    roles_of: dict[str, list[str]] = {}
    for role in ROLES:
        roles_of.setdefault(site.runs[role], []).append(role)
    roles = [", ".join(x) for x in roles_of.values()] if len(roles_of) > 1 else ["all"]
    sizes = f"{site.spec.m} x {site.spec.k} x {site.spec.n}"
    by_kernel = ("\n".join(map(printable, lines)) for lines in (roles, roles_of))
    return printable(sizes), *by_kernel, printable(site.why_not or "")


def print_plan(
    console: Console, plan: DispatchPlan, notes: Iterable[str], sites: Sequence[Site]
):
    """Prints the choice for each site with its reason; nothing without decisions."""
    for note in notes:
        console.print(plain(note))
    if not plan.decisions:
        return
    heads = ("site", "choice", "speed", "error", "why", "runner-up")
    sizes = {site.path: site.spec for site in sites}
    found = (
        (path, (x.choice.name, _speed(x), x.reason, str(sizes.get(path))), x)
        for path, x in plan.decisions
    )
    rows = []
    for path, (choice, speed, reason, _), alike in folded(found):
        why = reason, alike[0].runner_up or ""
        cells = _lines(path), choice, speed, _errors(alike), *why
        rows.append((cells, not alike[0].choice.is_fp8))
    wrapped = ("choice", "why", "runner-up")
    print_table(console, "Dispatch", heads, rows, wrapped=wrapped)
    console.print(
        "Speed: of the whole site, relative to XLA's bfloat16; measured, or predicted "
        "where its uncertainty is given; of an attention forward, relative to its "
        "kernels' bfloat16. Error: relative L2 of the worst FP8 product."
    )


def _lines(path: str) -> Text:
    """Returns a path on lines that leave room for other columns."""
    lines = [""]
    for part in re.split(r"(?<=/)", printable(path)):
        if lines[-1] and len(lines[-1]) + len(part) > _LONGEST_LINE:
            lines.append("")
        lines[-1] += part
    return Text("\n".join(lines))


def _speed(decision: Decision) -> str:
    """Returns a speedup, with its uncertainty if it is predicted."""
    if decision.speedup is None:
        return ""
    doubt = "" if decision.spread is None else f" +-{decision.spread:.0%}"
    return f"{decision.speedup:.2f}x{doubt}"


def _errors(alike: Sequence[Decision]) -> str:
    """Returns the errors of some layers, from the least to the largest."""
    errors = [x.error for x in alike if x.error is not None]
    if not errors:
        return ""
    return "-".join(dict.fromkeys(f"{x:.3f}" for x in (min(errors), max(errors))))


def folded[Key: Hashable, Value](
    rows: Iterable[tuple[str, Key, Value]],
) -> Iterator[tuple[str, Key, list[Value]]]:
    """Yields one row for all whose paths differ by numbers alone, with equal keys.

    Rows have a path, a key and a value. The path of several names them all, as
    `fmb_{0..7}/dense_0 (8)`; its values are theirs.
    """
    alike: dict[Hashable, list[tuple[str, Key, Value]]] = {}
    for row in rows:
        alike.setdefault((_NUMBER.sub("#", row[0]), row[1]), []).append(row)
    for group in alike.values():
        paths, keys, values = zip(*group, strict=True)
        yield _name(paths), keys[0], list(values)


def _name(paths: Sequence[str]) -> str:
    """Returns a name of some paths that differ by numbers alone."""
    if len(paths) == 1:
        return paths[0]
    parts = zip(*map(_NUMBER.split, paths), strict=True)
    return f"{''.join(map(_numbers, parts))} ({len(paths)})"


def _numbers(values: Sequence[str]) -> str:
    several = list(dict.fromkeys(values))
    if len(several) == 1:
        return several[0]
    is_range = several == [str(int(several[0]) + i) for i in range(len(several))]
    if is_range or len(several) > _MOST_NUMBERS:
        return f"{{{several[0]}..{several[-1]}}}"
    return f"{{{','.join(several)}}}"
