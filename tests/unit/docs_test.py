"""README and docs: tables are those of the JSON; links, scripts and modules exist."""

import importlib.util
import json
import pathlib
import re
import tomllib

import pytest

import loka_jax
from experiments.tables import __main__ as tables
from experiments.tables.cells import RESULTS
from experiments.tables.results import TABLES
from loka_jax import commands

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]


def test_tables_and_the_picture_are_those_of_the_json():
    wrong = tables.update(check=True)
    assert not wrong, f"{wrong}: run `python -m experiments.tables`"


def test_every_table_is_on_a_page():
    used = {name for page in PAGES for _, name in places(page)}
    assert used == set(TABLES)


def places(page):
    """Returns the places of tables on a page."""
    return [(m[0], m[2]) for m in tables.PLACE.finditer(page.read_text())]


def test_a_figure_that_is_not_in_the_json_is_noticed(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "PICTURE", tmp_path / "docs" / "picture.svg")
    (tmp_path / "docs").mkdir()
    page = tmp_path / "README.md"
    page.write_text("<!-- table: torch -->\n<!-- end -->\n")
    assert tables.update(check=True) == ["picture.svg", "README.md"]
    tables.update(check=False)
    assert tables.update(check=True) == []
    assert "13,576" in page.read_text()
    page.write_text(page.read_text().replace("13,576", "13,577"))
    assert tables.update(check=True) == ["README.md"]


def test_every_result_names_its_commit():
    named = json.loads((RESULTS / "commits.json").read_text())
    results = {path.name: path for path in RESULTS.glob("*.json")}
    del results["commits.json"]
    assert set(named) <= set(results)
    for path in results.values():
        data = json.loads(path.read_text())
        commit = data.get("commit") or named.get(path.name) or ""
        assert re.match(r"[0-9a-f]{7}", commit), path.name


def test_the_readme_lists_the_public_modules():
    listed = (ROOT / "README.md").read_text().partition("## Public modules")[2]
    for name in loka_jax.PUBLIC:
        assert importlib.util.find_spec(f"loka_jax.{name}") is not None, name
        assert f"{name}`" in listed, name
    assert loka_jax.nn.convert is not None  # imported when it is asked for


def test_the_container_runs_the_documented_server():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    words = {line.split()[0]: line for line in lines}
    copied = [x.split() for x in lines if x.startswith("COPY")]
    sources = [name for _, *names, _ in copied for name in names]
    assert all((ROOT / name).exists() for name in sources)
    assert {"pyproject.toml", "README.md", "LICENSE"} <= set(sources)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extra,) = re.findall(r"pip install .*\[(\w+)\]", words["RUN"])
    assert extra in project["optional-dependencies"]
    assert words["FROM"].endswith("python:3.12-slim")
    loka, command, *rest = json.loads(words["ENTRYPOINT"].removeprefix("ENTRYPOINT "))
    assert loka in project["scripts"] and command in commands.names()
    text = (ROOT / "docs" / "serving.md").read_text()
    documented = re.search(r"docker run -p (\d+):(\d+) -v .*:(/\w+):ro \S+ (.*)", text)
    port, inside, folder, options = documented.groups()
    assert port == inside == words["EXPOSE"].split()[1]
    assert rest[0] == folder
    source = (ROOT / "experiments" / "serve.py").read_text()
    for word in [*rest, *options.split()]:
        assert not word.startswith("--") or f'add_argument("{word}"' in source


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


def test_pages_that_code_names_exist():
    code = [
        p for room in ("loka_jax", "experiments") for p in (ROOT / room).rglob("*.py")
    ]
    named = {
        name for p in code for name in re.findall(r"docs/[\w-]+\.md", p.read_text())
    }
    assert named and not [name for name in named if not (ROOT / name).exists()]


def anchors(page):
    """Returns the names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings]
