"""The part of a run's page on its days: each scored before it was trained on."""

from typing import Any

from loka_jax.jsonfile import as_dict
from loka_jax.report import charts
from loka_jax.report.render import real


def days_view(days: object) -> dict[str, Any] | None:
    """Returns what the page shows of the summary's `days`; None if there are none."""
    rows = [as_dict(day) for day in days] if isinstance(days, list) else []
    if not rows:
        return None
    nes = [real(row.get("ne")) for row in rows]
    title, label = "Normalized entropy by day", "before training on the day"
    return {
        "rows": rows,
        "figures": charts.sequence(title, label, nes, "day")
        if charts.can_draw()
        else [],
    }
