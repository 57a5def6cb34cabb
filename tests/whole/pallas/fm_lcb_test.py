"""Wukong's FM and LCB kernels against float64, in the interpreter with its detector.

Errors are bounded by what is rounded to bfloat16: P^T, S, X X^T and the results. Sums
differ in their order, by far less.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.pallas.fm_lcb import TuningConfig, fm_lcb
from loka_jax.pallas.fm_lcb_backward import BackwardConfig, fm_lcb_backward
from tests.support import normal, oracle, sqnr_db, sum_error
from tests.support import pallas as support
from tests.support.pallas import interpret

__all__ = ["interpret"]

BF16 = jnp.bfloat16
ROUNDING = 2.0**-8  # of bfloat16, at most
# Two independent roundings of a relative 2**-9 or so, as in P^T and FM.
DB = 51.0


@pytest.fixture
def run(interpret):
    return support.interpreted(fm_lcb, interpret)


@pytest.fixture
def run_backward(interpret):
    return support.interpreted(fm_lcb_backward, interpret)


def operands_of(batch, n, d, m):
    """Returns embeddings and the weight."""
    # Examples, embeddings and columns of different sizes: a misplaced one shows.
    x, weight = (np.asarray(normal(*s, seed=n)) for s in ((batch, n, d), (n, m)))
    x = x * np.linspace(0.5, 2, batch)[:, None, None] * np.linspace(0.5, 2, n)[:, None]
    weight = weight * np.linspace(0.5, 2, m) / np.sqrt(n)
    return jnp.asarray(x, BF16), jnp.asarray(weight, BF16)


def gradients_of(batch, n, d, k, m):
    """Returns embeddings, the weight and the gradients of FM and LCB."""
    shapes = (batch, n, k), (batch, m - k, d)
    dfm, dlcb = (np.asarray(normal(*x, seed=i + 2)) for i, x in enumerate(shapes))
    dfm, dlcb = dfm * np.linspace(2, 0.5, k), dlcb * np.linspace(2, 0.5, m - k)[:, None]
    rest = (jnp.asarray(array, BF16) for array in (dfm, dlcb))
    return *operands_of(batch, n, d, m), *rest


def added_to(x, counts):
    """Returns rows of a gradient of x in parts of these sizes."""
    rows = np.linspace(0.5, 2, x.shape[1])[:, None]
    whole = np.asarray(normal(*x.shape, seed=9)) * rows
    ends = np.cumsum(counts)[:-1]
    return tuple(jnp.asarray(x, BF16) for x in np.split(whole, ends, axis=1))


def check(out, x, weight, k):
    """Checks FM and LCB."""
    fm, lcb = (np.asarray(array).astype(np.float64) for array in out)
    x, weight = (np.asarray(array).astype(np.float64) for array in (x, weight))
    p = weight.T @ x
    p_k = p[:, :k].swapaxes(1, 2)
    exact, magnitude = x @ p_k, np.abs(x) @ np.abs(p_k)
    support.assert_bfloat16(fm, exact, error=1.01 * ROUNDING * magnitude)
    assert sqnr_db(exact, fm) > DB
    magnitude = np.abs(weight.T[k:]) @ np.abs(x)
    support.assert_bfloat16(lcb, p[:, k:], error=sum_error(x.shape[1], magnitude))


def check_backward(out, x, weight, dfm, dlcb, added=()):
    """Checks the gradients of embeddings and weight."""
    operands = [np.asarray(array, np.float64) for array in (x, weight, dfm, dlcb)]
    by_fm, by_lcb, *dweight = oracle.fm_lcb_gradients(*operands)
    parts = [np.asarray(part, np.float64) for part in added]
    more = np.concatenate(parts, axis=1) if parts else np.zeros(x.shape)
    dx, dweight = by_fm + by_lcb + more, np.concatenate(dweight, axis=1)
    by_fm, by_lcb, dy, dw = oracle.fm_lcb_gradients(*map(np.abs, operands))
    # A product meets one rounding for each term of the sums that it goes through.
    sums = functools.partial(sum_error, 2 * (sum(x.shape) + 2 * weight.shape[1]))
    error = ROUNDING / 2 * by_fm + sums(by_fm + by_lcb + np.abs(more))
    dx_found, dweight_found = (np.asarray(array, np.float64) for array in out)
    support.assert_bfloat16(dx_found, dx, error=error)
    error = sums(np.concatenate([dy, dw], axis=1))
    error[:, : dy.shape[1]] += ROUNDING / 2 * dy
    difference = np.abs(dweight_found - dweight)
    assert np.all(difference <= error), np.max(difference / error)
    assert sqnr_db(dx, dx_found) > DB and sqnr_db(dweight, dweight_found) > DB


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
        (3, 184, 32, 96, 192, TuningConfig(3, 3, 1, 2, 2)),
        # More CTAs than examples.
        (1, 64, 16, 8, 24, TuningConfig(2, 1, 1, 2, 1)),
    ],
)
def test_results_are_the_rounded_reference(run, batch, n, d, k, m, config):
    x, weight = operands_of(batch, n, d, m)
    check(run(x, weight, k, config=config), x, weight, k)


@pytest.mark.parametrize(
    "batch, n, d, k, m, config, counts",
    [
        # n below a slab; more examples than CTAs; rings that go round.
        (9, 24, 16, 16, 32, BackwardConfig(2, 2), ()),
        (5, 24, 32, 16, 48, BackwardConfig(2, 2), (8, 16)),
        # A whole slab; one stage; one team; k and l that differ.
        (5, 64, 64, 32, 48, BackwardConfig(3, 1), (24, 8, 32)),
        (5, 64, 32, 16, 48, BackwardConfig(1, 3), (64,)),
        # Slabs that overlap, and that do not; with two pieces, and with one.
        (5, 80, 32, 16, 48, BackwardConfig(1, 2), (48, 32)),
        # A slab whose rows are all stored before.
        (5, 128, 32, 16, 32, BackwardConfig(1, 1), (32, 96)),
        # More CTAs than examples, and teams without any.
        (1, 64, 16, 16, 32, BackwardConfig(2, 1), ()),
    ],
)
def test_gradients_are_the_rounded_reference(
    run_backward, batch, n, d, k, m, config, counts
):
    operands = gradients_of(batch, n, d, k, m)
    added = added_to(operands[0], counts) if counts else ()
    check_backward(run_backward(*operands, added, config=config), *operands, added)


def test_nan_stays_in_its_example(run, run_backward):
    x, *others = gradients_of(5, 24, 16, 16, 32)
    x, others_than_2 = x.at[2, 23, 3].set(jnp.nan), np.arange(5) != 2
    fm, lcb = run(x, others[0], 16, config=TuningConfig(2, 1, 1, 2, 1))
    dx, dweight = run_backward(x, *others, config=BackwardConfig(2, 1))
    for found in (fm, lcb, dx):
        is_finite = np.isfinite(np.asarray(found, np.float32)).all((1, 2))
        np.testing.assert_array_equal(is_finite, others_than_2)
    assert np.isnan(np.asarray(dweight)[23]).all()
    assert np.isnan(np.asarray(lcb[2, :, 3], np.float32)).all()
