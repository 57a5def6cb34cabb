"""A digest of the sources that decide how fast a site runs.

Times of a table hold as long as these sources say the same: comments, docstrings and
layout do not count, and neither does any other module. Whoever changes what they say
measures the table again (`experiments/time_sites.py`).
"""

import ast
import dataclasses
import functools
import hashlib
import json
import pathlib

# Patterns of files in the package: the kernels of sites with their launchers and tuned
# settings, the casts, and what makes a site's program of them.
OF_SITES = (
    "fp8.py",
    "mapped.py",
    "maxima.py",
    "normed.py",
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
# Recipes that tables have times of; others may be added, and change none of these.
_RECIPES = (
    "bf16",
    "fp8_tensorwise",
    "fp8_tensorwise_delayed",
    "fp8_tensorwise_delayed_bf16_drhs",
    "fp8_rowwise",
    "fp8_rowwise_bf16_drhs",
    "fp8_blockwise",
)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_PACKAGE = pathlib.Path(__file__).parents[1]


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
    """Returns a digest of what some files and the casts of the tables' recipes say."""
    sha = hashlib.sha256(recipes().encode())
    for file in files(patterns, package):
        name = file.relative_to(package).as_posix()
        sha.update(f"{name}\n{_content(file)}\n".encode())
    return sha.hexdigest()[:16]


def recipes() -> str:
    """Returns what the recipes of tables cast, and how."""
    from loka_jax.recipe import RECIPES  # it takes JAX, which few who ask need

    values = [dataclasses.asdict(RECIPES[name]) for name in _RECIPES]
    return json.dumps(values, default=lambda dtype: dtype.__name__)


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
