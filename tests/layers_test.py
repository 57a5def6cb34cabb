"""Imports inside loka_jax point down the layer list, never up."""

import ast
import pathlib

PACKAGE = pathlib.Path(__file__).parents[1] / "loka_jax"
# Lowest first.
LAYERS = (
    ("terminal",),
    (
        "fp8",
        "quality",
        "jsonfile",
        "options",
        "cache_folder",
        "max_merge",
        "saved_format",
    ),
    ("commands",),
    ("recipe", "normed", "packed", "launch", "server"),
    ("scaling", "site", "tails", "report"),
    ("xla", "pallas", "triton"),  # providers: no knowledge of each other
    ("probe",),
    ("ops",),
    ("nn",),
    ("optim", "models", "data", "serving"),
    ("measure",),
    ("dispatch",),
    ("train",),
    ("survey", "predict"),
    ("export",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def _imports(path):
    """Yields the first name under loka_jax of every import in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (m.split(".")[1] for m in modules if m.startswith("loka_jax."))


def test_imports_point_down():
    upward = []
    for path in PACKAGE.rglob("*.py"):
        if path == PACKAGE / "__init__.py":
            continue
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for name in _imports(path):
            if name != own and LEVEL[name] >= LEVEL[own]:
                upward.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not upward, upward


def test_nothing_imports_experiments():
    for path in PACKAGE.rglob("*.py"):
        assert "import experiments" not in path.read_text(), path
        assert "from experiments" not in path.read_text(), path
