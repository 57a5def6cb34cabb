"""Flip-flop against the equations of its module in numpy."""

import functools

import chex
import jax
import numpy as np
import pytest
from scipy.linalg import block_diag

from loka_jax.probe import matrix_normal
from loka_jax.probe.matrix_normal import empty_weights

K, N = 3, 5
_update = jax.jit(matrix_normal.update, static_argnames="moves_covariances")
WHOLE, BLOCKS = 4 * N * N, 4 * N * 3  # bytes: of all columns, of blocks of two


def _weights(count, seed=0):
    """Returns weights whose rows covary, of very different columns."""
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((K, K))
    sizes = 2.0 ** np.arange(N)
    return np.float32(5 + mix @ rng.standard_normal((count, K, N)) * sizes)


def _mask(size, block):
    """Returns 1 where two features are of one block."""
    of = np.arange(size) // block
    return np.equal.outer(of, of).astype(float)


def _factor(covariance):
    """Returns the factor of a covariance and a millionth of its mean variance."""
    eps = 1e-6 * np.mean(np.diagonal(covariance))
    return np.linalg.cholesky(covariance + eps * np.eye(len(covariance)))


def _expected(weights, row_block, column_block, m=0.9, p=0.5):
    """Returns mean, U and V after some weights, by the equations of the module."""
    mean, u, v, moves = np.zeros((K, N)), np.eye(K), None, 0
    for i, w in enumerate(weights.astype(np.float64)):
        wc = w - mean
        mean = mean + (1 - p) / (1 - p ** (i + 1)) * wc
        if i == 0:
            continue
        wc *= np.sqrt((1 + p) / 2)
        v = np.mean(wc**2) * np.eye(N) if v is None else v
        rate = max(1 - m, 1 / (moves + 1 + 8 * N / K))
        white = np.linalg.solve(_factor(v), wc.T).T
        u = (1 - rate) * u + rate * white @ white.T / N * _mask(K, row_block)
        u *= K / np.trace(u)
        white = np.linalg.solve(_factor(u), wc)
        v = (1 - rate) * v + rate * white.T @ white / K * _mask(N, column_block)
        moves += 1
    return mean, u, v


def _joined(blocks, size):
    """Returns a covariance from its diagonal blocks."""
    whole = block_diag(*np.asarray(blocks))
    assert not whole[size:].any() and not whole[:, size:].any()
    return whole[:size, :size]


def _learn(weights, **options):
    update = functools.partial(_update, **options)
    return functools.reduce(update, weights, empty_weights(K, N))


@pytest.mark.parametrize("max_bytes, block", [(WHOLE, N), (BLOCKS, 2)])
def test_mean_and_covariances_follow_the_equations(max_bytes, block, monkeypatch):
    # Rates of the prior at first, and then those of the momentum.
    weights = _weights(8)
    monkeypatch.setattr(matrix_normal.blocks, "MAX_BYTES", max_bytes)
    monkeypatch.setattr(matrix_normal, "_MOMENTUM", 0.93)
    jax.clear_caches()
    found = _learn(weights)
    mean, rows, columns = _expected(weights, K, block, m=0.93)
    assert found.columns.shape[-1] == block
    assert (found.steps, found.moves) == (8, 7)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-4)
    for blocks, expected in ((found.rows, rows), (found.columns, columns)):
        tolerance = 1e-3 * np.abs(expected).max()
        joined = _joined(blocks, len(expected))
        np.testing.assert_allclose(joined, expected, rtol=1e-3, atol=tolerance)
    np.testing.assert_allclose(np.trace(rows), K)


def test_the_mean_can_move_alone():
    weights = _weights(8)
    alone = _learn(weights, moves_covariances=False)
    mean, *_ = _expected(weights, K, N)
    np.testing.assert_allclose(alone.mean, mean, rtol=1e-4)
    assert (alone.steps, alone.moves) == (8, 0)
    chex.assert_trees_all_equal(alone.rows, empty_weights(K, N).rows)
