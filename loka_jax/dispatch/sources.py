"""A digest of the sources that decide how fast a site runs, and versions beside it.

Times of a table hold as long as these sources say the same: comments, docstrings and
layout do not count, and neither does any other module. Whoever changes what they say
measures the table again (`experiments/time_sites.py`).
"""

import ast
import functools
import hashlib
import importlib.metadata
import json
import pathlib
import re

# Patterns of files in the package: the kernels of sites with their launchers and tuned
# settings, the casts, and what makes a site's program of them.
OF_SITES = (
    "fp8.py",
    "maxima.py",
    "normed.py",
    "recipe.py",
    "scaling.py",
    "ops/kernel_site.py",
    "ops/kernels.py",
    "ops/matmul.py",
    "ops/plan.py",
    "ops/products.py",
    "ops/run_site.py",
    "pallas/activations.py",
    "pallas/column_sums.py",
    "pallas/dense_norm*.py",
    "pallas/norm_*.py",
    "pallas/row*.py",
    "pallas/site_kernels.py",
    "pallas/tile*.py",
    "pallas/tuned*",
    "triton/launch.py",
    "triton/matmul*.py",
    "triton/typed_call.py",
    "xla/dense_norm.py",
    "xla/matmul.py",
)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_PACKAGE = pathlib.Path(__file__).parents[1]
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
    """Returns the version of NVIDIA's driver; empty where the system does not say."""
    try:
        found = re.search(r"\s(\d+(\.\d+)+)\s", file.read_text(encoding="utf-8"))
    except OSError:
        return ""
    return found[1] if found else ""


def files(
    patterns: tuple[str, ...] = OF_SITES, package: pathlib.Path = _PACKAGE
) -> list[pathlib.Path]:
    """Returns the files of the package that match a pattern, in order.

    Raises:
        ValueError: if a pattern matches none, as after a file was renamed.
    """
    found: set[pathlib.Path] = set()
    for pattern in patterns:
        matches = [x for x in package.glob(pattern) if x.suffix in (".py", ".json")]
        if not matches:
            raise ValueError(f"{pattern} matches no file in {package}: correct it.")
        found.update(matches)
    return sorted(found)


@functools.cache
def digest(
    patterns: tuple[str, ...] = OF_SITES, package: pathlib.Path = _PACKAGE
) -> str:
    """Returns a digest of what some files of the package say, by default of sites'."""
    sha = hashlib.sha256()
    for file in files(patterns, package):
        name = file.relative_to(package).as_posix()
        sha.update(f"{name}\n{_content(file)}\n".encode())
    return sha.hexdigest()[:16]


def _content(file: pathlib.Path) -> str:
    """Returns a file without its layout, comments and docstrings."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        return json.dumps(json.loads(text))
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    return ast.unparse(tree)
