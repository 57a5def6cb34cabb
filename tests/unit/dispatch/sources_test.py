"""What a shipped table holds for: what the sources of a site's programs say."""

import ast
import dataclasses
import json
import pathlib
import shutil

import pytest

from loka_jax.dispatch import sources
from loka_jax.recipe import RECIPES

PACKAGE = pathlib.Path(sources.__file__).parents[1]
SHIPPED = sorted((PACKAGE / "dispatch" / "tables").glob("*.json"))
# What `ops/run_site.py` imports, and its program does not depend on: which kernels may
# run here, devices and meshes, types of sites, and other operations' modules.
OTHERS = """
checked.py packed.py recipe.py site.py tails.py unbiased.py
ops/device.py ops/mesh_axes.py xla/packed.py xla/tails.py
"""
PATTERNS = ("*.py", "pallas/*")
FILES = {
    "fp8.py": '"""Of what."""\n\nx = 1\n',
    "pallas/a.py": 'def f(x):\n    """Returns what."""\n    return x + 2\n',
    "pallas/deep/b.py": "x = 1\n",
    "pallas/tuned.json": '{\n "rows": [64, 128]\n}',
    "train/step.py": "steps = 3\n",
}


@pytest.fixture
def package(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def _digest(package, patterns=PATTERNS):
    sources.digest.cache_clear()
    return sources.digest(patterns, package)


@pytest.mark.parametrize(
    ("name", "text", "counts"),
    [
        ("fp8.py", "'A docstring.'\n# A comment.\nx  =  1\n", False),
        ("fp8.py", '"""Of what."""\n\nx = 2\n', True),
        ("pallas/a.py", 'def f(x):\n    """Gives."""\n    return (x + 2)\n', False),
        ("pallas/a.py", 'def f(x):\n    """Returns."""\n    return x + 3\n', True),
        ("pallas/new.py", "x = 1\n", True),
        ("pallas/tuned.json", '{"rows": [64,128]}', False),
        ("pallas/tuned.json", '{"rows": [64, 256]}', True),
        ("pallas/deep/b.py", "x = 2\n", False),
        ("train/step.py", "steps = 4\n", False),
    ],
)
def test_code_and_tuned_settings_count_and_prose_does_not(package, name, text, counts):
    before = _digest(package)
    (package / name).write_text(text)
    assert (_digest(package) != before) == counts


def test_a_recipe_of_the_tables_counts_and_another_does_not(monkeypatch):
    before, recipe = sources.recipes(), RECIPES["fp8_rowwise"]
    monkeypatch.setitem(RECIPES, "mine", dataclasses.replace(recipe, name="mine"))
    assert sources.recipes() == before
    monkeypatch.setitem(RECIPES, "fp8_rowwise", dataclasses.replace(recipe, margin=2))
    assert sources.recipes() != before


def test_a_pattern_without_files_is_refused(package):
    with pytest.raises(ValueError, match=r"pallas/b\*\.py matches no file"):
        sources.files(("fp8.py", "pallas/b*.py"), package)


def test_no_other_module_counts(tmp_path):
    for file in sources.files():
        copy = tmp_path / file.relative_to(PACKAGE)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(file, copy)
    assert _digest(tmp_path, sources.OF_SITES) == sources.digest()


def test_all_that_a_sites_program_is_made_of_counts():
    waiting, found = [PACKAGE / "ops/run_site.py"], set()
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += _imported(file)
    found = {file for file in found if file.name != "__init__.py"}
    others = {PACKAGE / name for name in OTHERS.split()}
    assert others <= found, "a module here is not imported any more: take it out."
    assert found - others - set(sources.files()) == set(), (
        "sites import a new module: name it in `sources.OF_SITES`, or here."
    )


def _imported(file):
    """Yields the files of the package that a file imports, at whatever place."""
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{x.name}" for x in node.names)]
        elif isinstance(node, ast.Import):
            names = [x.name for x in node.names]
        for name in names:
            first, *parts = name.split(".")
            path = PACKAGE.joinpath(*parts)
            candidates = (path.with_suffix(".py"), path / "__init__.py")
            if first == "loka_jax" and parts:
                yield from (x for x in candidates if x.is_file())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_it_was_measured_with_these_sources(path):
    measured = json.loads(path.read_text())["header"]["kernels"]
    assert measured == sources.digest(), (
        f"sources that decide speed have changed since {path.name} was measured, and "
        "nobody would follow it: measure it again (experiments/time_sites.py), or take "
        "it out."
    )
