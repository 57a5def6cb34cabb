"""What is learned of rows, and drawn, against numpy."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.probe import blocks, moments, row_norms, sampling
from loka_jax.probe.matrix_normal import MatrixNormal
from loka_jax.probe.moments import empty_moments, moments_of
from loka_jax.probe.row_norms import norms_of
from loka_jax.probe.sampling import sample_rows, sample_weight
from loka_jax.probe.site import ProbeConfig

K = 7
_merge = jax.jit(moments.merge)
_of = jax.jit(moments_of, static_argnums=1)
_factor = jax.jit(blocks.factor)


def _rows(m, seed=0):
    """Returns rows whose features covary, some of them far from zero."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((m, K)) @ rng.standard_normal((K, K))
    return np.float32(rows + 100 * rng.standard_normal(K))


def _check(found, rows, weights=None):
    """Asserts that moments are those of rows, repeated by their weights."""
    weights = np.ones(len(rows)) if weights is None else weights
    rows, total = rows.astype(np.float64), np.sum(weights)
    mean = weights @ rows / total
    scatter = (rows - mean).T * weights @ (rows - mean)
    np.testing.assert_allclose(found.count, total, rtol=1e-6)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-5)
    # Elements of all blocks, and none beside them.
    count, size, _ = found.scatter.shape
    padded = np.pad(scatter, (0, -K % size)).reshape(count, size, count, size)
    expected = padded[range(count), :, range(count)]
    for x, divisor in ((found.scatter, 1), (found.covariance, max(total - 1, 1))):
        atol = 1e-4 * np.abs(scatter).max() / divisor
        np.testing.assert_allclose(x, expected / divisor, rtol=0, atol=atol)


@pytest.mark.parametrize("max_bytes", [4 * K * K, 4 * K * 3], ids=["whole", "blocks"])
def test_rows_in_parts_give_the_moments_of_one_pass(max_bytes, monkeypatch):
    monkeypatch.setattr(blocks, "MAX_BYTES", max_bytes)
    rows, empty = _rows(60), empty_moments(K)
    size = empty.scatter.shape[-1]
    assert size == (K if max_bytes == 4 * K * K else 2)
    a, b, c = (_of(part, size) for part in np.split(rows, [3, 20]))
    left = _merge(_merge(_merge(empty, a), b), c)
    _check(left, rows)
    chex.assert_trees_all_close(left, _merge(a, _merge(b, c)), rtol=1e-4, atol=1e-2)
    chex.assert_trees_all_close(_merge(a, empty), a, rtol=1e-6)


def test_devices_together_give_the_moments_of_one_pass():
    rows = _rows(60).reshape(3, 20, K)

    @functools.partial(jax.vmap, axis_name="data", out_axes=None)
    def together(rows):
        return moments_of(rows, 3, ("data",))

    _check(jax.jit(together)(rows), rows.reshape(-1, K))


def test_earlier_rows_count_less_by_a_decay():
    earlier, later = _rows(20), _rows(40, seed=1)
    merged = _merge(_of(earlier, 3), _of(later, 3), 0.5)
    weights = np.repeat([0.5, 1.0], [20, 40])
    _check(merged, np.concatenate([earlier, later]), weights)


SIZE = 3  # of blocks: two are full, and two features of the third are padding


@jax.jit
def _all(x, covariance):
    """Returns the parts of rows, their join, factors, products and solutions."""
    parts, factors = blocks.split(x, SIZE), blocks.factor(covariance)
    after = blocks.times(parts, factors), blocks.solve(factors, parts)
    return parts, blocks.join(parts, K), factors, *after


def test_blocks_are_split_joined_factored_multiplied_and_solved():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, K)).astype(np.float32)
    a = rng.standard_normal((3, SIZE, SIZE)) * np.array([1, 4, 9])[:, None, None]
    covariance = a @ a.swapaxes(1, 2)
    parts, joined, factors, product, solution = _all(x, np.float32(covariance))
    padded = np.pad(x, ((0, 0), (0, 2))).reshape(5, 3, SIZE)
    np.testing.assert_array_equal(parts, padded)
    np.testing.assert_array_equal(joined, x)
    eps = 1e-6 * np.mean(np.diagonal(covariance, axis1=1, axis2=2))
    lower = np.linalg.cholesky(covariance + eps * np.eye(SIZE))
    close = functools.partial(np.testing.assert_allclose, atol=1e-3)
    close(factors, lower, rtol=1e-3, atol=1e-4)
    close(product, np.einsum("mbs,bts->mbt", padded, lower), rtol=1e-3)
    close(np.einsum("mbs,bts->mbt", np.asarray(solution), lower), padded)


def test_every_variance_gets_a_millionth_of_the_mean_of_all_blocks():
    covariance = np.zeros((2, 2, 2), np.float32)
    assert np.all(np.isfinite(_factor(covariance)))
    covariance[0] = 4.0  # of rank 1
    found = _factor(covariance)
    np.testing.assert_allclose(found[1], 2e-6**0.5 * np.eye(2), rtol=1e-3)
    np.testing.assert_allclose(found[0, 1, 1] ** 2, 4e-6, rtol=0.2)


def test_a_block_is_all_features_or_the_largest_power_of_two_that_fits(monkeypatch):
    assert blocks.block_size(2048) == 2048 and blocks.block_size(2049) == 1024
    for max_bytes, size in ((40_000, 100), (39_999, 64), (400, 1)):
        monkeypatch.setattr(blocks, "MAX_BYTES", max_bytes)
        assert blocks.block_size(100) == size
    monkeypatch.setattr(blocks, "MAX_BYTES", 4 * 100 - 1)
    with pytest.raises(ValueError, match="100 variances take more"):
        blocks.block_size(100)


LOWEST, BINS = -56, 160  # half octaves from 2^-56 on
_norms_of = jax.jit(norms_of)
_scales = jax.jit(row_norms.sample_scales, static_argnums=2)


def test_rows_are_counted_by_their_size_about_the_centre():
    sizes = 2.0 ** np.array([-20.2, -20.2, -3.3, 0.2, 0.7, 9.8])
    # A row about the centre is as large as each of its elements.
    centre = np.float32(np.where(np.arange(K) == 2, 0.0, 2.0**-4))
    signs = np.where(np.arange(K) % 3 > 0, 1, -1)
    rows = np.float32(centre + sizes[:, None] * signs)
    places = np.floor(2 * (np.log2(sizes) - LOWEST)).astype(int)
    # Beside 2^-4, float32 holds 2^-20 to 1 %: a quarter of a bin is 9 %.
    expected = np.bincount(places, minlength=BINS)
    np.testing.assert_array_equal(_norms_of(rows, centre), expected)


@pytest.mark.parametrize("size, place", [(0.0, 0), (1e-30, 0), (1e10, -1)])
def test_rows_beyond_the_bins_are_in_the_outer_ones(size, place):
    norms = _norms_of(np.full((6, K), size, np.float32), np.zeros(K, np.float32))
    assert norms[place] == jnp.sum(norms) == 6
    # Drawn sizes of one bin are about equal.
    np.testing.assert_allclose(_scales(jax.random.key(0), norms, 4000), 1.0, rtol=0.2)


def test_drawn_sizes_have_the_shares_that_were_seen():
    counts = np.zeros(BINS, np.float32)
    counts[[100, 105, 110]] = 1, 2, 5  # 2.5 octaves apart
    scales = np.asarray(_scales(jax.random.key(0), counts, 4000))
    np.testing.assert_allclose(np.mean(scales**2), 1.0, rtol=0.05)
    octaves = np.log2(scales / scales.max())
    for centre, share in ((-5.0, 1 / 8), (-2.5, 2 / 8), (0.0, 5 / 8)):
        inside = octaves[np.abs(octaves + 0.25 - centre) < 1.25]
        # Three standard deviations of 4,000 draws.
        np.testing.assert_allclose(len(inside) / 4000, share, atol=0.023)
        np.testing.assert_allclose(inside.mean() + 0.25, centre, atol=0.03)
        assert np.ptp(inside) <= 0.5 + 1e-5  # within a bin


N, BLOCK, DRAWS = 3, 2, 20_000
_draw_rows = jax.jit(sample_rows, static_argnums=2)


def _covariance(size, seed):
    a = np.random.default_rng(seed).standard_normal((size, size))
    return np.float32(a @ a.T + 0.1 * np.eye(size))


def _assert_has(drawn, mean, covariance):
    """Asserts that draws have a mean and covariance, within five deviations."""
    variances, five = np.diagonal(covariance), 5 / len(drawn) ** 0.5
    off = np.abs(drawn.mean(0) - mean)
    assert np.all(off <= five * np.sqrt(variances) + 1e-5)
    spread = np.sqrt(np.outer(variances, variances) + covariance**2)
    off = np.abs(np.cov(drawn, rowvar=False) - covariance)
    assert np.all(off <= five * spread + 1e-5)


def test_rows_have_the_learned_moments():
    rows = _rows(400) * np.float32(2.0 ** np.arange(K))
    learned, blocks = moments_of(rows, BLOCK), np.arange(K) // BLOCK
    norms = jnp.zeros(BINS)  # of no rows: Gaussian, as in the paper
    drawn = _draw_rows(jax.random.key(2), learned, DRAWS, norms)
    drawn = np.asarray(drawn, np.float64)
    covariance = np.cov(rows.astype(np.float64), rowvar=False)
    _assert_has(drawn, rows.mean(0), covariance * np.equal.outer(blocks, blocks))


def test_weights_have_the_learned_mean_and_covariances():
    rows, columns = _covariance(K, 1), _covariance(N, 2)
    mean = np.arange(K * N, dtype=np.float32).reshape(K, N)
    zero = jnp.zeros(())
    normal = MatrixNormal(zero, zero, mean, rows[None], columns[None])
    keys = jax.random.split(jax.random.key(7), DRAWS)
    drawn = jax.jit(jax.vmap(sample_weight, (0, None)))(keys, normal)
    drawn = np.asarray(drawn, np.float64)
    stacked = drawn.swapaxes(1, 2).reshape(DRAWS, -1)  # columns, one below another
    _assert_has(stacked, mean.T.ravel(), np.kron(columns, rows).astype(np.float64))


def test_learned_operands_are_drawn_from_the_statistics_of_each(monkeypatch):
    shapes = jax.eval_shape(lambda: ProbeConfig().init(6, 4, 3))
    stats = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    for name, value in (("lhs", 1.001), ("g", 2.001)):
        rows = getattr(stats, name)
        rows = jax.tree.map(lambda x, value=value: x + np.float32(value), rows)
        stats = stats._replace(**{name: rows})

    def drawn_rows(key, moments, m, norms):
        np.testing.assert_array_equal(norms, moments.mean[0])
        return jnp.tile(moments.mean[None], (m, 1))

    monkeypatch.setattr(sampling, "sample_rows", drawn_rows)
    monkeypatch.setattr(sampling, "sample_weight", lambda key, x: x.mean)
    with jax.disable_jit():
        drawn = sampling.draw_learned(jax.random.key(0), stats, 6)
    # Of lhs and g, values that bfloat16 holds.
    assert (drawn.lhs[0, 0], drawn.g[0, 0]) == (1.0, 2.0)
    assert [x.shape for x in drawn[:3]] == [(6, 4), (4, 3), (6, 3)]
