"""The computed shuffle: a permutation for every size, and one that mixes."""

import numpy as np
import pytest

from loka_jax.data.permutation import key_of, mix, permute


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9, 100, 1023, 1025, 65_537])
def test_every_index_comes_exactly_once(size):
    out = permute(np.arange(size), size, key_of(1, 2))
    assert np.array_equal(np.sort(out), np.arange(size))


def test_parts_agree_with_the_whole():
    whole = permute(np.arange(1000), 1000, key_of(3))
    index = np.arange(1000).reshape(10, 100)
    parts = [permute(part, 1000, key_of(3)) for part in index]
    assert np.array_equal(whole, np.concatenate(parts))


def test_seed_and_epoch_are_told_apart():
    keys = {int(key_of(seed, epoch)) for seed in range(30) for epoch in range(30)}
    assert len(keys) == 900


def test_neighbours_land_far_apart():
    size = 100_000
    out = permute(np.arange(size), size, key_of(0, 0))
    # For random pairs |a - b| averages size / 3, with a deviation of 0.2 % of it.
    assert abs(np.abs(np.diff(out)).mean() / (size / 3) - 1) < 0.02
    assert abs(np.corrcoef(np.arange(size), out)[0, 1]) < 0.02


def test_every_batch_draws_from_the_whole_file():
    size, batch = 1 << 16, 1024
    out = permute(np.arange(size), size, key_of(5, 0)).reshape(-1, batch)
    in_eighths = np.stack([np.bincount(b >> 13, minlength=8) for b in out])
    # Hypergeometric: mean 128, deviation 10.5; 512 counts stay within 5 deviations.
    assert np.abs(in_eighths - 128).max() < 53


def test_epochs_have_unrelated_orders():
    size = 50_000
    a, b = (permute(np.arange(size), size, key_of(0, e)) for e in (0, 1))
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.02
    assert np.count_nonzero(a == b) < 12  # one is expected


def test_order_is_the_same_forever():
    # A change here reorders every run that resumes.
    out = permute(np.arange(8), 8, key_of(0, 0))
    assert out.tolist() == [4, 1, 6, 3, 0, 2, 5, 7]
    assert int(mix(np.array([1], np.uint64))[0]) == 0x5692161D100B05E5


def test_billions_of_rows_need_no_table():
    size = 3_000_000_000
    out = permute(np.arange(size - 1000, size), size, key_of(9, 9))
    assert len(np.unique(out)) == 1000
    assert out.min() >= 0 and size // 2 < out.max() < size
