"""HTML that cannot be left unescaped, and the few forms that the report is made of.

Every function takes plain values or `Html`; only `Html` goes in as it is, and the
functions here are what makes it. No script, no font, no image from elsewhere.
"""

import html
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_VOID = {"meta", "br"}


class Html(str):
    """Text that is HTML already."""


def escape(value: object) -> Html:
    """Returns any value as HTML; None as a dash."""
    if isinstance(value, Html):
        return value
    return Html(html.escape("–" if value is None else str(value), quote=True))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """Returns `<name attributes>children</name>`; `class_` stands for class."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def join(children: Iterable[object]) -> Html:
    """Returns the children, escaped, one after the other."""
    return Html("".join(escape(child) for child in children))


def page(title: str, *body: object) -> str:
    """Returns the whole document, its style sheet included."""
    style = Html(Path(__file__).with_name("report.css").read_text(encoding="utf-8"))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", style),
    )
    content = tag("body", tag("main", *body))
    return f"<!doctype html>\n{tag('html', head, content, lang='en')}\n"


def section(title: str, *body: object, lead: object = None) -> Html:
    """Returns a section with a heading and, below it, a sentence of explanation."""
    intro = tag("p", lead, class_="lead") if lead else ""
    return tag("section", tag("h2", title), intro, *body)


def tile(
    label: str, value: object, note: object = "", *, share: float | None = None
) -> Html:
    """Returns a headline number; `share` (0 to 1) adds a bar."""
    bar = ""
    if share is not None and math.isfinite(share):
        width = f"width:{100 * min(max(share, 0), 1):.1f}%"
        bar = tag("span", tag("span", style=width), class_="bar")
    return tag(
        "div",
        tag("span", label, class_="label"),
        tag("strong", value),
        bar,
        tag("span", note, class_="note"),
        class_="tile",
    )


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, numeric: str = ""
) -> Html:
    """Returns a table that scrolls sideways where the page is narrow.

    Args:
        columns: the heads.
        rows: the cells.
        numeric: a character per column, "n" for one of numbers, set to the right.
    """
    kinds = ["num" if kind == "n" else None for kind in numeric.ljust(len(columns))]
    head = [
        tag("th", column, class_=kind, scope="col")
        for column, kind in zip(columns, kinds, strict=True)
    ]
    body = [
        tag("tr", *(tag("td", c, class_=k) for c, k in zip(row, kinds, strict=True)))
        for row in rows
    ]
    whole = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body))
    return tag("div", whole, class_="scroll", tabindex="0")


def definitions(pairs: Iterable[tuple[object, object]]) -> Html:
    """Returns names and their values in two columns."""
    rows = [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs]
    return tag("dl", *rows)


def details(summary: str, *body: object, is_open: bool = False) -> Html:
    """Returns a part that opens when asked for."""
    opened = "" if is_open else None
    return tag("details", tag("summary", summary), *body, open=opened)


def number(value: Any, digits: int = 0) -> str:
    """Returns a number with `digits` decimals; "n/a" for None, NaN and other things."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "n/a"
    return f"{value:,.{digits}f}" if math.isfinite(value) else "n/a"


def compact(value: Any) -> str:
    """Returns a large number in few characters, 12.4 M for 12,398,321."""
    if number(value) == "n/a" or abs(value) < 1e6:
        return number(value)
    return number(value / 1e6, 2 if abs(value) < 1e7 else 1) + " M"


def power_of_two(value: float) -> Html:
    """Returns a positive number as 2 to the power of its logarithm."""
    exponent = math.log2(value)
    text = f"{exponent:.0f}" if exponent == round(exponent) else f"{exponent:.1f}"
    return Html(f"2<sup>{text.replace('-', '−')}</sup>")


def sparkline(values: Sequence[float | None], *, title: str) -> Html:
    """Returns a small curve of log2 of the values; others than positive are gaps.

    It spans at least four octaves, so that a scale that stays looks like one.
    """
    width, height, margin = 132.0, 30.0, 3.0
    logs = [_log2(value) for value in values]
    known = [log for log in logs if log is not None]
    if not known:
        return tag("span", "no value", class_="muted")
    middle, span = (max(known) + min(known)) / 2, max(max(known) - min(known), 4.0)
    step = (width - 2 * margin) / max(len(logs) - 1, 1)
    runs: list[list[str]] = [[]]
    for i, log in enumerate(logs):
        if log is None:
            runs.append([])
            continue
        y = height / 2 - (log - middle) / span * (height - 2 * margin)
        runs[-1].append(f"{margin + i * step:.1f},{y:.1f}")
    lines = [tag("polyline", points=" ".join(run)) for run in runs if len(run) > 1]
    last = next(run[-1] for run in reversed(runs) if run).split(",")
    dot = tag("circle", cx=last[0], cy=last[1], r="2.2")
    return tag(
        "svg",
        tag("title", title),
        *lines,
        dot,
        class_="spark",
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        role="img",
    )


def _log2(value: float | None) -> float | None:
    return math.log2(value) if value is not None and 0 < value < math.inf else None
