"""The Python code of README and docs runs, each page as one script."""

import pathlib
import re

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[2]
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
WITH_CODE = [page for page in PAGES if CODE.search(page.read_text())]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_python_code_runs(page):
    namespace = {}
    # As in a user's process: the tests are stricter.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for code in CODE.findall(page.read_text()):
            exec(compile(code, page.name, "exec"), namespace)
