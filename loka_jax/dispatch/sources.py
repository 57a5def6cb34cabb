"""A digest of the sources that decide how fast a site runs, and versions beside it.

The sources are those of the providers with their tuning configs, of `ops`, of what
makes weights ready, and all modules of loka_jax that these import, however far.
Comments, docstrings and layout do not count.
"""

import ast
import functools
import hashlib
import importlib.metadata
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

ROOTS = ("xla", "pallas", "triton", "ops", "serving.py")
_DRIVER = pathlib.Path("/proc/driver/nvidia/version")


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


def cuda_version(platform_version: str) -> str:
    """Returns the version of CUDA, such as 13.0; empty where there is none.

    Args:
        platform_version: of JAX's backend, such as "cuda 13000".
    """
    found = re.search(r"cuda (\d+)", platform_version)
    return f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}" if found else ""


def cublas_version() -> str:
    """Returns the version of the package with cuBLAS; empty if no package has it."""
    return version("nvidia-cublas") or version("nvidia-cublas-cu12")


def driver_version(file: pathlib.Path = _DRIVER) -> str:
    """Returns the version of NVIDIA's driver; empty where the system does not say.

    Args:
        file: in which the driver's module tells it.
    """
    try:
        found = re.search(r"\s(\d+(\.\d+)+)\s", file.read_text(encoding="utf-8"))
    except OSError:
        return ""
    return found[1] if found else ""


@functools.cache
def digest(
    package: pathlib.Path = pathlib.Path(__file__).parents[1],
    roots: tuple[str, ...] = ROOTS,
) -> str:
    """Returns a digest of sources and all that they import; of those that decide speed.

    Args:
        package: the folder of loka_jax.
        roots: files and folders in it.
    """
    sha = hashlib.sha256()
    for file, content in sorted(_contents(package, roots).items()):
        sha.update(f"{file.relative_to(package).as_posix()} {content!r}\n".encode())
    return sha.hexdigest()[:16]


def _contents(
    package: pathlib.Path, roots: tuple[str, ...] = ROOTS
) -> dict[pathlib.Path, Any]:
    """Returns what counts in each file of the roots, and in all that they import."""
    waiting = [file for root in roots for file in _files(package / root)]
    contents: dict[pathlib.Path, Any] = {}
    while waiting:
        file = waiting.pop()
        if file in contents:
            continue
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            contents[file] = json.loads(text)
            continue
        contents[file] = _parts(_without_docstrings(tree := ast.parse(text)))
        waiting.extend(_imported(tree, package))
    return contents


def _files(root: pathlib.Path) -> list[pathlib.Path]:
    """Returns a file, or those of a folder that decide speed."""
    files = root.rglob("*") if root.is_dir() else [root]
    return [file for file in files if file.suffix in (".py", ".json")]


def _imported(tree: ast.Module, package: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the files of the package that are imported, at whatever place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            first, *parts = name.split(".")
            for end in range(1, len(parts) + 1) if first == "loka_jax" else ():
                path = package.joinpath(*parts[:end])
                files = (path.with_suffix(".py"), path / "__init__.py")
                yield from (file for file in files if file.is_file())


def _without_docstrings(tree: ast.Module) -> ast.Module:
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
