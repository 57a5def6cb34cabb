"""Expected numbers of distinct ids, against their definition and drawn ones."""

import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.data.distinct import expected_distinct
from loka_jax.data.planted import zipf_ids


@pytest.mark.parametrize("rows, zipf", [(3, 1.1), (50, 1.0), (20_000, 1.05)])
def test_it_is_the_sum_over_ids(rows, zipf):
    draws, q = 4096, 1 - zipf
    k = np.arange(1, rows + 1, dtype=np.float64)
    cdf = np.log(k) / np.log(rows) if q == 0 else (k**q - 1) / (rows**q - 1)
    exact = np.sum(1 - (1 - np.diff(cdf)) ** draws)
    # Ranges of ids beyond 4,096 take the mean of odds that differ by a thousandth.
    assert expected_distinct(rows, draws, zipf) == pytest.approx(exact, rel=1e-5)


def test_drawn_ids_have_that_many():
    rows, draws = (1000, 300_000), 20_000
    uniform = np.random.default_rng(0).random((draws, 2), np.float32)
    ids = np.asarray(zipf_ids(jnp.asarray(uniform), rows, 1.1))
    for field, count in enumerate(rows):
        expected = expected_distinct(count, draws, 1.1)
        # The variance of the number is below its mean.
        found = len(np.unique(ids[:, field]))
        assert abs(found - expected) < 5 * np.sqrt(expected)


def test_unknown_ids_are_at_most_rows_and_draws():
    assert expected_distinct(10, 100, None) == 10
    assert expected_distinct(100, 10, None) == 10
    assert expected_distinct(2, 10, 1.1) == 1  # id 0 does not occur
