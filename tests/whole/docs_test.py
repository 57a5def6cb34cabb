"""The Python code of README and docs runs, each page as one script."""

import pathlib
import re
import textwrap

import jax
import jax.numpy as jnp
import pytest

ROOT = pathlib.Path(__file__).parents[2]
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
WITH_CODE = [page for page in PAGES if CODE.search(page.read_text())]


@pytest.mark.usefixtures("as_users_do")
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_python_code_runs_to_finite_numbers(page):
    namespace = {}
    for code in CODE.findall(page.read_text()):
        exec(compile(code, page.name, "exec"), namespace)
    del namespace["__builtins__"]
    for name, value in namespace.items():
        for x in jax.tree.leaves(value):
            if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact):
                assert jnp.isfinite(x).all(), name


@pytest.mark.usefixtures("as_users_do")
def test_the_readme_shows_what_its_code_prints(capsys):
    text = (ROOT / "README.md").read_text()
    exec(compile(CODE.search(text)[1], "README.md", "exec"), {})
    shown = re.search(r"prints, .*:\n\n((?:    .*\n)+)", text)[1]
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed == textwrap.dedent(shown).splitlines()
