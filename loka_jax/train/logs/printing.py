"""Console output of a run on its data, plan and quality: tables, and sentences."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from loka_jax.dispatch.printing import plain, print_plan, print_sites, print_table
from loka_jax.terminal import KIND_WORDS
from loka_jax.train.build import Run
from loka_jax.train.mesh.devices import used_devices

_MAX_COLUMNS = 40  # categorical columns in a table


def show(value: float | None, digits: int = 4) -> str:
    """Returns a number, or "n/a" for None."""
    return "n/a" if value is None else f"{value:.{digits}f}"


def quality_text(values: Mapping[str, Any]) -> str:
    """Returns the numbers of an evaluation as a text."""
    own = values.get("metrics") or {}
    return (
        f"AUC {show(values['auc'], 5)}  log loss {show(values['logloss'], 5)}  "
        f"NE {show(values['ne'], 5)}  calibration {show(values['calibration'])}"
    ) + "".join(f"  {name} {show(value, 5)}" for name, value in own.items())


def quality_lines(what: str, values: Mapping[str, Any], after: str = "") -> list[str]:
    """Returns an evaluation as a line, with one for each of several tasks."""
    tasks = values.get("tasks", {})
    mean = f", mean of {len(tasks)} tasks" if tasks else ""
    return [
        f"{what}{mean}: {quality_text(values)}{after}",
        *(f"  {name}: {quality_text(part)}" for name, part in tasks.items()),
    ]


def print_run(console: Console, run: Run):
    """Prints the data, columns, sites and plan of a run before its first step."""
    report, schema = run.splits.report, run.splits.train.schema
    print_data(console, report)
    dims = run.config.embedding.dims_of(schema.fields, schema.owners)
    print_columns(console, report, dims)
    if run.placement.size > 1:
        console.print(used_devices(*run.placement.shape))
    print_sites(console, run.running_sites)
    print_plan(console, run.plan, run.plan_notes, run.sites)
    if run.outlook:
        console.print(plain(run.outlook))


def print_data(console: Console, report: dict):
    """Prints the sizes and origin of the splits, and the values that were corrected."""
    sizes = (f"{count:,} {split}" for split, count in report["examples"].items())
    console.print(plain(f"Examples: {', '.join(sizes)}; {report['split_rule']}."))
    for note in report.get("notes", ()):
        console.print(plain(note))
    counts = [
        f"{count:,} {KIND_WORDS.get(kind, kind)}{_where(report, kind)}"
        for kind, count in report.get("totals", {}).items()
        if count
    ]
    if bad_rows := report.get("bad_rows", {}).get("count", 0):
        counts.append(f"{bad_rows:,} bad rows")
    if counts:
        mended = f"Irregular values, handled as configured: {'; '.join(counts)}."
        console.print(plain(mended))


def _where(report: dict, kind: str, limit: int = 5) -> str:
    """Returns the columns with most values of a kind, as " (price 7, age 2)"."""
    found: Counter[str] = Counter()
    for split in report.get("splits", {}).values():
        for column, counts in split.get("columns", {}).items():
            found[column] += counts.get(kind, 0)
    columns = [f"{name} {count:,}" for name, count in (+found).most_common()]
    more = f" and {len(columns) - limit} more" if len(columns) > limit else ""
    return f" ({', '.join(columns[:limit])}{more})" if columns else ""


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
    print_table(console, "Columns", heads, rows, wrapped=heads[-1:], numbers=heads[1:4])
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
