"""What is learned of a site and sampled of its operands, against numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.fp8 import fp8_max
from loka_jax.probe import live_errors, site
from loka_jax.probe.live_errors import empty_errors
from loka_jax.probe.operands import operands_of
from loka_jax.probe.site import Capture, ProbeConfig, some_rows
from loka_jax.recipe import get_recipe
from tests.support import E4M3

M, K, N = 40, 4, 3  # rows, half of them on each of two devices
RECIPES = ("fp8_rowwise", "fp8_tensorwise")
CONFIG = ProbeConfig(decay=0.5, max_rows=10, recipes=RECIPES)
# Of lhs, rhs and g: without a scale, by a scale, by none yet.
SCALES = (None, 0.25, 0.0)


MEASURED = []  # arguments of `live_errors`, as they were traced


@pytest.fixture(autouse=True, scope="module")
def live_errors_stand_in():
    """Stands in for errors, which compile for long: of step i all are (1 + i) / 100."""

    def measured(operands, recipes, steps, axis_names, copies=1):
        MEASURED.append((operands, recipes, axis_names))
        empty = empty_errors(len(recipes))
        values = [1.0, 1.0, (1 + steps) / 100, 0.0]
        sums = jnp.broadcast_to(jnp.stack(values), empty.sums.shape)
        return empty._replace(steps=jnp.ones(()), sums=sums)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_errors, "live_errors", measured)
        yield


@jax.jit
def _learn(stats, lhs, rhs, g):
    """Returns the statistics after a batch, of which two devices have halves."""

    @functools.partial(jax.vmap, axis_name="data", out_axes=None)
    def observed(lhs, g):
        operands = operands_of(lhs, rhs, g, SCALES, ("data",))
        return CONFIG.observe(stats, operands, ("data",))

    halves = (x.reshape(2, M // 2, -1) for x in (lhs, g))
    return site.merge(stats, observed(*halves), CONFIG.decay)


def _operands(seed=0):
    """Returns operands of other means and sizes, each."""
    rng = np.random.default_rng(seed)
    lhs, rhs, g = (rng.standard_normal(s) for s in ((M, K), (K, N), (M, N)))
    lhs = (lhs + 2) * np.logspace(0, 2, M)[:, None]
    return [np.float32(x) for x in (lhs, 100 * rhs - 50, 1e-3 * g)]


def _assert_rows(rows, batches, centres):
    """Asserts that statistics are those of the rows of two batches."""
    weights = np.repeat([0.5, 1.0], len(batches[0]))
    x = np.concatenate(batches).astype(np.float64)
    mean = np.average(x, axis=0, weights=weights)
    scatter = (x - mean).T * weights @ (x - mean)
    assert rows.moments.count == np.sum(weights)
    np.testing.assert_allclose(rows.moments.mean, mean, rtol=1e-4)
    atol = 1e-4 * np.abs(scatter).max()
    np.testing.assert_allclose(rows.moments.scatter[0], scatter, atol=atol)
    counts = np.zeros(160)
    for batch, centre, weight in zip(batches, centres, (0.5, 1.0), strict=True):
        size = np.sqrt(np.mean((batch - centre) ** 2, axis=1))
        np.add.at(counts, np.floor(2 * (np.log2(size) + 56)).astype(int), weight)
    np.testing.assert_array_equal(rows.norms, counts)
    np.testing.assert_allclose(rows.elements.mean, x.mean(), rtol=1e-4)
    assert rows.elements.count == x.size
    np.testing.assert_allclose(
        rows.elements.read()["last_amax"], np.abs(batches[-1]).max()
    )


def test_two_batches_are_learned_as_they_are():
    first, second = _operands(), _operands(seed=9)
    stats = _learn(_learn(CONFIG.init(M, K, N), *first), *second)
    for name, place in (("lhs", 0), ("g", 2)):
        seen = [x[place][::2] for x in (first, second)]
        rows = getattr(stats, name)
        _assert_rows(rows, seen, (0.0, seen[0].mean(0)))
        # The scales of lhs and g are made for the amaxes of all devices.
        elements = rows.elements.read()
        assert 0.5 < elements["amax_ratio"] <= 1 and elements["saturation"] == 0
    weight, last = stats.rhs, second[1]
    assert (weight.normal.steps, weight.normal.moves) == (2, 1)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5)
    # Shares of 1 and of (1 - p) / (1 - p^2).
    close(weight.normal.mean, first[1] / 3 + 2 * last / 3)
    # Elements are those of the last weight alone, in all of its rows.
    assert weight.elements.count == K * N
    close(weight.elements.mean, last.mean())
    reach = 0.25 * fp8_max(E4M3)
    close(weight.elements.read()["amax_ratio"], np.abs(last).max() / reach)
    clipped = np.mean(np.abs(last) > reach)
    assert clipped > 0
    close(weight.elements.read()["saturation"], clipped)


def test_several_uses_of_a_site_in_a_step_are_learned_as_rows_of_one():
    """And one that no use was made of keeps what was learned."""
    stats = _learn(CONFIG.init(M, K, N), *_operands())
    lhs, rhs, g = _operands(seed=9)
    told = [
        CONFIG.observe(stats, operands_of(x, rhs, g, SCALES)) for x in (lhs, lhs + 1)
    ]
    both = site.merge(stats, jax.tree.map(jnp.add, *told), CONFIG.decay)
    twice = site.merge(stats, told[0], CONFIG.decay)
    jax.tree.map(np.testing.assert_array_equal, both.rhs.normal, twice.rhs.normal)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5)
    close(both.rhs.elements.values, twice.rhs.elements.values)
    seen = some_rows(lhs, CONFIG.max_rows)
    earlier = CONFIG.decay * stats.lhs.moments.count
    count = earlier + 2 * len(seen)
    assert both.lhs.moments.count == count
    total = earlier * stats.lhs.moments.mean + np.sum(seen + (seen + 1), axis=0)
    close(both.lhs.moments.mean, total / count)
    mean_of_two = (np.abs(seen).max() + np.abs(seen + 1).max()) / 2
    close(both.lhs.elements.read()["last_amax"], mean_of_two)
    empty = jax.tree.map(jnp.zeros_like, told[0])
    jax.tree.map(
        np.testing.assert_array_equal, site.merge(stats, empty, CONFIG.decay), stats
    )


# Of 1e30, the fourth power is not finite, which counts in statistics of elements alone.
@pytest.mark.parametrize(
    "operand, value", [(0, np.nan), (0, 1e30), (1, np.inf), (2, np.inf)]
)
def test_an_operand_that_is_not_finite_changes_nothing(operand, value):
    stats = _learn(CONFIG.init(M, K, N), *_operands())
    operands = _operands(seed=9)
    operands[operand][[2, -2], 1] = value
    after = _learn(stats, *operands)
    for i, name in enumerate(("lhs", "rhs", "g")):
        parts = (jax.tree.leaves(getattr(x, name)) for x in (stats, after))
        is_same = all(map(np.array_equal, *parts))
        assert is_same == (i == operand), name


def test_errors_are_those_of_all_rows_and_follow_the_steps():
    stats, operands = CONFIG.init(M, K, N), _operands()
    for _ in range(2):
        stats = _learn(stats, *operands)
    found = np.asarray(stats.errors.sums)
    assert stats.errors.steps == 2 and found.shape == (2, 3, 3, 4)
    # Half of 0.01, and 0.02.
    np.testing.assert_allclose(found[..., 0], 1.5)
    np.testing.assert_allclose(found[..., 2], 0.005 + 0.02, rtol=1e-6)
    # Other tests may have been first, without devices.
    operands, recipes, _ = next(x for x in MEASURED if x[2] == ("data",))
    assert recipes == list(map(get_recipe, RECIPES))
    assert [x.shape for x in operands[:3]] == [(M // 2, K), (K, N), (M // 2, N)]
    assert operands.scales.shape == operands.amaxes.shape == (3,)


@pytest.mark.parametrize(
    "size, limit, places",
    [(12, 13, range(12)), (12, 4, (0, 3, 6, 9)), (12, 5, (0, 2, 4, 7, 9))],
)
def test_rows_are_spread_evenly(size, limit, places):
    found = some_rows(np.arange(size)[:, None], limit)
    np.testing.assert_array_equal(found[:, 0], list(places))


def test_a_sample_has_the_reach_and_the_errors_of_all_rows():
    lhs, rhs, g = _operands()
    lhs[1, 2], g[2, 1] = -500.0, 70.0  # not among the rows kept
    recipes = (get_recipe("fp8_rowwise"),)
    capture = Capture(recipes=recipes, max_rows=10)
    begun = jax.tree.map(lambda x: x + 64, capture.init(M, K, N))
    MEASURED.clear()
    operands = operands_of(*map(jnp.asarray, (lhs, rhs, g)), SCALES)
    found = capture.observe(begun, operands)
    kept = found.operands
    np.testing.assert_array_equal(kept.g, g[::4])
    np.testing.assert_allclose(kept.scales, [0.0, 0.25, 0.0])
    np.testing.assert_allclose(kept.amaxes, [500.0, np.abs(rhs).max(), 70.0])
    np.testing.assert_allclose(found.errors.sums[..., 2], 0.65)  # of step 64
    ((operands, used, axis_names),) = MEASURED
    assert (used, axis_names) == (recipes, ())
    np.testing.assert_array_equal(operands.lhs, lhs)
    np.testing.assert_array_equal(operands.g, g)
