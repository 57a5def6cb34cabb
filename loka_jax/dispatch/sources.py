"""A digest of the sources that decide how fast a site runs, and versions of packages.

The sources are those of the providers with their tuning configs, of `ops`, and of the
modules that they use. Comments, docstrings and layout do not count.
"""

import ast
import functools
import hashlib
import importlib.metadata
import json
import pathlib
from collections.abc import Iterator
from typing import Any

_PACKAGES = ("xla", "pallas", "triton", "ops")
_MODULES = ("fp8", "normed", "recipe", "scaling", "serving", "site")


def version(package: str) -> str:
    """Returns the installed version of a package; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def triton_versions() -> str:
    """Returns the versions of jax-triton and Triton; empty if one is missing."""
    versions = version("jax-triton"), version("triton")
    return " ".join(versions) if all(versions) else ""


@functools.cache
def digest(package: pathlib.Path = pathlib.Path(__file__).parents[1]) -> str:
    """Returns a digest of the sources that decide speed.

    Args:
        package: the folder of loka_jax.
    """
    sha = hashlib.sha256()
    for file in _files(package):
        text = file.read_text(encoding="utf-8")
        is_python = file.suffix == ".py"
        content = _parts(_without_docstrings(text)) if is_python else json.loads(text)
        sha.update(f"{file.relative_to(package).as_posix()} {content!r}\n".encode())
    return sha.hexdigest()[:16]


def _files(package: pathlib.Path) -> Iterator[pathlib.Path]:
    for name in _PACKAGES:
        files = (package / name).rglob("*")
        yield from sorted(file for file in files if file.suffix in (".py", ".json"))
    for name in _MODULES:
        yield package / f"{name}.py"


def _without_docstrings(text: str) -> ast.Module:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list) or not body:
            continue
        first = body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            body[:1] = [ast.Pass()]
    return tree


def _parts(node: Any) -> Any:
    """Returns the content of a syntax tree, alike in all versions of Python.

    Empty fields are left out: new versions add some.
    """
    if isinstance(node, list):
        return [_parts(part) for part in node]
    if not isinstance(node, ast.AST):
        return node
    fields = ((name, _parts(value)) for name, value in ast.iter_fields(node))
    filled = [(name, part) for name, part in fields if part not in (None, [])]
    return [type(node).__name__, *filled]
