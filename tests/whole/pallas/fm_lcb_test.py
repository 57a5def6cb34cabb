"""Wukong's FM and LCB kernel against numpy, in the interpreter with its race detector.

Errors are bounded by what is rounded: P^T and the results, to bfloat16. Sums differ in
their order, by far less.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.pallas.fm_lcb import Problem, TuningConfig, fm_lcb, why_not
from loka_jax.pallas.fm_lcb_layout import best_config, search_space
from tests.support import normal, sqnr_db, sum_error
from tests.support import pallas as support
from tests.support.pallas import interpret

__all__ = ["interpret"]

BF16 = jnp.bfloat16
ROUNDING = 2.0**-8  # of bfloat16, at most
# Two independent roundings of a relative 2**-9 or so, as in P^T and FM.
FM_DB = 51.0
# n, d, k, m of Wukong S, M and L.
SIZES = {
    "S": (40, 64, 24, 40),
    "M": (64, 128, 32, 64),
    "L": (96, 160, 48, 96),
}


@pytest.fixture
def run(interpret):
    return support.interpreted(fm_lcb, interpret)


def _operands(batch, n, d, m):
    # Examples, embeddings and columns of different sizes: a misplaced one shows.
    x, weight = (np.asarray(normal(*s, seed=n)) for s in ((batch, n, d), (n, m)))
    x = x * np.linspace(0.5, 2, batch)[:, None, None] * np.linspace(0.5, 2, n)[:, None]
    weight = weight * np.linspace(0.5, 2, m) / np.sqrt(n)
    return jnp.asarray(x, BF16), jnp.asarray(weight, BF16)


def _check(out, x, weight, k):
    fm, lcb = (np.asarray(array).astype(np.float64) for array in out)
    x, weight = (np.asarray(array).astype(np.float64) for array in (x, weight))
    p = weight.T @ x
    p_k = p[:, :k].swapaxes(1, 2)
    exact, magnitude = x @ p_k, np.abs(x) @ np.abs(p_k)
    support.assert_bfloat16(fm, exact, error=1.01 * ROUNDING * magnitude)
    assert sqnr_db(exact, fm) > FM_DB
    magnitude = np.abs(weight.T[k:]) @ np.abs(x)
    support.assert_bfloat16(lcb, p[:, k:], error=sum_error(x.shape[1], magnitude))


@pytest.mark.parametrize(
    "batch, n, d, k, m, config",
    [
        # n and k + l below a slab; more examples than CTAs; a whole slab.
        (5, 24, 16, 8, 24, TuningConfig(2, 1, 1, 2, 1)),
        (9, 64, 64, 32, 64, TuningConfig(4, 1, 1, 3, 1)),
        # Overlapping slabs; chunks; parts of k.
        (5, 80, 32, 16, 96, TuningConfig(2, 1, 2, 3, 2)),
        # A team of two, one of three with rows beyond n.
        (5, 128, 32, 40, 128, TuningConfig(2, 2, 2, 2, 1)),
        support.slow(3, 184, 32, 96, 192, TuningConfig(3, 3, 1, 2, 2)),
        # More CTAs than examples.
        (1, 64, 16, 8, 24, TuningConfig(2, 1, 1, 2, 1)),
    ],
)
def test_shapes_and_configs(run, batch, n, d, k, m, config):
    x, weight = _operands(batch, n, d, m)
    _check(run(x, weight, k, config=config), x, weight, k)


def test_nan_stays_in_its_example(run):
    x, weight = _operands(5, 24, 16, 24)
    x = x.at[2, 23, 3].set(jnp.nan)
    fm, lcb = run(x, weight, 8, config=TuningConfig(2, 1, 1, 2, 1))
    others = np.array([0, 1, 3, 4])
    assert np.isfinite(np.asarray(fm, np.float32)[others]).all()
    assert np.isfinite(np.asarray(lcb, np.float32)[others]).all()
    assert np.isnan(np.asarray(fm[2], np.float32)).all()
    assert np.isnan(np.asarray(lcb[2, :, 3], np.float32)).all()


def _problem(**sizes):
    return Problem(**(dict(batch=8, n=64, d=64, k=32, m=64) | sizes))


@pytest.mark.parametrize(
    "sizes, reason",
    [
        (dict(batch=0), "no examples"),
        (dict(n=60), "n=60 is not"),
        (dict(k=30), "k=30 is not"),
        (dict(m=32), "l=0 is not"),
        (dict(d=72), "d=72 is not"),
        (dict(n=264), "n=264 is more than 256"),
        (dict(m=264), "k + l=264 is more than 256"),
        (dict(n=256, m=256, d=208), "do not fit"),
        # Wukong XL: only teams of warpgroups have the registers for it.
        (dict(n=192, d=160, k=96, m=192), "do not fit one warpgroup's"),
    ],
)
def test_why_not(sizes, reason):
    assert reason in why_not(_problem(**sizes))


@pytest.mark.parametrize(
    "config, reason",
    [
        (TuningConfig(chunks=3), "no 3 chunks"),
        (TuningConfig(fm_parts=8), "no 8 parts"),
        (TuningConfig(warpgroups=2, team=2), "among teams"),
        (TuningConfig(pipeline_stages=17), "at most 32 stages"),
    ],
)
def test_configs_that_do_not_fit_are_refused(config, reason):
    x, weight = _operands(2, 64, 64, 64)
    with pytest.raises(ValueError, match=reason):
        fm_lcb(x, weight, 32, config=config)


def test_unserved_problems_are_refused():
    x, weight = _operands(2, 64, 64, 64)
    with pytest.raises(ValueError, match="k=30 is not a positive multiple of 8"):
        fm_lcb(x, weight, 30)


def _lowers(problem, config):
    """Lowers a launch for CUDA without a GPU: layouts and shared memory are checked."""
    shape = jax.ShapeDtypeStruct
    x = shape((problem.batch, problem.n, problem.d), BF16)
    weight = shape((problem.n, problem.m), BF16)
    launch = functools.partial(fm_lcb, k=problem.k, config=config)
    return support.lowers(launch, x, weight)


@pytest.mark.parametrize("size", SIZES)
def test_default_configs_lower_for_cuda(size):
    problem = Problem(batch=4096, **dict(zip("ndkm", SIZES[size], strict=True)))
    assert _lowers(problem, best_config(problem))


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_the_search_space_lowers_for_cuda(size):
    problem = Problem(batch=4096, **dict(zip("ndkm", SIZES[size], strict=True)))
    space = search_space(problem)
    assert len(space) > 1
    for config in space:
        assert _lowers(problem, config)


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("batch", [1, 1027])
def test_on_the_device(size, batch):
    n, d, k, m = SIZES[size]
    x, weight = _operands(batch, n, d, m)
    problem = Problem(batch=batch, n=n, d=d, k=k, m=m)
    for config in search_space(problem):
        launch = jax.jit(functools.partial(fm_lcb, k=k, config=config))
        _check(launch(x, weight), x, weight, k)


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_a_thousand_launches_agree_bit_by_bit(size):
    n, d, k, m = SIZES[size]
    x, weight = _operands(1027, n, d, m)
    support.assert_launches_repeat(functools.partial(fm_lcb, k=k), x, weight)
