"""Moments of rows against two passes over them in float64."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from loka_jax.probe import blocks
from loka_jax.probe.moments import (
    decay,
    empty_moments,
    merge,
    merge_over_devices,
    moments_of,
)
from tests.support import slow_except

pytestmark = pytest.mark.slow


def _rows(m, k, seed=0):
    """Returns rows whose features covary, some of them far from zero."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((m, k)) @ rng.standard_normal((k, k))
    return jnp.asarray(rows + 100 * rng.standard_normal(k), jnp.float32)


def _check(moments, rows, rtol=1e-4):
    rows = np.asarray(rows, np.float64)
    covariance = np.atleast_2d(np.cov(rows, rowvar=False))
    np.testing.assert_allclose(moments.count, rows.shape[0])
    np.testing.assert_allclose(moments.mean, rows.mean(0), rtol=1e-5)
    size = moments.scatter.shape[-1]
    for i, block in enumerate(np.asarray(moments.covariance)):
        part = covariance[i * size : (i + 1) * size, i * size : (i + 1) * size]
        used = part.shape[0]
        np.testing.assert_allclose(
            block[:used, :used], part, atol=rtol * np.abs(covariance).max()
        )
        assert not block[used:].any() and not block[:, used:].any()


def _update(moments, rows):
    """Returns the moments with some rows more."""
    if rows.shape[0] == 0:
        return moments
    return merge(moments, moments_of(rows, moments.scatter.shape[-1]))


@pytest.mark.parametrize("seed", slow_except(range(5), 0))
def test_any_split_gives_the_moments_of_one_pass(seed):
    rows = _rows(500, 12)
    cuts = np.sort(np.random.default_rng(seed).integers(0, 501, 6))
    moments = empty_moments(12)
    for part in np.split(np.asarray(rows), cuts):
        moments = _update(moments, jnp.asarray(part))
    _check(moments, rows)


def test_merging_is_associative_and_knows_nothing():
    a, b, c = (moments_of(_rows(m, 7, seed=m), 7) for m in (3, 50, 400))
    left, right = merge(merge(a, b), c), merge(a, merge(b, c))
    chex.assert_trees_all_close(left, right, rtol=1e-4, atol=1e-2)
    chex.assert_trees_all_close(merge(empty_moments(7), b), b, rtol=1e-6)
    chex.assert_trees_all_close(merge(b, empty_moments(7)), b, rtol=1e-6)


def test_devices_together_give_the_moments_of_one_pass():
    rows = _rows(8 * 40, 10)
    mesh = Mesh(np.asarray(jax.devices()[:8]), ("data",))
    spec = PartitionSpec("data")

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=spec, out_specs=PartitionSpec()
    )
    def together(rows):
        return merge_over_devices(moments_of(rows, 10), ("data",))

    _check(together(rows), rows)


def test_wide_rows_keep_blocks_within_the_memory_allowed():
    k, max_bytes = 100, 4 * 100 * 20
    moments = _update(empty_moments(k, max_bytes=max_bytes), _rows(300, k))
    assert moments.scatter.shape == (7, 16, 16)
    _check(moments, _rows(300, k))
    assert blocks.block_size(2048) == 2048 and blocks.block_size(123_200) == 32
    with pytest.raises(ValueError, match="variances take more"):
        blocks.block_size(1000, 100)


def test_decayed_rows_weigh_less():
    old, new = _rows(4000, 5), _rows(4000, 5, seed=1)
    moments = _update(decay(_update(empty_moments(5), old), 0.001), new)
    np.testing.assert_allclose(moments.mean, new.mean(0), atol=0.5)
    _check(_update(decay(_update(empty_moments(5), old), 0.0), new), new)


@pytest.mark.parametrize("rows", [jnp.ones((1, 4)), jnp.full((50, 4), 3.0)])
def test_rows_without_variance_have_none(rows):
    moments = _update(empty_moments(4), rows)
    chex.assert_trees_all_equal(moments.covariance, jnp.zeros((1, 4, 4)))
    chex.assert_trees_all_equal(moments.mean, rows[0])
