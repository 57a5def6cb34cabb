"""Charts: matplotlib draws them, the page's style sheet colors them.

matplotlib writes each color into its SVG. The colors that it gets are placeholders,
replaced by the style sheet's variables, so that one drawing serves light and dark
pages. Text stays text, in the page's font. matplotlib is an optional extra, imported on
the first use.
"""

import importlib.util
import io
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

RUN_COLORS = tuple(f"run{i}" for i in range(8))  # of runs over one another
# Placeholders that appear nowhere else in an SVG.
_NAMES = ("muted", "line", "accent", "second", "good", "bad", *RUN_COLORS)
_COLORS = {name: f"#0102{i:02x}" for i, name in enumerate(_NAMES, start=3)}
_LARGEST = 1e100  # of what is drawn: the size of an axis must not overflow
_SIZE_INCHES = (5.6, 3.1)  # 403 x 223 CSS pixels: text stays legible on a phone


class Series(NamedTuple):
    """Points of a chart that belong together.

    Attributes:
        points: (x, y), or (x, y, low, high) with an interval of y; those with a value
            that is None, not finite or huge are left out.
        color: "accent" (thin, many points), "second" (thick, few, with dots), or one of
            `RUN_COLORS`.
        has_dots: whether points are dots, if they are few; those of "second" are.
    """

    label: str
    points: Sequence[tuple[float | None, ...]]
    color: str
    is_dashed: bool = False
    has_dots: bool = False

    def finite(self) -> list[tuple[float, ...]]:
        """Returns the points that can be drawn."""
        drawn = []
        for point in self.points:
            values = tuple(v for v in point if v is not None and abs(v) <= _LARGEST)
            if len(values) == len(point):
                drawn.append(values)
        return drawn


class Figure(NamedTuple):
    """A chart for a page: its title, its legend as (label, color), its drawing."""

    title: str
    legend: list[tuple[str, str]]
    svg: Markup


def can_draw() -> bool:
    """Returns whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def curves(
    title: str,
    series: Sequence[Series],
    *,
    floor: float | None = None,
    marks: Sequence[float] = (),
    from_zero: bool = False,
    x: str = "examples",
) -> list[Figure]:
    """Returns a figure of curves; none if there is no point, or no matplotlib.

    Args:
        floor: the best possible value, drawn as a line.
        marks: places on x, drawn as dotted lines: the skipped steps.
        from_zero: the axis of y begins at 0.
        x: what x is: the number of examples seen, or another count from 1 on.
    """
    series = [line for line in series if line.finite()]
    if not series or not can_draw():
        return []
    legend = [
        (line.label, f"{line.color} key-dashed" if line.is_dashed else line.color)
        for line in series
    ]
    legend += [("best possible", "good")] if floor is not None else []
    legend += [("skipped step", "bad")] if marks else []
    low, high = limits(series, floor)
    is_counted = x != "examples"

    def draw(axes) -> None:
        from matplotlib.ticker import EngFormatter

        for line in series:
            _plot(axes, line)
        if floor is not None:
            axes.axhline(floor, color=_COLORS["good"], lw=1.4, ls=(0, (4, 3)))
        for mark in marks:
            axes.axvline(mark, color=_COLORS["bad"], lw=1, ls=":")
        axes.set(ylim=(0 if from_zero else low, high), xlabel=x)
        if is_counted:
            axes.set_xlim(0.5, max(len(line.points) for line in series) + 0.5)
        else:
            axes.set_xlim(left=-0.01 * axes.get_xlim()[1])  # a dot at 0 is whole
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if max(y for line in series for _, y in line.finite()) >= 10_000:
            axes.yaxis.set_major_formatter(EngFormatter(sep=""))

    svg = _draw(title, f"{title} over {x}", draw, whole_x=is_counted)
    return [Figure(title, legend, svg)]


def scatter(title: str, series: Sequence[Series], x: str, y: str) -> list[Figure]:
    """Returns a figure of points, intervals, and the line where x = y; or none."""
    series = [cloud for cloud in series if cloud.finite()]
    if not series or not can_draw():
        return []
    largest = max(max(point) for cloud in series for point in cloud.finite())
    ends = (-0.04 * largest, 1.08 * largest)  # the two zeros have room

    def draw(axes) -> None:
        axes.plot(ends, ends, color=_COLORS["muted"], lw=1, ls=(0, (4, 3)))
        for cloud in series:
            xs, ys, *interval = zip(*cloud.finite(), strict=True)
            if interval:
                axes.vlines(xs, *interval, color=_COLORS[cloud.color], lw=1.6)
            axes.plot(xs, ys, "o", ms=4, alpha=0.7, color=_COLORS[cloud.color])
        axes.set(xlim=ends, ylim=ends, xlabel=x, ylabel=y)

    legend = [(cloud.label, cloud.color) for cloud in series]
    return [Figure(title, legend, _draw(title, f"{title}, {y} over {x}", draw))]


def sparkline(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Returns the curve of log2 of the values; those that are not positive are gaps.

    It spans at least four octaves, so that a steady scale looks steady. None if no
    value is positive.
    """
    width, height, margin = 132, 30, 3
    logs = [math.log2(v) if v and 0 < v < math.inf else None for v in values]
    levels = [log for log in logs if log is not None]
    if not levels:
        return None
    middle, span = (max(levels) + min(levels)) / 2, max(max(levels) - min(levels), 4)
    step = (width - 2 * margin) / max(len(logs) - 1, 1)
    path, pen = [], "M"
    for i, log in enumerate(logs):
        if log is not None:
            y = height / 2 - (log - middle) / span * (height - 2 * margin)
            path.append(f"{pen}{margin + i * step:.1f} {y:.1f}")
        pen = "M" if log is None else "L"
    end = path[-1][1:].split()
    return {"size": (width, height), "path": " ".join(path), "end": end}


def limits(series: Sequence[Series], floor: float | None) -> tuple[float, float]:
    """Returns the limits of y: those of all but the first tenth of each long curve.

    The loss of the first steps is several times that of the rest of a run.
    """
    levels = [] if floor is None else [floor]
    for line in series:
        ys = [y for _, y in line.finite()]
        levels += ys[len(ys) // 10 if len(ys) >= 30 else 0 :]
    low, high = min(levels), max(levels)
    margin = 0.08 * (high - low) or 0.02 * abs(high) or 1.0
    return low - margin, high + margin


def _draw(
    title: str, label: str, draw: Callable[[Any], None], *, whole_x: bool = False
) -> Markup:
    """Returns the SVG of the axes that `draw` fills, with x at whole numbers or not."""
    # Figure alone: pyplot would start a GUI backend and keep every figure alive.
    import matplotlib
    from matplotlib.figure import Figure as Canvas
    from matplotlib.ticker import MaxNLocator

    style: Any = {"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 11}
    with matplotlib.rc_context(style):
        canvas = Canvas(figsize=_SIZE_INCHES, layout="constrained")
        axes = canvas.add_subplot()
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(_COLORS["line"])
        axes.grid(axis="y", color=_COLORS["line"], lw=0.8)
        draw(axes)
        for axis, is_whole in ((axes.xaxis, whole_x), (axes.yaxis, False)):
            ticks = MaxNLocator(5, integer=is_whole, min_n_ticks=1 if is_whole else 2)
            axis.set_major_locator(ticks)
            axis.label.set_color(_COLORS["muted"])
        axes.yaxis.labelpad = 10  # numbers grow on a phone
        axes.tick_params(length=0, pad=5, colors=_COLORS["muted"])
        file = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        canvas.savefig(file, format="svg", transparent=True, metadata=no_metadata)
    return _inline(file.getvalue(), title, label)


def _plot(axes, series: Series) -> None:
    xs, ys = zip(*series.finite(), strict=True)
    is_dotted = (series.has_dots or series.color == "second") and len(xs) <= 60
    axes.plot(
        xs,
        ys,
        color=_COLORS[series.color],
        lw=2 if series.color == "second" else 1.3,
        ls=(0, (4, 2)) if series.is_dashed else "-",
        marker="o" if is_dotted or len(xs) == 1 else None,
        ms=4,
        solid_joinstyle="round",
    )


def _inline(svg: str, title: str, label: str) -> Markup:
    """Returns matplotlib's SVG file as an element of an HTML page.

    Without XML head and name spaces; with colors as variables, the page's
    font, and ids that differ from those of other drawings on the page.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\s(?:xmlns(?::\w+)?|version)="[^"]*"', "", svg)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(r"font-family: [^;\"]*;?", "", svg)
    svg = re.sub(r' width="[^"]*" height="[^"]*"', "", svg, count=1)
    prefix = re.sub(r"\W+", "-", title.lower())
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    for name, color in _COLORS.items():
        svg = svg.replace(color, f"var(--{name})")
    # No text in a drawing comes from a run, only the fixed titles of charts.
    head = Markup("<title>{}</title>").format(label)
    return Markup(re.sub(r"(<svg[^>]*>)", rf"\1{head}", svg, count=1).strip())
