"""Imports inside loka_jax point down the layer list, never up."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# Lowest first. Providers (xla, pallas, triton) have no knowledge of each other.
LAYERS = """
terminal options compat
named
fp8 quality jsonfile cache_folder saved_format checked mapped
unbiased
commands
recipe normed heads jagged packed maxima launch server
scaling site tails report
xla pallas triton group chosen
probe
ops
nn
optim models data serving
measure
dispatch
train
survey predict
export
fitting
search
"""
TRAIN = """
processes tables metrics baselines calibration
own_functions
checkpoints state tasks scores
gradients
placement
step
mesh loop_options
config
model plan_files
planning cross_choice
planner build settings
observe in_turn
evaluation
watch
ahead first_order
logs
folder
loop
next_day summary
session
"""


def _imports(path, package):
    """Yields the first name under a package of every import in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for module in modules:
            if module.startswith(f"{package}."):
                yield module.removeprefix(f"{package}.").split(".")[0]


@pytest.mark.parametrize(
    ("package", "layers"), [("loka_jax", LAYERS), ("loka_jax.train", TRAIN)]
)
def test_imports_point_down(package, layers):
    lines = enumerate(layers.splitlines())
    level = {name: i for i, line in lines for name in line.split()}
    folder = ROOT / package.replace(".", "/")
    upward = []
    for path in folder.rglob("*.py"):
        if path == folder / "__init__.py":
            continue
        own = path.relative_to(folder).parts[0].removesuffix(".py")
        for name in _imports(path, package):
            if name != own and level[name] >= level[own]:
                upward.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not upward, upward


def test_nothing_imports_experiments():
    for path in (ROOT / "loka_jax").rglob("*.py"):
        assert "import experiments" not in path.read_text(), path
        assert "from experiments" not in path.read_text(), path
