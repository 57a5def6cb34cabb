"""The page of a run's quality on labelled rows."""

from pathlib import Path
from typing import Any

from loka_jax.report.render import write_page


def write_evaluation_page(path: Path, numbers: dict[str, Any], **view: Any) -> Path:
    """Writes the page to `path` and returns the path.

    Args:
        numbers: `overall`, `groups` and perhaps `importance`, as evaluate.py writes.
        **view: `title`, `command`, `step` of the weights, and the columns `by`.
    """
    several = len(numbers["overall"]) > 1
    rows = [
        (value, label if several else "", found)
        for value, tasks in {"": numbers["overall"], **numbers["groups"]}.items()
        for label, found in tasks.items()
    ]
    view |= {"rows": rows, "importance": numbers.get("importance", [])}
    k = rows[0][2].get("k")
    return write_page(path, "evaluation.html", settings={}, k=k, **view)
