"""Console output of a run: tables, and sentences.

Texts come from files, compilers and paths too. So none is read as markup of Rich, and
control characters are shown as escapes.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.nn import Site
from loka_jax.recipe import ROLES
from loka_jax.terminal import printable

_MAX_COLUMNS = 40  # categorical columns in a table


def plain(text: str) -> Text:
    """Returns a text that a console prints as it is, on one line."""
    return Text(printable(text))


def show(value: float | None, digits: int = 4) -> str:
    """Returns a number, or "n/a" for None."""
    return "n/a" if value is None else f"{value:.{digits}f}"


def quality_text(values: Mapping[str, Any]) -> str:
    """Returns the numbers of an evaluation as a text."""
    return (
        f"AUC {show(values['auc'], 5)}  log loss {show(values['logloss'], 5)}  "
        f"NE {show(values['ne'], 5)}  calibration {show(values['calibration'])}"
    )


def quality_lines(what: str, values: Mapping[str, Any], after: str = "") -> list[str]:
    """Returns an evaluation as a line, with one for each of several tasks."""
    tasks = values.get("tasks", {})
    mean = f", mean of {len(tasks)} tasks" if tasks else ""
    return [
        f"{what}{mean}: {quality_text(values)}{after}",
        *(f"  {name}: {quality_text(part)}" for name, part in tasks.items()),
    ]


def _print_table(
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
            justify="right" if name in numbers else "left",
        )
        for name in columns
    )
    how: Any = dict(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table = Table(*heads, title=plain(title), **how)
    for cells, is_dim in rows:
        texts = (x if isinstance(x, Text) else plain(x) for x in cells)
        table.add_row(*texts, style="dim" if is_dim else None)
    console.print(table)


def print_data(console: Console, report: dict):
    """Prints the sizes and origin of the splits, and the values that were corrected."""
    sizes = (f"{count:,} {split}" for split, count in report["examples"].items())
    console.print(plain(f"Examples: {', '.join(sizes)}; {report['split_rule']}."))
    for note in report.get("notes", ()):
        console.print(plain(note))
    counts = [
        f"{count:,} {kind}{_where(report, kind)}"
        for kind, count in report.get("totals", {}).items()
        if count
    ]
    if bad_rows := report.get("bad_rows", {}).get("count", 0):
        counts.append(f"{bad_rows:,} bad rows")
    if counts:
        mended = f"Irregular values, handled as configured: {'; '.join(counts)}."
        console.print(plain(mended))


def _where(report: dict, kind: str, limit: int = 5) -> str:
    """Returns the columns with most values of a kind, as " in price 7, age 2"."""
    found: Counter[str] = Counter()
    for split in report.get("splits", {}).values():
        for column, counts in split.get("columns", {}).items():
            found[column] += counts.get(kind, 0)
    columns = [f"{name} {count:,}" for name, count in (+found).most_common()]
    more = f" and {len(columns) - limit} more" if len(columns) > limit else ""
    return f" in {', '.join(columns[:limit])}{more}" if columns else ""


def print_columns(console: Console, report: dict[str, Any], dims: Mapping[str, int]):
    """Prints each column's vocabulary, parameters and most frequent values.

    Args:
        report: of the data, with `loka_jax.data.learn` under "categorical";
            nothing is printed without them.
    """
    columns = report.get("categorical", {})
    if not columns:
        return
    heads = ("column", "values", "table rows", "parameters", "most frequent values")
    shown = list(columns.items())[:_MAX_COLUMNS]
    rows = ((_column_cells(name, x, dims[name]), False) for name, x in shown)
    _print_table(
        console, "Columns", heads, rows, wrapped=heads[-1:], numbers=heads[1:4]
    )
    own = {k: v["rows"] for k, v in columns.items() if "table_of" not in v}
    total, count = sum(own.values()), sum(own[name] * dims[name] for name in own)
    (dim, *others) = {dims[name] for name in own}
    by_dim = "" if others else f" x {dim}"
    more = len(columns) - _MAX_COLUMNS
    hidden = f" ({more:,} columns are not shown)" if more > 0 else ""
    console.print(f"{total:,} rows{by_dim} = {count:,} parameters in tables{hidden}.")
    for name, facts in columns.items():
        if facts.get("new_values") is not None:
            console.print(plain(_growth(name, facts)))
        if facts.get("warning"):
            console.print(plain(f"Warning: {facts['warning']}"))


def _column_cells(name: str, facts: dict[str, Any], dim: int) -> Sequence[str]:
    values, rows = facts.get("values"), facts["rows"]
    return (
        name,
        "hashed" if values is None else f"{values:,}",
        f"{rows:,}",
        "shared" if "table_of" in facts else f"{rows * dim:,}",
        ", ".join(f"{value} ({count:,})" for value, count in facts["most_frequent"]),
    )


def _growth(name: str, facts: dict[str, Any]) -> str:
    new, rows = facts["new_values"], facts["new_rows"]
    if not new:
        return f"{name}: no new values; {facts['reserved']:,} reserved rows are left."
    return (
        f"{name}: {new:,} new values, {rows:,} of them in reserved rows, of which "
        f"{facts['reserved']:,} are left; {new - rows:,} share id 0."
    )


def print_sites(console: Console, sites: tuple[Site, ...]):
    """Prints a table of the sites: shape, kernel of each role, reason against FP8."""
    # A name may hold a recipe for each role; the table says where bfloat16 runs.
    names = (part for s in sites if s.is_fp8 for part in s.recipe.split("/"))
    recipes = dict.fromkeys(name for name in names if name != "bf16")
    title = f"Sites, recipe {', '.join(recipes)}" if recipes else "Sites"
    heads = ("site", "m x k x n", "role", "what runs", "why not FP8")
    rows = ((_site_cells(site), not site.is_fp8) for site in sites)
    _print_table(console, title, heads, rows, wrapped=("why not FP8",))
    in_fp8 = sum(site.is_fp8 for site in sites)
    console.print(f"{in_fp8} of {len(sites)} sites in FP8.")
    unfused: dict[str, list[str]] = {}
    for site in sites:
        if site.why_not_fused is not None:
            unfused.setdefault(site.why_not_fused, []).append(site.path)
    for reason, paths in unfused.items():
        console.print(plain(f"No fused kernel at {', '.join(paths)}: {reason}."))


def _site_cells(site: Site) -> Sequence[str | Text]:
    """Returns the cells of a site, with a line for each kernel that runs there."""
    roles_of: dict[str, list[str]] = {}
    for role in ROLES:
        roles_of.setdefault(site.runs[role], []).append(role)
    roles = [", ".join(x) for x in roles_of.values()] if len(roles_of) > 1 else ["all"]
    sizes = f"{site.spec.m} x {site.spec.k} x {site.spec.n}"
    by_kernel = (Text("\n").join(map(plain, lines)) for lines in (roles, roles_of))
    return site.path, sizes, *by_kernel, site.why_not or ""


def print_plan(console: Console, plan: DispatchPlan, notes: tuple[str, ...]):
    """Prints the choice for each site with its reason; nothing without decisions."""
    for note in notes:
        console.print(plain(note))
    if not plan.decisions:
        return
    heads = ("site", "choice", "speed", "error", "why", "runner-up")
    rows = []
    for path, decision in plan.decisions:
        speed, error, spread = decision.speedup, decision.error, decision.spread
        # A speed has an uncertainty if it is predicted.
        doubt = "" if spread is None else f" +-{spread:.0%}"
        cells = (
            path,
            decision.choice.name,
            "" if speed is None else f"{speed:.2f}x{doubt}",
            "" if error is None else f"{error:.3f}",
            decision.reason,
            decision.runner_up or "",
        )
        rows.append((cells, not decision.choice.is_fp8))
    wrapped = ("choice", "why", "runner-up")
    _print_table(console, "Dispatch", heads, rows, wrapped=wrapped)
    console.print(
        "Speed: of the whole site, relative to XLA's bfloat16; measured, or predicted "
        "where its uncertainty is given (--plan tune measures). Error: relative L2 of "
        "the worst FP8 product."
    )
