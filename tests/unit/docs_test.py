"""README and docs: figures are those of their JSON, links and scripts exist.

A comment below a paragraph or table says where its figures come from:

    <!-- figures: dispatch_h200.json@0337f59 models.{0}.times.{1} $.median_us
    columns: xla bf16 | xla bf16 / dispatch
    rows: tower, training; fp8_dlrm, training
    -->

The first line names a file of `experiments/results/`, the commit that was measured
(where the JSON has no `commit`, one that brought the file), and a JSON path; several
files, by {0} in the name, have their commits separated by commas. `columns` holds a
formula for each column of the table after its first, and `rows` the words that replace
{0}, {1} in each row; without `rows` they are the numbers of the row's first cell. Two
figures of one cell have their formulas separated by `;`. In place of `columns`, lines
such as `1.86x = xla bf16 / dispatch` explain single figures. Indented lines continue
the one above.

A formula is a sum of terms, or the quotient of two sums: `1 - a / 1 - b` is (1 - a) /
(1 - b). A term is a number, or a word that replaces `$` in the path. Keys of the path
may hold `*` (the smallest match counts); `k=256,n=128` selects an element of a list.
A figure is its value rounded to the printed digits; `%` and `M` scale it.
"""

import fnmatch
import functools
import json
import pathlib
import re
import subprocess
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
CODE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMENT = "<!-- figures: "
_NUMBER = r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
FIGURE = re.compile(rf"(?<![\w.,/=-])({_NUMBER})( ?%|x\b| M\b| us\b)?")


class Block(NamedTuple):
    """A paragraph or table, and the comments on its figures."""

    text: str
    comments: list[str]

    @property
    def is_table(self) -> bool:
        return self.text.startswith("|")

    def rows(self) -> list[list[str]]:
        """Returns the cells of the rows below a table's head."""
        return [line.strip("|").split("|") for line in self.text.splitlines()[2:]]


def blocks(page):
    """Returns the blocks of a page, without its code."""
    result = []
    for text in re.split(r"\n\s*\n", CODE.sub("", page.read_text()).strip()):
        if text.startswith(COMMENT):
            result[-1].comments.append(text)
        else:
            result.append(Block(re.sub(r"`[^`]*`", "", text), []))
    return result


def figures(text):
    """Returns the figures of a text with their units."""
    return [number + unit for number, unit in FIGURE.findall(text)]


def figures_to_explain(block):
    """Returns every number of a table, but only those with digits or unit of a text."""
    if block.is_table:
        return [f for cells in block.rows() for c in cells[1:] for f in figures(c)]
    return [f for f in figures(block.text) if re.search(r"[.%xMu]", f)]


class Source(NamedTuple):
    """Where a figure comes from."""

    figure: str
    formula: str
    file: str
    commits: list[str]
    path: str

    @property
    def value(self) -> float:
        return evaluate(self.formula, self.file, self.path)


def sources(block, comment):
    """Yields the sources of the figures that a comment explains."""
    body = comment.removeprefix(COMMENT).removesuffix("-->").replace("\n  ", " ")
    head, *lines = body.strip().splitlines()
    name, _, path = head.partition(" ")
    file, _, commits = name.partition("@")
    commits, path = commits.split(","), path or "$"
    if not lines[0].startswith("columns: "):
        for figure, formula in (line.split(" = ") for line in lines):
            assert figure in figures(block.text), f"{figure} is not in the text"
            yield Source(figure, formula, file, commits, path)
        return
    settings = dict(line.split(": ", maxsplit=1) for line in lines)
    words = [re.findall(r"\d+", row[0].replace(",", "")) for row in block.rows()]
    if "rows" in settings:
        words = [re.split(r",\s*", row.strip()) for row in settings["rows"].split(";")]
    columns = settings["columns"].split("|")
    for cells, keys in zip(block.rows(), words, strict=True):
        for cell, formulas in zip(cells[1:], columns, strict=True):
            if not figures(cell):
                continue
            for pair in zip(figures(cell), formulas.split(";"), strict=True):
                figure, formula = pair
                formula, name, where = (x.format(*keys) for x in (formula, file, path))
                yield Source(figure, formula, name, commits, where)


@functools.cache
def commits_of_results():
    """Returns the commits that changed each result, or None without Git's history."""
    shallow = _git("rev-parse", "--is-shallow-repository")
    if shallow is None or shallow.strip() != "false":
        return None
    commits, commit = {}, ""
    for line in _git("log", "--format=@%H", "--name-only", "--", RESULTS).splitlines():
        if line.startswith("@"):
            commit = line[1:]
        elif line:
            commits.setdefault(pathlib.Path(line).name, []).append(commit)
    return commits


def _git(*arguments):
    """Returns what Git prints, or None where there is no Git or no repository."""
    command = ["git", "-C", ROOT, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return done.stdout


def is_of_commits(file, named):
    """Returns True if a result is of one of the named commits."""
    data = load(file)
    if isinstance(data, dict) and "commit" in data:
        known = [data["commit"]]
    elif commits_of_results() is None:
        return all(re.fullmatch(r"[0-9a-f]{7,40}", commit) for commit in named)
    else:
        known = commits_of_results().get(file, [])
    return any(commit and k.startswith(commit) for commit in named for k in known)


@functools.cache
def load(file):
    """Returns a file of the results, or one named from the root."""
    path = RESULTS / file if (RESULTS / file).exists() else ROOT / file
    return json.loads(path.read_text())


def evaluate(formula, file, path):
    """Returns the value of a formula over a JSON file."""
    data = load(file)

    def term(text):
        if re.fullmatch(r"[\d.]+", text):
            return float(text)
        return min(values_at(data, path.replace("$", text).split(".")))

    def total(text):
        first, *rest = re.split(r" ([+-]) ", text)
        signed = zip(rest[::2], rest[1::2], strict=True)
        return term(first) + sum(term(t) * float(f"{sign}1") for sign, t in signed)

    above, *below = map(total, formula.strip().split(" / "))
    return above / below[0] if below else above


def values_at(data, path):
    """Returns the numbers at a path: one, or several if a key holds `*`."""
    if not path:
        return [float(data)]
    key, *rest = path
    if isinstance(data, dict):
        keys = [key] if key in data else fnmatch.filter(data, key)
        items = [data[k] for k in keys]
    elif "=" in key:
        wanted = dict(pair.split("=") for pair in key.split(","))
        items = [x for x in data if all(str(x[k]) == v for k, v in wanted.items())]
    else:
        items = [data[int(key)]]
    assert items, f"there is no {key!r}"
    return [value for item in items for value in values_at(item, rest)]


def is_rounded(figure, value):
    """Returns True if a figure is a value rounded to the digits that are printed."""
    number, unit = FIGURE.fullmatch(figure).groups()
    scale = {"%": 100, "M": 1e-6}.get((unit or "").strip(), 1)
    digits = len(number.partition(".")[2])
    printed = float(number.replace(",", ""))
    return abs(printed - value * scale) <= 0.5 * 10**-digits * (1 + 1e-6)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_are_those_of_the_json(page):
    wrong = [
        f"{source.figure} is {source.value:.7g} by {comment.splitlines()[0]}"
        for block in blocks(page)
        for comment in block.comments
        for source in sources(block, comment)
        if not is_rounded(source.figure, source.value)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_name_the_commit_of_their_json(page):
    named = {
        (source.file, *source.commits)
        for block in blocks(page)
        for comment in block.comments
        for source in sources(block, comment)
        if (RESULTS / source.file).exists()
    }
    wrong = [f"{file}: {of}" for file, *of in named if not is_of_commits(file, of)]
    assert not wrong, "\n".join(wrong)


def test_figures_of_the_benchmarks_are_explained():
    first_table = next(b for b in blocks(ROOT / "README.md") if b.is_table)
    missing = []
    for block in (first_table, *blocks(ROOT / "docs" / "benchmarks.md")):
        with_source = {s.figure for c in block.comments for s in sources(block, c)}
        missing += [f for f in figures_to_explain(block) if f not in with_source]
    assert not missing, missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_scripts_exist(page):
    text = page.read_text()
    matches = re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", text)
    links = [(page.parent / path if path else page, anchor) for path, anchor in matches]
    paths = [path for path, _ in links]
    named = re.findall(
        r"\b(?:examples|experiments|loka_jax|tests|docs)/[\w./-]*\w", text
    )
    paths += [ROOT / path for path in named]
    missing = [str(path) for path in paths if not path.exists()]
    assert not missing, missing
    for path, anchor in links:
        assert not anchor or anchor in anchors(path), f"{path}#{anchor}"


def anchors(page):
    """Returns the names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings]
