"""Prints what is in the categorical columns, and the quality by day."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from loka_jax.train.logs.progress import plain

_MAX_COLUMNS = 40


def print_columns(console: Console, report: dict[str, Any], dims: Mapping[str, int]):
    """Prints each column's vocabulary, parameters and most frequent values.

    Args:
        report: of the data, with `loka_jax.data.learn` under "categorical";
            nothing is printed without them.
    """
    columns = report.get("categorical", {})
    if not columns:
        return
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title="Columns", title_justify="left"
    )
    table.add_column("column", no_wrap=True)
    for name in ("values", "table rows", "parameters"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("most frequent values")
    for name, facts in list(columns.items())[:_MAX_COLUMNS]:
        values, rows = facts.get("values"), facts["rows"]
        top = (f"{value} ({count:,})" for value, count in facts["most_frequent"])
        table.add_row(
            plain(name),
            "hashed" if values is None else f"{values:,}",
            f"{rows:,}",
            "shared" if "table_of" in facts else f"{rows * dims[name]:,}",
            plain(", ".join(top)),
        )
    console.print(table)
    own = {k: v["rows"] for k, v in columns.items() if "table_of" not in v}
    rows, count = sum(own.values()), sum(own[name] * dims[name] for name in own)
    (dim, *others) = {dims[name] for name in own}
    by_dim = "" if others else f" x {dim}"
    more = len(columns) - _MAX_COLUMNS
    hidden = f" ({more:,} columns are not shown)" if more > 0 else ""
    console.print(f"{rows:,} rows{by_dim} = {count:,} parameters in tables{hidden}.")
    for name, facts in columns.items():
        if facts.get("new_values") is not None:
            console.print(plain(_growth(name, facts)))
        if facts.get("warning"):
            console.print(plain(f"Warning: {facts['warning']}"))


def _growth(name: str, facts: dict[str, Any]) -> str:
    new, rows = facts["new_values"], facts["new_rows"]
    if not new:
        return f"{name}: no new values; {facts['reserved']:,} reserved rows are left."
    return (
        f"{name}: {new:,} new values, {rows:,} of them in reserved rows, of which "
        f"{facts['reserved']:,} are left; {new - rows:,} share id 0."
    )


def print_days(console: Console, days: tuple[dict[str, Any], ...]):
    """Prints the quality of each day, newest last, before it was trained on."""
    for day in days:
        values = (
            f"{name} {'n/a' if day[key] is None else format(day[key], '.5f')}"
            for name, key in (("AUC", "auc"), ("log loss", "logloss"), ("NE", "ne"))
        )
        console.print(
            plain(
                f"Before training on {day['data']} ({day['examples']:,} rows): "
                f"{'  '.join(values)}"
            )
        )
