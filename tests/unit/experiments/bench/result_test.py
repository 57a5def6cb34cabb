"""Every result names the commit and the kernels that made it."""

import ast
import json
import pathlib
import subprocess

import pytest

from experiments.bench import result as results
from loka_jax.dispatch import sources

BENCH = pathlib.Path(results.__file__).parent


def _git(folder, *command):
    names = ("-c", "user.name=a", "-c", "user.email=a@b")
    git = ["git", "-C", str(folder), *names, *command]
    return subprocess.run(git, check=True, capture_output=True, text=True).stdout


def test_a_commit_is_that_of_the_tree_and_says_if_it_is_not_clean(tmp_path):
    assert results.commit(tmp_path) is None
    (tmp_path / "experiments/results").mkdir(parents=True)
    (tmp_path / "a.py").write_text("x = 1\n")
    for command in (["init"], ["add", "."], ["commit", "-m", "One."]):
        _git(tmp_path, *command)
    head = _git(tmp_path, "rev-parse", "HEAD").strip()
    (tmp_path / "experiments/results/new.json").write_text("{}")
    assert len(head) == 40 and results.commit(tmp_path) == head
    (tmp_path / "b.py").write_text("x = 1\n")  # in no commit
    assert results.commit(tmp_path) == f"{head}-dirty"
    (tmp_path / "b.py").unlink()
    (tmp_path / "a.py").write_text("x = 2\n")
    assert results.commit(tmp_path) == f"{head}-dirty"


def test_what_is_written_has_both_in_place_of_those_of_earlier_runs(tmp_path):
    results.write(tmp_path / "x.json", {"points": [], "commit": "an earlier one"})
    written = json.loads((tmp_path / "x.json").read_text())
    commit = results.commit()
    assert written == {"points": [], "commit": commit, "kernels": sources.digest()}


@pytest.mark.parametrize("path", sorted(BENCH.glob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_writes_by_that_function_or_names_both(path):
    nodes = list(ast.walk(ast.parse(path.read_text())))
    called = {
        x.func.attr for x in nodes if isinstance(getattr(x, "func", 0), ast.Attribute)
    }
    assert "write_text" not in called or "origin()" in path.read_text()
