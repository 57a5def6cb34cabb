"""FM and LCB's backward kernel against JAX's derivative of the float32 equations.

Errors are bounded by what is rounded to bfloat16: S and X X^T by half a step of 2**-8,
and dX. Sums differ in their order, by far less.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.pallas.fm_lcb_backward import (
    BackwardConfig,
    Problem,
    fm_lcb_backward,
    search_space,
    why_not,
)
from tests.support import normal, sqnr_db, sum_error
from tests.support import pallas as support
from tests.support.pallas import interpret

__all__ = ["interpret"]

BF16 = jnp.bfloat16
ROUNDING = 2.0**-9  # half a step of bfloat16, relative
DB = 51.0  # with two independent roundings, of S or X X^T and of the result
# n, d, k, m of Wukong M and L.
SIZES = {"M": (64, 128, 32, 64), "L": (96, 160, 48, 96)}


@pytest.fixture
def run(interpret):
    return support.interpreted(fm_lcb_backward, interpret)


def _operands(batch, n, d, k, m):
    # Examples, embeddings and columns of different sizes: a misplaced one shows.
    shapes = (batch, n, d), (n, m), (batch, n, k), (batch, m - k, d)
    x, weight, dfm, dlcb = (
        np.asarray(normal(*shape, seed=seed)) for seed, shape in enumerate(shapes)
    )
    examples = np.linspace(0.5, 2, batch)[:, None, None]
    x = x * examples * np.linspace(0.5, 2, n)[:, None]
    weight = weight * np.linspace(0.5, 2, m) / np.sqrt(n)
    dfm, dlcb = dfm * np.linspace(2, 0.5, k), dlcb * np.linspace(2, 0.5, m - k)[:, None]
    return tuple(jnp.asarray(array, BF16) for array in (x, weight, dfm, dlcb))


def _equations(k, x, weight):
    einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    p = einsum("nm,bnd->bmd", weight, x)
    return einsum("bnd,bkd->bnk", x, p[:, :k]), p[:, k:]


def _added(x, counts):
    """Returns rows of a gradient of x in parts of these sizes."""
    rows = np.linspace(0.5, 2, x.shape[1])[:, None]
    whole = np.asarray(normal(*x.shape, seed=9)) * rows
    ends = np.cumsum(counts)[:-1]
    return tuple(jnp.asarray(x, BF16) for x in np.split(whole, ends, axis=1))


def _check(out, x, weight, dfm, dlcb, added=()):
    exact = [array.astype(jnp.float32) for array in (x, weight, dfm, dlcb)]
    k = dfm.shape[2]
    _, pull = jax.vjp(functools.partial(_equations, k), *exact[:2])
    dx, dweight = (np.asarray(array, np.float64) for array in pull(tuple(exact[2:])))
    parts = [np.asarray(part, np.float64) for part in added]
    more = np.concatenate(parts, axis=1) if parts else np.zeros_like(dx)
    dx = dx + more
    x, weight, dfm, dlcb = (np.abs(np.asarray(a, np.float64)) for a in exact)
    s = dfm @ weight[:, :k].T
    s = s + s.swapaxes(1, 2)
    # A product meets one rounding for each term of the sums that it goes through.
    sums = functools.partial(_sums, sum(x.shape) + 2 * weight.shape[1])
    error = ROUNDING * s @ x + sums(s @ x + weight[:, k:] @ dlcb + np.abs(more))
    support.assert_bfloat16(out[0], dx, error=error)
    dy = (x @ x.swapaxes(1, 2) @ dfm).sum(0)
    dw = (x @ dlcb.swapaxes(1, 2)).sum(0)
    error = sums(np.concatenate([dy, dw], axis=1))
    error[:, :k] += ROUNDING * dy
    difference = np.abs(np.asarray(out[1], np.float64) - dweight)
    assert np.all(difference <= error), np.max(difference / error)
    assert sqnr_db(dx, np.asarray(out[0], np.float64)) > DB
    assert sqnr_db(dweight, np.asarray(out[1], np.float64)) > DB


def _sums(terms, magnitude):
    """Returns the bound of the errors of our sums and of the reference's."""
    return 2 * sum_error(terms, magnitude)


@pytest.mark.parametrize(
    "batch, n, d, k, m, config",
    [
        # n below a slab; more examples than CTAs; rings that go round.
        (9, 24, 16, 16, 32, BackwardConfig(2, 2)),
        # A whole slab; one stage; one team; k and l that differ.
        (5, 64, 64, 32, 48, BackwardConfig(3, 1)),
        (5, 64, 32, 16, 48, BackwardConfig(1, 3)),
        # Slabs that overlap, and that do not.
        (5, 80, 32, 16, 48, BackwardConfig(1, 2)),
        support.slow(7, 128, 32, 16, 32, BackwardConfig(1, 2)),
        # More CTAs than examples, and teams without any.
        (1, 64, 16, 16, 32, BackwardConfig(2, 1)),
    ],
)
def test_shapes_and_configs(run, batch, n, d, k, m, config):
    operands = _operands(batch, n, d, k, m)
    _check(run(*operands, config=config), *operands)


@pytest.mark.parametrize(
    "n, counts, config",
    [
        (24, (8, 16), BackwardConfig(2, 2)),
        (64, (64,), BackwardConfig(1, 1)),
        (64, (24, 8, 32), BackwardConfig(2, 1)),
        # Slabs that overlap: one with two pieces, the other with one.
        (80, (48, 32), BackwardConfig(1, 2)),
        # A slab whose rows are all stored before.
        support.slow(128, (32, 96), BackwardConfig(1, 1)),
    ],
)
def test_another_gradient_is_added(run, n, counts, config):
    operands = _operands(5, n, 32, 16, 48)
    added = _added(operands[0], counts)
    out = run(*operands, added, config=config)
    _check(out, *operands, added)
    assert np.array_equal(out[1], run(*operands, config=config)[1])


def test_parts_that_are_no_whole_tiles_are_refused():
    operands = _operands(2, 24, 16, 16, 32)
    with pytest.raises(ValueError, match=r"parts of \(12, 12\) embeddings are no"):
        fm_lcb_backward(*operands, _added(operands[0], (12, 12)))


def test_nan_stays_in_its_example(run):
    x, *others = _operands(5, 24, 16, 16, 32)
    x = x.at[2, 23, 3].set(jnp.nan)
    dx, dweight = run(x, *others, config=BackwardConfig(2, 1))
    is_finite = np.isfinite(np.asarray(dx, np.float32)).all((1, 2))
    np.testing.assert_array_equal(is_finite, np.arange(5) != 2)
    assert np.isnan(np.asarray(dweight)[23]).all()


def _problem(**sizes):
    return Problem(**(dict(batch=8, n=64, d=64, k=32, m=64) | sizes))


@pytest.mark.parametrize(
    "sizes, reason",
    [
        (dict(batch=0), "no examples"),
        (dict(k=24), "k=24 is not a positive multiple of 16"),
        (dict(m=56), "l=24 is not a positive multiple of 16"),
        (dict(d=72), "d=72 is not"),
        (dict(n=256, d=32, k=16, m=32), "do not fit the backward's"),
    ],
)
def test_why_not(sizes, reason):
    assert reason in why_not(_problem(**sizes))


@pytest.mark.parametrize(
    "config, reason",
    [
        (BackwardConfig(teams=5), "5 warpgroups are more than 4"),
        (BackwardConfig(teams=2, pipeline_stages=9), "bytes of shared memory"),
    ],
)
def test_configs_that_do_not_fit_are_refused(config, reason):
    with pytest.raises(ValueError, match=reason):
        fm_lcb_backward(*_operands(2, 64, 64, 32, 64), config=config)


def test_unserved_problems_are_refused():
    with pytest.raises(ValueError, match="k=24 is not a positive multiple of 16"):
        fm_lcb_backward(*_operands(2, 64, 64, 24, 40))


@pytest.mark.parametrize("size", SIZES)
def test_the_search_space_lowers_for_cuda(size):
    n, d, k, m = SIZES[size]
    shapes = (4096, n, d), (n, m), (4096, n, k), (4096, m - k, d)
    operands = [jax.ShapeDtypeStruct(shape, BF16) for shape in shapes]
    space = search_space(Problem(batch=4096, n=n, d=d, k=k, m=m))
    assert space
    for config in space:
        launch = functools.partial(fm_lcb_backward, config=config)
        assert support.lowers(launch, *operands)
        assert support.lowers(launch, *operands, _halves(operands[0]))


def _halves(x):
    """Returns the shapes of two halves of x."""
    batch, n, d = x.shape
    return (jax.ShapeDtypeStruct((batch, n // 2, d), x.dtype),) * 2


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("batch", [1, 1027])
def test_on_the_device(size, batch):
    n, d, k, m = SIZES[size]
    operands = _operands(batch, n, d, k, m)
    added = _added(operands[0], (n // 2, n // 2))
    for config in search_space(Problem(batch=batch, n=n, d=d, k=k, m=m)):
        launch = jax.jit(functools.partial(fm_lcb_backward, config=config))
        _check(launch(*operands), *operands)
        _check(launch(*operands, added), *operands, added)


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_a_thousand_launches_agree_bit_by_bit(size):
    operands = _operands(1027, *SIZES[size])
    half = SIZES[size][0] // 2
    added = _added(operands[0], (half, half))
    support.assert_launches_repeat(fm_lcb_backward, *operands, added)
