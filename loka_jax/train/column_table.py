"""Prints the categorical columns: their tables and what is in them."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from loka_jax.train.progress import plain

_MAX_COLUMNS = 40


def print_columns(console: Console, report: dict[str, Any], dim: int):
    """Prints each column's vocabulary, parameters and most frequent values.

    Args:
        console: where to print.
        report: of the data, with `loka_jax.data.column_facts` under "categorical";
            nothing is printed without them.
        dim: the embedding dim.
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
            f"{rows * dim:,}",
            plain(", ".join(top)),
        )
    console.print(table)
    rows = sum(facts["rows"] for facts in columns.values())
    more = len(columns) - _MAX_COLUMNS
    hidden = f" ({more:,} columns are not shown)" if more > 0 else ""
    total = f"{rows:,} rows x {dim} = {rows * dim:,} parameters in tables{hidden}."
    console.print(total)
    for facts in columns.values():
        if facts.get("warning"):
            console.print(plain(f"Warning: {facts['warning']}"))
