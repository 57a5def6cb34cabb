"""The report's curves: matplotlib draws them, the page's style sheet colours them.

matplotlib writes each colour into its SVG; here it is given stand-ins, which become
the style sheet's variables, so that one drawing serves light and dark pages. Text
stays text, in the page's font. matplotlib is an optional extra, imported to draw.
"""

import contextlib
import importlib.util
import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from loka_jax.train.report_html import Html, tag

# Stand-ins that appear nowhere else in an SVG.
_COLORS = {
    name: f"#0102{i:02x}"
    for i, name in enumerate(
        ("ink", "muted", "line", "accent", "second", "good", "bad", "card"), start=3
    )
}
_SIZE_INCHES = (5.6, 3.1)  # 403 x 223 CSS pixels: text stays legible on a phone


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a chart.

    Attributes:
        label: its name in the key.
        points: (x, y) in order of x; a y that is None or not finite is left out.
        color: "accent" (thin, many points) or "second" (thick, few, with dots).
    """

    label: str
    points: Sequence[tuple[float, float | None]]
    color: str

    def finite(self) -> list[tuple[float, float]]:
        """Returns the points that can be drawn."""
        return [(x, y) for x, y in self.points if y is not None and math.isfinite(y)]


@dataclass(frozen=True, kw_only=True)
class Cloud:
    """The points of a scatter plot that belong together.

    Attributes:
        label: its name in the key.
        points: (x, y), none negative.
        color: as in `Curve`.
    """

    label: str
    points: Sequence[tuple[float, float]]
    color: str


def can_draw() -> bool:
    """Returns whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def chart(
    title: str,
    curves: Sequence[Curve],
    *,
    floor: tuple[str, float] | None = None,
    marks: Sequence[float] = (),
    from_zero: bool = False,
) -> Html:
    """Returns a figure of curves over the number of examples seen, if there are any.

    Args:
        title: what y is.
        curves: those with points are drawn.
        floor: a label and a level, drawn dashed.
        marks: places on x, drawn as dotted lines: the skipped steps.
        from_zero: whether y begins at 0.
    """
    curves = [curve for curve in curves if curve.finite()]
    if not curves:
        return Html("")
    keys = [(curve.label, curve.color) for curve in curves]
    keys += [(floor[0], "good")] if floor else []
    keys += [("skipped step", "bad")] if marks else []
    caption = tag(
        "figcaption",
        tag("b", title),
        *(tag("span", text, class_=f"key key-{color}") for text, color in keys),
    )
    level = floor[1] if floor else None
    low, high = _limits(curves, level)
    limits = (0.0, high) if from_zero else (low, high)
    svg = _draw(title, curves, level, marks, limits)
    return tag("figure", caption, svg)


def scatter(title: str, clouds: Sequence[Cloud], x: str, y: str) -> Html:
    """Returns a figure of points, with the line where x and y are equal."""
    clouds = [cloud for cloud in clouds if cloud.points]
    if not clouds:
        return Html("")
    keys = [tag("span", c.label, class_=f"key key-{c.color}") for c in clouds]
    caption = tag("figcaption", tag("b", title), *keys)
    values = [value for cloud in clouds for point in cloud.points for value in point]
    ends = (0.0, 1.08 * max(values))
    from matplotlib.ticker import MaxNLocator

    with _axes(title, f"{title}, {x} and {y}") as (axes, made):
        axes.plot(ends, ends, color=_COLORS["muted"], lw=1, ls=(0, (4, 3)))
        for cloud in clouds:
            xs, ys = zip(*cloud.points, strict=True)
            axes.plot(xs, ys, "o", ms=4, alpha=0.7, color=_COLORS[cloud.color])
        axes.set(xlim=ends, ylim=ends)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlabel(x, color=_COLORS["muted"])
        axes.set_ylabel(y, color=_COLORS["muted"])
        axes.tick_params(length=0, pad=5, colors=_COLORS["muted"])
    return tag("figure", caption, *made)


@contextlib.contextmanager
def _axes(title: str, label: str) -> Iterator[tuple[Any, list[Html]]]:
    """Yields axes to draw on, and a list into which the drawing goes on leaving."""
    # Figure alone: pyplot would start a GUI backend and keep every figure alive.
    import matplotlib
    from matplotlib.figure import Figure

    made: list[Html] = []
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 11}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(_COLORS["line"])
        axes.grid(axis="y", color=_COLORS["line"], lw=0.8)
        yield axes, made
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    made.append(_inline(file.getvalue(), title, label))


def _draw(
    title: str,
    curves: Sequence[Curve],
    floor: float | None,
    marks: Sequence[float],
    limits: tuple[float, float],
) -> Html:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    with _axes(title, f"{title} over examples") as (axes, made):
        for curve in curves:
            _plot(axes, curve)
        if floor is not None:
            axes.axhline(floor, color=_COLORS["good"], lw=1.4, ls=(0, (4, 3)))
        for x in marks:
            axes.axvline(x, color=_COLORS["bad"], lw=1, ls=":")
        axes.set_ylim(*limits)
        axes.set_xlim(left=0)
        axes.set_xlabel("examples", color=_COLORS["muted"])
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        if max((y for c in curves for _, y in c.finite()), default=0) >= 10_000:
            axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.tick_params(length=0, pad=5, colors=_COLORS["muted"])
    return made[0]


def _plot(axes, curve: Curve) -> None:
    xs, ys = zip(*curve.finite(), strict=True)
    is_dotted = curve.color == "second" and len(xs) <= 60
    axes.plot(
        xs,
        ys,
        color=_COLORS[curve.color],
        lw=2 if curve.color == "second" else 1.3,
        marker="o" if is_dotted or len(xs) == 1 else None,
        ms=4,
        solid_joinstyle="round",
    )


def _limits(curves: Sequence[Curve], floor: float | None) -> tuple[float, float]:
    """Returns the limits of y: those of all but each long curve's first tenth.

    A run begins at several times the loss at which it spends its life.
    """
    levels = [] if floor is None else [floor]
    for curve in curves:
        ys = [y for _, y in curve.finite()]
        levels += ys[len(ys) // 10 if len(ys) >= 30 else 0 :]
    if not levels:
        return 0.0, 1.0
    low, high = min(levels), max(levels)
    margin = 0.08 * (high - low) or 0.02 * abs(high) or 1.0
    return low - margin, high + margin


def _inline(svg: str, title: str, label: str) -> Html:
    """Returns matplotlib's SVG file as an element of an HTML page.

    Without XML head, metadata and name spaces; colours as variables; the font left to
    the page; and ids of its own, for a page has several drawings.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(?:xmlns(?::\w+)?|version)="[^"]*"', "", svg)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(r"font-family: [^;\"]*;?", "", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    prefix = re.sub(r"\W+", "-", title.lower())
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    for name, color in _COLORS.items():
        svg = svg.replace(color, f"var(--{name})")
    head = tag("title", label)
    return Html(re.sub(r"(<svg[^>]*>)", rf"\1{head}", svg, count=1).strip())
