"""The parts of a run's page on evaluations: calibration, values of columns, days."""

from typing import Any

from loka_jax.jsonfile import as_dict
from loka_jax.report import charts
from loka_jax.report.charts import Interval
from loka_jax.report.render import dicts, real

_MAX_COLUMNS = 100


def breakdown_views(evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns what the page shows of evaluation.json, for each label that has some."""
    split = str(evaluation.get("split") or "evaluation")
    tasks = as_dict(evaluation.get("tasks"))
    views = [_view(as_dict(part), f"{split}, {name}") for name, part in tasks.items()]
    return [view for view in (_view(evaluation, split), *views) if view is not None]


def days_view(days: object) -> dict[str, Any] | None:
    """Returns what the page shows of the summary's `days`, each scored before training.

    None if there are none.
    """
    rows = dicts(days)
    if not rows:
        return None
    nes = [real(row.get("ne")) for row in rows]
    title, label = "Normalized entropy by day", "before training on the day"
    figures = charts.sequence(title, label, nes, "day") if charts.can_draw() else []
    return {"rows": rows, "figures": figures}


def _view(evaluation: dict[str, Any], caption: str) -> dict[str, Any] | None:
    columns = [
        column | {"values": dicts(column.get("values"))}
        for column in dicts(evaluation.get("columns"))
    ]
    bins = dicts(evaluation.get("calibration_curve"))
    if not columns and not bins:
        return None
    return {
        "what": caption,
        "examples": evaluation.get("examples"),
        "figures": _calibration(bins, caption) if charts.can_draw() else [],
        "bins": bins,
        "columns": columns[:_MAX_COLUMNS],
        "hidden": max(len(columns) - _MAX_COLUMNS, 0),
    }


def _calibration(bins: list[dict[str, Any]], caption: str) -> list[charts.Figure]:
    names = ("mean_prediction", "mean_label", "mean_label_low", "mean_label_high")
    rows = [[real(part.get(name)) for name in names] for part in bins]
    points = [
        Interval(*(value for value in values if value is not None))
        for values in rows
        if None not in values
    ]
    title = "Calibration by prediction"
    return charts.intervals(title, caption, points, "mean prediction", "mean label")
