"""Chains of sites: the cheapest path through all choices."""

import itertools
import math

import numpy as np
import pytest

from loka_jax.dispatch.chains import chain_times, fastest, hands_on
from loka_jax.dispatch.table import Entry
from loka_jax.site import Choice

NAMES = ("xla bf16", "pallas bf16", "pallas fp8_rowwise", "pallas fp8_tensorwise")
CHOICES = [Choice.parse(name) for name in NAMES]
FORMS = ("training", "training in", "training out", "training in out")


def _entry(seed: int) -> Entry:
    """Returns times that the form of a site changes at random."""
    rng = np.random.default_rng(seed)
    return Entry(
        {form: dict(zip(NAMES, rng.uniform(1, 9, 4), strict=True)) for form in FORMS}
    )


@pytest.mark.parametrize(
    "first, second, hands",
    [
        ("pallas bf16", "pallas fp8_rowwise", True),
        ("pallas fp8_rowwise", "pallas fp8_rowwise", True),
        ("pallas fp8_rowwise", "pallas bf16", False),
        ("pallas fp8_rowwise", "xla fp8_rowwise", False),
        ("xla bf16", "pallas fp8_rowwise", False),
        ("pallas fp8_rowwise", "pallas fp8_blockwise", False),
    ],
)
def test_kernels_hand_on_to_kernels_that_read_fp8(first, second, hands):
    assert hands_on(Choice.parse(first), Choice.parse(second)) is hands


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_no_other_row_is_faster(length, seed):
    entries = [_entry(10 * seed + i) for i in range(length)]
    found = fastest(entries, [CHOICES] * length, "training")
    times = [
        sum(chain_times(entries, row, "training"))
        for row in itertools.product(CHOICES, repeat=length)
    ]
    best = sum(chain_times(entries, found, "training"))
    np.testing.assert_allclose(best, min(times))


def test_what_was_not_measured_in_a_row_is_in_none():
    times = dict.fromkeys(NAMES, 5.0) | {"pallas fp8_rowwise": 1.0}
    entry = Entry({"training": times})
    rows = [Choice.parse("pallas fp8_rowwise")] * 2
    assert chain_times([entry, entry], rows, "training") == [math.inf, math.inf]
    found = fastest([entry, entry], [CHOICES] * 2, "training")
    assert sum(chain_times([entry, entry], found, "training")) == 6.0
