"""The parts of a run's page on its final evaluation: calibration, values of columns."""

from typing import Any

from loka_jax.jsonfile import as_dict
from loka_jax.report import charts
from loka_jax.report.charts import Interval
from loka_jax.report.render import real

_MAX_COLUMNS = 100


def breakdown_view(evaluation: dict[str, Any]) -> dict[str, Any] | None:
    """Returns what the page shows of evaluation.json; None if there is nothing."""
    columns = [
        column | {"values": _dicts(column.get("values"))}
        for column in _dicts(evaluation.get("columns"))
    ]
    bins = _dicts(evaluation.get("calibration_curve"))
    if not columns and not bins:
        return None
    split = str(evaluation.get("split") or "evaluation")
    return {
        "split": split,
        "examples": evaluation.get("examples"),
        "figures": _calibration(bins, split) if charts.can_draw() else [],
        "bins": bins,
        "columns": columns[:_MAX_COLUMNS],
        "hidden": max(len(columns) - _MAX_COLUMNS, 0),
    }


def _calibration(bins: list[dict[str, Any]], split: str) -> list[charts.Figure]:
    names = ("mean_prediction", "mean_label", "mean_label_low", "mean_label_high")
    found = [[real(part.get(name)) for name in names] for part in bins]
    points = [
        Interval(*(value for value in values if value is not None))
        for values in found
        if None not in values
    ]
    title = "Calibration by prediction"
    return charts.intervals(title, split, points, "mean prediction", "mean label")


def _dicts(value: object) -> list[dict[str, Any]]:
    return [as_dict(item) for item in value] if isinstance(value, list) else []
