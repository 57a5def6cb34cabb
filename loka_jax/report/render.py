"""Fills the templates: every value is escaped, None reads as a dash."""

import math
from pathlib import Path
from typing import Any

import jinja2

from loka_jax import jsonfile
from loka_jax.jsonfile import as_dict
from loka_jax.report import charts


def write_page(path: Path, template: str, **view: object) -> Path:
    """Writes a template, filled with the view, to `path` and returns the path."""
    folder = path.parent.resolve().name
    page = _environment.get_template(template).render(folder=folder, **view)
    jsonfile.write_text(path, page + "\n")
    return path


def items(value: object) -> list[Any]:
    """Returns the items of a list from JSON; none for anything else."""
    return value if isinstance(value, list) else []


def dicts(value: object) -> list[dict[str, Any]]:
    """Returns the dicts of a list from JSON; none for anything else."""
    return [as_dict(item) for item in items(value)]


def texts(value: object) -> list[str]:
    """Returns the items of a list from JSON as texts; none for anything else."""
    return [str(item) for item in items(value)]


def real(value: object) -> float | None:
    """Returns a finite number as float, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def number(value: object, spec: str = ",.0f") -> str:
    """Returns a number in a Python format; "n/a" for NaN and for other objects."""
    finite = real(value)
    return "n/a" if finite is None else f"{finite:{spec}}".replace("%", " %")


def mebibytes(value: object) -> str:
    """Returns a number of bytes in MiB; "n/a" for NaN and for other objects."""
    finite = real(value)
    return number(None if finite is None else finite / 2**20)


def exponent(value: float) -> str:
    """Returns the base-2 logarithm of a positive number, to be set as an exponent."""
    log = math.log2(value)
    return f"{log:.{0 if log == round(log) else 1}f}".replace("-", "−")


def duration(seconds: object) -> str:
    """Returns seconds in words; nothing for what is no number."""
    total = real(seconds)
    if total is None:
        return ""
    if total < 60:
        return f"{total:.1f} s"
    minutes, rest = divmod(round(total), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def flat(value: dict[str, Any], prefix: str = "") -> dict[str, object]:
    """Returns nested values by dotted name, lists in one line."""
    pairs: dict[str, object] = {}
    for name, item in value.items():
        if isinstance(item, dict) and item:
            pairs |= flat(item, f"{prefix}{name}.")
        elif isinstance(item, list):
            pairs[f"{prefix}{name}"] = " ".join(map(str, item)) or None
        else:
            pairs[f"{prefix}{name}"] = item
    return pairs


_environment = jinja2.Environment(
    loader=jinja2.PackageLoader("loka_jax.report"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    finalize=lambda value: "–" if value is None else value,
    trim_blocks=True,
    lstrip_blocks=True,
)
_environment.filters |= {
    "number": number,
    "duration": duration,
    "exponent": exponent,
    "mebibytes": mebibytes,
}
_environment.globals |= {
    "sparkline": charts.sparkline,
    "can_draw": lambda: charts.can_draw(),
}
