"""Writes the tables and the picture of README and docs from the JSON of the results.

    python -m experiments.tables            # writes them
    python -m experiments.tables --check    # fails if a page is not what the JSON says

A page names its tables: `<!-- table: NAME -->`, what this writes, `<!-- end -->`.
"""

import os
import pathlib
import re
import sys
from collections.abc import Iterator

from experiments.tables import cells, picture
from experiments.tables.results import TABLES

ROOT = pathlib.Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "whole_steps.svg"
PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def expected() -> dict[pathlib.Path, str]:
    """Returns what each page, and the picture, should hold."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {PICTURE: picture.svg()} | {page: _filled(page) for page in pages}


def _filled(page: pathlib.Path) -> str:
    def fill(place: re.Match) -> str:
        return f"{place[1]}{_text(TABLES[place[2]], page.parent)}{place[3]}"

    return PLACE.sub(fill, page.read_text("utf-8"))


def _text(table: cells.Table, folder: pathlib.Path) -> str:
    heads = [table.first, *table.columns]
    lines = [heads, ["---"] * len(heads)]
    files: dict[str, None] = {}
    for title, row in table.read():
        lines.append([title, *(cell(row) for cell in table.columns.values())])
        files[row.file] = None
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    origins = "; ".join(_origin(file, folder) for file in files)
    return f"{text}\n{origins}.\n"


def _origin(file: str, folder: pathlib.Path) -> str:
    path, commits = cells.path_of(file), cells.load("commits")
    data = cells.load(file)
    each = [data.get("commit") or commits.get(path.name), *_own_commits(data)]
    of = " and ".join(dict.fromkeys(_commit(x) for x in each if x))
    link = f"[{path.name}]({os.path.relpath(path, folder)})"
    return f"{link}: {cells.device(file)}" + (f", {of}" if of else ", shipped")


def _own_commits(data: dict) -> Iterator[str]:
    """Yields the commits of cases that were measured at another one than the rest."""
    for name in ("runs", "models"):
        cases = data.get(name, ())
        for case in cases.values() if isinstance(cases, dict) else cases:
            if isinstance(case, dict):
                yield from case.get("commits", {}).values()


def _commit(name: str) -> str:
    return f"commit {name.partition('-')[0][:7]}" if len(name) >= 40 else name


def update(check: bool) -> list[str]:
    """Returns the pages that are not as expected, after writing them if not `check`."""
    wrong = []
    for page, text in expected().items():
        if not page.exists() or page.read_text("utf-8") != text:
            wrong.append(page.name)
            if not check:
                page.write_text(text, "utf-8")
    return wrong


if __name__ == "__main__":
    check = "--check" in sys.argv[1:]
    names = update(check)
    print(*names, sep="\n")
    sys.exit(1 if names and check else 0)
