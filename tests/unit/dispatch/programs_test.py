"""Digests of programs and of sources, and the shipped tables that have them."""

import itertools
import json
import pathlib
import runpy

import jax
import pytest

from loka_jax.dispatch import sources
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.programs import program_digest

XLA = """
import jax
import jax.numpy as jnp

@jax.jit
def scale(x):
    return 2.0 * x

@jax.jit
def shift(x):
    return x - 1.0

def program(x, y):
    a = scale(x)
    b = shift(y)
    return a @ b
"""
PALLAS = """
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

def double(x_ref, out_ref):
    rows = pl.ds(256 * jax.lax.axis_index("step"), 256)
    out_ref[rows] = 2.0 * x_ref[rows]

def program(x):
    kernel = plgpu.kernel(
        double, out_type=x, grid=(4,), grid_names=("step",),
        num_threads=1, thread_name="warpgroup",
    )
    return kernel(x) + 1.0
"""
TRITON = """
import jax
import triton
import triton.language as tl
from loka_jax.triton.launch import launch

@triton.jit
def double(x_ptr, out_ptr, block: tl.constexpr):
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out_ptr + offsets, 2.0 * tl.load(x_ptr + offsets))

def program(x):
    [out] = launch(double, x, outputs=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        grid=4, num_warps=4, num_stages=2, constants=dict(block=x.size // 4))
    return out
"""


@pytest.fixture
def digest(tmp_path):
    """Returns the digest of `program` in a module's source, some of it replaced."""
    count = itertools.count()

    def digest(source, old="", new=""):
        if source is TRITON:
            reason = "needs the extra triton"
            pytest.importorskip("jax_triton", reason=reason, exc_type=ImportError)
        assert old in source
        path = tmp_path / f"module{next(count)}.py"  # of which kernels read the source
        path.write_text(source.replace(old, new) if old else source)
        program = runpy.run_path(str(path))["program"]
        operand = jax.ShapeDtypeStruct((1024,), "float32")
        return program_digest(program, [operand] * program.__code__.co_argcount)

    return digest


@pytest.mark.parametrize(
    "source, old, new",
    [
        (XLA, "scale", "times_two"),
        (XLA, "import jax\n", "import jax\n\n# moved\n\n"),
        (XLA, "a = scale(x)\n    b = shift(y)", "b = shift(y)\n    a = scale(x)"),
        (XLA, "    return a @", "    unused = jnp.sin(a)\n    return a @"),
        (XLA, "scale(x)\n", "(lambda z: 2.0 * z)(x)\n"),
        (PALLAS, "double", "twice"),
        (PALLAS, "import jax\n", "import jax\n\n\n\n"),
        (TRITON, "double", "twice"),
        (TRITON, "import jax\n", "import jax\n\n\n\n"),
    ],
)
def test_names_places_and_order_do_not_count(digest, source, old, new):
    assert digest(source, old, new) == digest(source)


@pytest.mark.parametrize(
    "source, old, new",
    [
        (XLA, "2.0", "3.0"),
        (XLA, "a @ b", "b @ a"),
        (XLA, "shift(y)", "shift(x)"),
        (XLA, "2.0 * x", "(2.0 * x.astype(jnp.bfloat16)).astype(x.dtype)"),
        (XLA, "scale(x)\n", "jax.lax.optimization_barrier(scale(x))\n"),
        (PALLAS, "2.0", "3.0"),
        (PALLAS, "grid=(4,)", "grid=(2,)"),
        (PALLAS, "num_threads=1", "num_threads=2"),
        (TRITON, "2.0", "3.0"),
        (TRITON, "num_warps=4", "num_warps=8"),
        (TRITON, "grid=4", "grid=2"),
    ],
)
def test_what_is_computed_and_launched_counts(digest, source, old, new):
    assert digest(source, old, new) != digest(source)


MODULE = '"""Of what."""\n\nx = 1\n'
FUNCTION = 'def f(x):\n    """Returns what."""\n    return x + 2\n'
PACKAGES = ("xla", "pallas", "triton", "ops")
IMPORTER = "from loka_jax import far, xla\nfrom loka_jax.deep.in_it import x\n"
FILES = {
    **{f"{name}/a.py": FUNCTION for name in PACKAGES},
    "serving.py": MODULE,
    "ops/b.py": "def f():\n    import loka_jax.direct\n",
    "direct.py": IMPORTER,
    "far.py": MODULE,
    "deep/__init__.py": MODULE,
    "deep/in_it.py": MODULE,
    "deep/beside_it.py": MODULE,
    "ops/rows/deep.py": "class A:\n    'What.'\n",
    "pallas/tuned.json": '{\n "rows": [64, 128]\n}',
    "train.py": "steps = 3\n",
}


@pytest.fixture
def package(tmp_path):
    """Returns a folder with files as the package has them."""
    for name, text in FILES.items():
        path = tmp_path / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "package"


def _digest(package):
    sources.digest.cache_clear()
    return sources.digest(package)


PROSE = [
    ("serving.py", "'A docstring.'\n# A comment.\nx  =  1\n"),
    ("ops/a.py", FUNCTION.replace("Returns", "Gives  ")),
    ("ops/rows/deep.py", "class A:\n    pass\n"),
    ("pallas/tuned.json", '{"rows": [64,128]}'),
    ("train.py", "steps = 4\n"),
    ("deep/beside_it.py", "x = 2\n"),
]
IMPORTED = ("serving.py", "far.py", "deep/__init__.py", "deep/in_it.py")
CODE = [
    *((name, MODULE.replace("1", "2")) for name in IMPORTED),
    ("direct.py", f"{IMPORTER}x = 1\n"),
    *((f"{name}/a.py", FUNCTION.replace("2", "3")) for name in PACKAGES),
    ("xla/new.py", MODULE),
    ("pallas/tuned.json", '{"rows": [64, 256]}'),
]


@pytest.mark.parametrize("name, text", PROSE + CODE)
def test_code_and_tuned_settings_count_and_prose_does_not(package, name, text):
    before = _digest(package)
    (package / name).write_text(text)
    assert (_digest(package) != before) == ((name, text) in CODE)


def test_modules_below_the_providers_count():
    package = pathlib.Path(sources.__file__).parents[1]
    below = {
        package / f"{name}.py" for name in ("maxima", "packed", "tails", "scaling")
    }
    assert below <= sources._contents(package).keys()


SHIPPED = sorted((pathlib.Path(tables.__file__).parent / "tables").glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_it_is_stamped_for_these_sources(path):
    stamp = json.loads(path.read_text())["header"]["kernels"]
    assert stamp == sources.digest(), (
        f"the sources have changed since {path.name} was stamped, and nobody would "
        "follow it: run `python experiments/restamp.py`; if programs differ, measure "
        "the table again (experiments/time_sites.py), or take it out."
    )
