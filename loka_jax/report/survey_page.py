"""The page of a survey: where in a model FP8 is safe, and where it is fast."""

from pathlib import Path
from typing import Any

from loka_jax.recipe import OPERANDS, ROLES
from loka_jax.report import charts
from loka_jax.report.charts import Figure, Series
from loka_jax.report.render import flat, real, write_page

_DRAWS = {"learned": "Learned draws", "normal": "N(0, 1) draws"}


def write_survey_page(
    path: Path, survey: dict[str, Any], amaxes: list[dict[str, Any]]
) -> Path:
    """Writes the page of a survey to `path` and returns the path.

    Args:
        amaxes: a line of amaxes, keyed "<site>/<operand>", per logged step.
    """
    by_role = [role for site in survey["sites"] for role in site["roles"].values()]
    roles = [role.values() for role in by_role]
    settings = {name: flat(survey[name.lower()]) for name in ("Survey", "Config")}
    return write_page(
        path,
        "survey.html",
        title=f"{survey['model']}: where FP8 is safe and fast",
        effects=survey["sensitivity"],
        roles_of_sites=len(roles),
        safe=sum(any(map(_is_safe, role)) for role in roles),
        fast=sum(any(_is_safe(c) and c["is_fast"] for c in role) for role in roles),
        is_timed=any(c["us"] is not None for role in roles for c in role),
        survey=survey,
        sites=[_site(site, survey["sensitivity"], amaxes) for site in survey["sites"]],
        roles=ROLES,
        draws=_DRAWS,
        figures=_figures(survey["sites"]),
        command=survey.get("command"),
        settings=settings | {"Versions": flat(survey["versions"])},
    )


def _site(
    site: dict[str, Any], sensitivity: dict[str, Any], amaxes: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns a site with its best candidates, effect and amaxes over time."""
    path, effect = site["path"], sensitivity.get(site["path"])
    fwd, times = site["roles"]["fwd"], site["training_us"]
    base = (times[k] for k, c in fwd.items() if k in times and not _is_fp8(c))
    return site | {
        "best": [_best(site["roles"][role]) for role in ROLES],
        "moved": None if effect is None else effect["moved"] / effect["loss"],
        "base_us": next(base, None),
        "amaxes": {
            o: [real(line.get(f"{path}/{o}")) for line in amaxes] for o in OPERANDS
        },
    }


def _best(candidates: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the fastest safe candidate; without times, that of least error.

    If none is safe, that of least error; None if there is none in FP8.
    """
    fp8 = [c | {"name": name} for name, c in candidates.items() if _is_fp8(c)]
    safe = [candidate for candidate in fp8 if candidate["is_safe"]]
    timed = [candidate for candidate in safe if candidate["us"] is not None]
    if timed:
        return min(timed, key=lambda candidate: candidate["us"])
    return min(safe or fp8, key=lambda c: _error(c, "learned"), default=None)


def _is_fp8(candidate: dict[str, Any]) -> bool:
    """Returns whether a candidate was judged; bfloat16, the reference, is not."""
    return "is_safe" in candidate


def _is_safe(candidate: dict[str, Any]) -> bool:
    return candidate.get("is_safe", False)


def _error(candidate: dict[str, Any], source: str) -> float:
    return candidate["errors"][source]["relative_l2"]["mean"]


def _figures(sites: list[dict[str, Any]]) -> list[Figure]:
    """Returns a chart of predicted over real errors, if real operands were captured."""
    candidates = [
        candidate
        for site in sites
        for role in site["roles"].values()
        for candidate in role.values()
        if _is_fp8(candidate) and "real" in candidate["errors"]
    ]
    real = [_error(candidate, "real") for candidate in candidates]
    series = []
    for source, color in (("learned", "accent"), ("normal", "second")):
        drawn = [_error(candidate, source) for candidate in candidates]
        points = list(zip(real, drawn, strict=True))
        series.append(Series(_DRAWS[source], points, color))
    return charts.scatter("Relative L2 error", series, "on real operands", "predicted")
