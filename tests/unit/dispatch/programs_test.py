"""Digests of programs: names and places do not count, what is computed does."""

import dataclasses
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import pytest

from loka_jax.dispatch.programs import program_digest
from loka_jax.normed import Epilogue, Outputs
from loka_jax.pallas.norm_quantize import default_config, norm_quantize

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
    return a @ b, jax.nn.relu(a)
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

    def digest(source, *replaced, dtype="float32"):
        for old, new in replaced:
            assert old in source
            source = source.replace(old, new)
        path = tmp_path / f"module{next(count)}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        num_operands = module.program.__code__.co_argcount
        shape = (1024,) * num_operands
        operands = [jax.ShapeDtypeStruct(shape, dtype)] * num_operands
        return program_digest(module.program, operands)

    return digest


@pytest.mark.parametrize(
    "replaced",
    [
        ("scale", "times_two"),
        ("import jax\n", "import jax\n\n# moved\n\n"),
        (
            "    a = scale(x)\n    b = shift(y)\n",
            "    b = shift(y)\n    a = scale(x)\n",
        ),
        ("    return a @", "    unused = jnp.sin(a)\n    return a @"),
        ("scale(x)\n", "(lambda z: 2.0 * z)(x)\n"),
    ],
    ids=["rename", "move", "order", "dead code", "inline"],
)
def test_names_places_and_order_do_not_count(digest, replaced):
    assert digest(XLA, replaced) == digest(XLA)


@pytest.mark.parametrize(
    "replaced",
    [
        ("2.0", "3.0"),
        ("a @ b", "b @ a"),
        ("jax.nn.relu(a)", "jax.nn.relu(b)"),
        ("shift(y)", "shift(x)"),
        ("2.0 * x", "(2.0 * x.astype(jnp.bfloat16)).astype(x.dtype)"),
        ("scale(x)\n", "jax.lax.optimization_barrier(scale(x))\n"),
    ],
)
def test_what_is_computed_counts(digest, replaced):
    assert digest(XLA, replaced) != digest(XLA)


def test_dtypes_count(digest):
    assert digest(XLA, dtype="bfloat16") != digest(XLA)


def test_a_loop_reads_values_of_each_level(digest):
    source = """
import jax
def program(x, y):
    def outer(i, a):
        def inner(j, b):
            return b * FIRST + i
        return jax.lax.fori_loop(0, 3, inner, a)
    return jax.lax.fori_loop(0, 3, outer, x)
"""
    one, two = (digest(source, ("FIRST", name)) for name in ("a", "b"))
    assert one != two and two == digest(source, ("FIRST", "b"), ("inner", "nested"))


@pytest.mark.parametrize("source", [PALLAS, TRITON], ids=["pallas", "triton"])
def test_a_kernel_without_its_names_is_the_same(digest, source):
    _require(source)
    assert digest(source, ("double", "twice")) == digest(source)
    assert digest(source, ("import jax\n", "import jax\n\n\n\n")) == digest(source)


@pytest.mark.parametrize(
    ("source", "replaced"),
    [
        (PALLAS, ("2.0", "3.0")),
        (PALLAS, ("grid=(4,)", "grid=(2,)")),
        (PALLAS, ("num_threads=1", "num_threads=2")),
        (TRITON, ("2.0", "3.0")),
        (TRITON, ("num_warps=4", "num_warps=8")),
        (TRITON, ("grid=4", "grid=2")),
    ],
)
def test_what_a_kernel_computes_and_its_launch_count(digest, source, replaced):
    _require(source)
    assert digest(source, replaced) != digest(source)


def test_the_tuning_config_of_a_kernel_counts():
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)

    def digest(config):
        def run(x):
            static = dict(epilogue=Epilogue("none", "relu"), want=Outputs(y=True))
            return norm_quantize(x, config=config, **static).y

        return program_digest(run, [x])

    default = default_config(256, norm="none")
    other = dataclasses.replace(default, pipeline_stages=default.pipeline_stages + 1)
    assert digest(default) == digest(None) != digest(other)


def _require(source):
    if source is TRITON:
        reason = "needs the extra triton"
        pytest.importorskip("jax_triton", reason=reason, exc_type=ImportError)
