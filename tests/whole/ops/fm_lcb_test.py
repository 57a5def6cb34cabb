"""`fm_lcb` by its kernels, in the interpreter and on a GPU, and on a mesh."""

import functools

import chex
import jax
import numpy as np
import pytest

from loka_jax.ops import fm_lcb as ops
from loka_jax.ops import kernels
from loka_jax.ops.device import HOPPER, Device
from loka_jax.ops.fm_lcb import BY_XLA, fm_lcb, plan_fm_lcb
from tests import support
from tests.support import tailed
from tests.support.pallas import assert_no_races, interpret  # noqa: F401

SIZES = dict(batch=3, n=24, d=16, k=16, m=32)
WUKONG_M = dict(batch=300, n=64, d=128, k=32, m=64)


@pytest.fixture
def interpreter(interpret):  # noqa: F811
    return Device(platform="cpu", interpret=interpret)


def served(batch, n, d, k, m):
    """Returns operands that both kernels serve, and gradients of the results."""
    weight = support.normal(n, m, seed=1) / n**0.5
    shapes = (batch, n, d), (batch, n, k), (batch, m - k, d)
    x, dfm, dlcb = (
        support.normal(*shape, seed=seed, dtype="bfloat16")
        for seed, shape in enumerate(shapes)
    )
    return x, weight, (dfm, dlcb)


def both_passes(x, weight, gradients, *, plan=BY_XLA):
    run = functools.partial(fm_lcb, k=gradients[0].shape[-1], plan=plan)
    out, pull = jax.vjp(run, x, weight)
    return out, pull(gradients)


# Each pass of either has at most four roundings of 2**-9, one after the other.
LIMIT = 4 * 2.0**-9


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
        return kernels.by_kernel(run, *operands)

    monkeypatch.setattr(ops, "by_kernel", by_kernel)
    args = served(**SIZES)
    plan = plan_fm_lcb(args[0], SIZES["m"], SIZES["k"], interpreter)
    plan = plan._replace(**reasons)
    found = jax.jit(functools.partial(both_passes, plan=plan))(*args)
    expected = jax.jit(both_passes)(*args)
    chex.assert_trees_all_equal_dtypes(found, expected)
    tailed.assert_close(found, expected, LIMIT)
    assert launched == launches
    assert_no_races()


def test_a_residual_in_parts_adds_its_gradient(interpreter):
    x, weight, (dfm, dlcb) = served(**SIZES)
    dy = support.normal(*x.shape, seed=6, dtype="bfloat16")
    plan = plan_fm_lcb(x, SIZES["m"], SIZES["k"], interpreter)

    def run(x, weight):
        options = dict(k=SIZES["k"], counts=(8, 16), plan=plan)
        fm, lcb, rest = ops.fm_lcb_residual(x, weight, **options)
        return fm, lcb, rest.rows

    dx, dweight = jax.vjp(run, x, weight)[1]((dfm, dlcb, (dy[:, :8], dy[:, 8:])))
    _, (theirs, their_dweight) = both_passes(x, weight, (dfm, dlcb))
    exact = np.asarray(theirs, np.float64) + np.asarray(dy, np.float64)
    tailed.assert_close((dx, dweight), (exact, their_dweight), LIMIT)


@pytest.mark.gpu
def test_on_the_device_kernels_do_what_xla_does():
    args = served(**WUKONG_M)
    plan = plan_fm_lcb(args[0], WUKONG_M["m"], WUKONG_M["k"], HOPPER)
    found = jax.jit(functools.partial(both_passes, plan=plan))(*args)
    expected = jax.jit(both_passes)(*args)
    tailed.assert_close(found, expected, LIMIT)
