"""`fm_lcb` by its kernels, in the interpreter and on a GPU, and on a mesh."""

import functools

import chex
import jax
import pytest

from loka_jax import mapped
from loka_jax.ops import fm_lcb as ops
from loka_jax.ops.device import HOPPER, Device
from loka_jax.ops.fm_lcb import BY_XLA, plan_fm_lcb
from tests import support
from tests.support import tailed
from tests.support.pallas import assert_no_races, interpret  # noqa: F401

SIZES = dict(batch=3, n=24, d=16, k=16, m=32)
WUKONG_M = dict(batch=300, n=64, d=128, k=32, m=64)


@pytest.fixture
def interpreter(interpret):  # noqa: F811
    return Device(platform="cpu", interpret=interpret)


def both_passes(x, weight, gradients, *, plan=BY_XLA):
    """Returns FM, LCB and x in two parts, and the gradients of x and the weight."""
    half, k = x.shape[1] // 24 * 8, gradients[0].shape[2]  # kernels take eights

    def run(x, weight):
        options = dict(k=k, counts=(half, x.shape[1] - half), plan=plan)
        fm, lcb, rest = ops.fm_lcb_residual(x, weight, **options)
        return fm, lcb, rest.rows

    *results, dy = gradients
    out, pull = jax.vjp(run, x, weight)
    return out, pull((*results, (dy[:, :half], dy[:, half:])))


def assert_kernels_do_what_xla_does(device, sizes, **reasons):
    """Asserts it of a size that both kernels serve."""
    batch, n, d, k, m = sizes.values()
    weight = support.normal(n, m, seed=1) / n**0.5
    shapes = (batch, n, d), (batch, n, k), (batch, m - k, d), (batch, n, d)
    x, *gradients = (
        support.normal(*shape, seed=seed, dtype="bfloat16")
        for seed, shape in enumerate(shapes)
    )
    plan = plan_fm_lcb(x, m, k, device)._replace(**reasons)
    found = jax.jit(functools.partial(both_passes, plan=plan))(x, weight, gradients)
    expected = jax.jit(both_passes)(x, weight, gradients)
    chex.assert_trees_all_equal_dtypes(found, expected)
    # Each pass of either has at most four roundings of 2**-9, one after the other.
    tailed.assert_close(found, expected, 4 * 2.0**-9)


@pytest.mark.parametrize(
    "reasons, launches",
    [
        ({}, ["fm_lcb", "fm_lcb_backward"]),
        (dict(why_not_forward="a test"), ["fm_lcb_backward"]),
        (dict(why_not_backward="a test"), ["fm_lcb"]),
    ],
)
def test_kernels_do_what_xla_does(interpreter, monkeypatch, reasons, launches):
    launched = []

    def by_kernel(run, *operands):
        launched.append(run.func.__name__)
        return mapped.by_kernel(run, *operands)

    monkeypatch.setattr(ops, "by_kernel", by_kernel)
    assert_kernels_do_what_xla_does(interpreter, SIZES, **reasons)
    assert launched == launches
    assert_no_races()


@pytest.mark.gpu
def test_on_the_device_kernels_do_what_xla_does():
    assert_kernels_do_what_xla_does(HOPPER, WUKONG_M)
