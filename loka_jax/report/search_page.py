"""The page of a search: speed over trials, what mattered, and how it was predicted."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loka_jax.report import charts
from loka_jax.report.charts import Figure, Series
from loka_jax.report.render import number, write_page

_ENDS = (-1.96, 1.96)  # of a 95 % interval


def write_search_page(
    path: Path,
    *,
    title: str,
    trials: Sequence[Mapping[str, Any]],
    factors: Mapping[str, Mapping[str, float]],
    points: int,
    command: str,
) -> Path:
    """Writes the page of a search to `path` and returns the path.

    Args:
        trials: in their order, of which one has a speed.
        factors: by axis and value, the mean speed over that of its fastest value.
        points: of the space.
    """
    speeds = [trial["speed"] for trial in trials]
    known = [speed for speed in speeds if speed is not None]
    best = next(trial for trial in trials if trial["speed"] == max(known))
    ended = [trial for trial in trials if trial["speed"] is None]
    tiles = [
        ("Most examples/s", number(max(known)), best["changes"]),
        ("Trials", f"{len(trials)}", f"of {points} configurations"),
        ("Without a speed", f"{len(ended)}", "out of memory, crashed, hung or killed"),
    ]
    return write_page(
        path,
        "search.html",
        title=title,
        command=command,
        settings={},
        tiles=tiles,
        trials=trials,
        best=best,
        factors=factors,
        figures=_figures(speeds, trials),
    )


def _figures(
    speeds: Sequence[float | None], trials: Sequence[Mapping[str, Any]]
) -> list[Figure]:
    best = [
        max(filter(None, speeds[: n + 1]), default=None) for n in range(len(speeds))
    ]
    series = [
        Series("best so far", _over_trials(best), "accent"),
        Series("trial", _over_trials(speeds), "second", has_dots=True),
    ]
    known = [x for x in trials if x["speed"] and x["expected"] and x["spread"]]
    expected = [
        (
            x["speed"],
            x["expected"],
            *(x["expected"] * math.exp(z * x["spread"]) for z in _ENDS),
        )
        for x in known
    ]
    clouds = [Series("expected by the trials before", expected, "accent")]
    return [
        *charts.curves("Examples/s", series, x="trials"),
        *charts.scatter("Measured and expected", clouds, "measured", "expected"),
    ]


def _over_trials(values: Sequence[float | None]) -> list[tuple[float | None, ...]]:
    return [(float(n), value) for n, value in enumerate(values, 1)]
