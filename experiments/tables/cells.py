"""What a table of results is: rows, and columns of cells that read a JSON file.

A path such as `runs.wukong_m 16384.training xla bf16.us` leads to a number. `{0}` and
`{1}` stand for the words of the row; a step may hold `*` and `?`, and takes the key
whose number is the least. `dim=16,batch=8` is the element of a list with these values.

Rows, and columns that differ in a word only, are texts: `title = word; title = word`.
A title by itself is its own word, without the commas of numbers.
"""

import dataclasses
import fnmatch
import functools
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

RESULTS = pathlib.Path(__file__).parents[1] / "results"


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table, which cells ask for numbers."""

    file: str
    words: tuple[str, ...]

    def __call__(self, path: str) -> float:
        """Returns the number at a path of the row's file."""
        steps = path.format(*self.words).split(".")
        return min(map(float, _at(load(self.file), steps)))

    def count(self, path: str) -> int:
        """Returns how many values there are at a path, whose key may hold `*`."""
        steps = path.format(*self.words).split(".")
        return len(_at(load(self.file), steps)[0])


Cell = Callable[[Row], str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A table of results.

    Attributes:
        file: the name of its JSON without `.json`; may hold words of the row.
        rows: first cells and the words of the rows, several separated by `|`.
        columns: the cells of each column, by its title.
        first: the title of the first column.
    """

    file: str
    rows: str
    columns: Mapping[str, Cell]
    first: str = ""

    def read(self) -> Iterator[tuple[str, Row]]:
        """Yields the first cell and the row of each line."""
        for title, word in titled(self.rows):
            words = tuple(word.split(" | "))
            yield title, Row(self.file.format(*words), words)


def titled(text: str) -> Iterator[tuple[str, str]]:
    """Yields the titles of rows or columns, and their words."""
    for line in text.split("; "):
        title, _, word = line.partition(" = ")
        yield title, word or title.replace(",", "")


def number(path: str, digits: int = 0, unit: float = 1) -> Cell:
    """Returns cells with a number, in units of `unit`."""
    return lambda row: f"{row(path) / unit:,.{digits}f}"


def times(above: str, below: str) -> Cell:
    """Returns cells with a quotient, as in 1.83x."""
    return lambda row: f"{row(above) / row(below):.2f}x"


def numbers(path: str, words: str, digits: int = 0) -> dict[str, Cell]:
    """Returns columns of numbers; `$` in the path stands for a column's word."""
    return {t: number(path.replace("$", word), digits) for t, word in titled(words)}


def gains(over: str, path: str, words: str) -> dict[str, Cell]:
    """Returns columns of quotients of one number and another of each column."""
    return {t: times(over, path.replace("$", word)) for t, word in titled(words)}


def percent(path: str, digits: int = 0) -> Cell:
    """Returns cells with a share in percent."""
    return lambda row: f"{100 * row(path):.{digits}f} %"


def share(part: str, whole: str) -> Cell:
    """Returns cells with the quotient of two numbers, in percent."""
    return lambda row: f"{100 * row(part) / row(whole):.0f} %"


def pair(first: str, second: str, between: str, digits: int = 0) -> Cell:
    """Returns cells with two numbers."""
    both = number(first, digits), number(second, digits)
    return lambda row: between.join(cell(row) for cell in both)


def spread(path: str, digits: int) -> Cell:
    """Returns cells with a mean and its standard deviation."""
    return pair(f"{path}.mean", f"{path}.std", " ± ", digits)


def difference(path: str, digits: int, scale: float = 1) -> Cell:
    """Returns cells with a mean difference and its 95 % interval."""

    def cell(row: Row) -> str:
        mean, half = row(f"{path}.mean"), row(f"{path}.half_interval_95")
        return f"{scale * mean:+.{digits}f} ± {scale * half:.{digits}f}"

    return cell


def change(arm: str, base: str) -> Cell:
    """Returns cells with the change of NE against an arm, and its 95 % interval."""

    def cell(row: Row) -> str:
        scale = 100 / row(f"arms.{base}.ne.mean")
        at = f"arms.{arm}.ne.minus_first"
        mean, half = row(f"{at}.mean"), row(f"{at}.half_interval_95")
        return f"{scale * mean:+.3f} % ± {scale * half:.3f} %"

    return cell


@functools.cache
def load(file: str) -> Any:
    """Returns the content of a JSON file of the results, or of a shipped table."""
    return json.loads(path_of(file).read_text("utf-8"))


def path_of(file: str) -> pathlib.Path:
    """Returns the path of a result, or of a table that Dispatch has."""
    path = RESULTS / f"{file}.json"
    shipped = RESULTS.parents[1] / "loka_jax/dispatch/tables" / path.name
    return path if path.exists() else shipped


def device(file: str) -> str:
    """Returns the device of a result, which its name ends with: 4 H100, CPU."""
    if file == "generated_50m_dhen_m_seeds":
        return "H100 and H200"
    found = re.search(r"(?:_(\d)x|_)(h100|h200|cpu)", file)
    return f"{found[1] or ''} {found[2].upper()}".strip() if found else "simulated"


def _at(data: Any, steps: list[str]) -> list[Any]:
    """Returns what lies at a path: several values if a step holds `*`."""
    if not steps:
        return [data]
    step, *rest = steps
    if isinstance(data, dict):
        keys = [step] if step in data else fnmatch.filter(data, step)
        items = [data[key] for key in keys]
    elif "=" in step:
        wanted = dict(word.split("=") for word in step.split(","))
        items = [x for x in data if all(str(x[k]) == v for k, v in wanted.items())]
    else:
        items = [data[int(step)]]
    assert items, f"there is no {step!r}"
    return [value for item in items for value in _at(item, rest)]
