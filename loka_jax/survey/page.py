"""probe.html: one page, without a request to anywhere, on what sites can bear."""

from pathlib import Path
from typing import Any

from loka_jax import jsonfile
from loka_jax.site import BF16
from loka_jax.survey.page_tables import (
    candidates_section,
    distributions_section,
    loss_section,
    overview_section,
)
from loka_jax.train import record, report_plots
from loka_jax.train.report_html import (
    Html,
    definitions,
    details,
    join,
    number,
    page,
    section,
    tag,
    tile,
)
from loka_jax.train.report_plots import Cloud
from loka_jax.train.report_tables import flat

PAGE = "probe.html"


def write_page(workdir: Path, found: dict[str, Any]) -> Path:
    """Writes probe.html into the workdir of a run and returns its path.

    Args:
        workdir: of the run; its amaxes over time are drawn too.
        found: what `survey` returned.
    """
    amaxes = jsonfile.read_lines(workdir / record.AMAXES)
    title = f"{found['model']}: where FP8 is safe and fast"
    body = (
        _header(found, title),
        _tiles(found),
        overview_section(found),
        loss_section(found["sensitivity"], found["survey"]["loss_recipe"]),
        _prediction_section(found),
        candidates_section(found["sites"]),
        distributions_section(found["sites"], amaxes),
        _reproduce(found),
        tag("footer", f"loka_jax survey of {workdir.resolve().name}"),
    )
    path = workdir / PAGE
    jsonfile.write_text(path, page(f"{title} – loka_jax", *body))
    return path


def _header(found: dict[str, Any], title: str) -> Html:
    options = found["survey"]
    facts = (
        f"on {found['versions']['device_kind']}",
        f"{number(found['steps'])} steps",
        f"{number(options['pairs'])} draws of {number(options['rows'])} rows",
        f"{number(options['captured_batches'])} batches of real operands",
    )
    warnings = found["warnings"]
    alert = ""
    if warnings:
        listed = tag("ul", *(tag("li", warning) for warning in warnings))
        head = f"Too few statistics to trust at {len(warnings)} places"
        alert = tag("div", details(head, listed), class_="alert")
    return tag(
        "header",
        tag("p", "loka_jax site survey", class_="eyebrow"),
        tag("h1", title),
        tag("ul", *(tag("li", fact) for fact in facts), class_="facts"),
        alert,
    )


def _tiles(found: dict[str, Any]) -> Html:
    sites = found["sites"]
    roles = [role for site in sites for role in site["roles"].values()]
    safe = sum(any(one.get("is_safe") for one in role.values()) for role in roles)
    fast = sum(
        any(one.get("is_safe") and one.get("is_fast") for one in role.values())
        for role in roles
    )
    is_timed = any(role[BF16.name]["us"] is not None for role in roles)
    tiles = [
        tile(
            "Sites", number(len(sites)), f"{len(found['not_surveyed'])} others not FP8"
        ),
        tile("Roles safe in FP8", f"{safe} of {len(roles)}", "by some candidate"),
        tile(
            "Safe and fast",
            f"{fast} of {len(roles)}" if is_timed else "n/a",
            "by some candidate" if is_timed else "no GPU to time them on",
        ),
    ]
    for source, label in (("learned", "Learned draws"), ("normal", "N(0, 1) draws")):
        if known := found["prediction"].get(source):
            tiles.append(
                tile(
                    label,
                    number(known["rank_correlation"], 3),
                    "rank correlation with errors on real operands",
                )
            )
    if found["sensitivity"]:
        path, effect = next(iter(found["sensitivity"].items()))
        moved = f"{100 * effect['moved'] / effect['loss']:.2f} %"
        tiles.append(tile("Most moved by", moved, f"of an example's loss, by {path}"))
    return tag("div", *tiles, class_="tiles")


def _prediction_section(found: dict[str, Any]) -> Html:
    known = found["prediction"]
    title = "Predicted and real errors"
    if not known:
        return section(title, tag("p", "No real operands were captured."))
    names = {"learned": "drawn from what was learned", "normal": "drawn from N(0, 1)"}
    lines = []
    for source, words in names.items():
        one = known[source]
        wrong = one["wrong_verdicts"]
        lines.append(
            tag(
                "p",
                f"Operands {words}: rank correlation "
                f"{number(one['rank_correlation'], 3)} with the error on real ones, "
                f"off by {100 * one['mean_deviation']:.1f} % in the mean; the verdict "
                f"would have been wrong at {len(wrong)} of {one['count']} candidates",
                f" ({', '.join(wrong)})." if wrong else ".",
            )
        )
    chart = ""
    if report_plots.can_draw():
        clouds = [
            Cloud(label="learned", points=_points(found, "learned"), color="accent"),
            Cloud(label="N(0, 1)", points=_points(found, "normal"), color="second"),
        ]
        chart = report_plots.scatter(
            "Relative L2 error", clouds, "on real operands", "predicted"
        )
        chart = tag("div", chart, class_="charts")
    lead = "Each point is a candidate at one role of one site."
    return section(title, chart, *lines, lead=lead)


def _points(found: dict[str, Any], source: str) -> list[tuple[float, float]]:
    points = []
    for site in found["sites"]:
        for role in site["roles"].values():
            for name, one in role.items():
                if name != BF16.name:
                    errors = one["errors"]
                    real = errors["real"]["relative_l2"]["mean"]
                    points.append((real, errors[source]["relative_l2"]["mean"]))
    return points


def _reproduce(found: dict[str, Any]) -> Html:
    parts = [
        details(name, definitions(flat(found[key])))
        for name, key in (
            ("Survey", "survey"),
            ("Config", "config"),
            ("Versions", "versions"),
        )
    ]
    command = found.get("command")
    shown = tag("pre", tag("code", command)) if command else ""
    return section("Reproduce", shown, join(parts))
