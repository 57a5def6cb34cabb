"""Parts of a benchmark in processes of their own."""

import math

import pytest

from experiments.bench import apart


def test_a_part_that_fails_costs_no_other_result():
    found = []
    with pytest.RaisesGroup(pytest.RaisesExc(ValueError)):
        for call, root in apart.measured(math.sqrt, [(4.0,), (-1.0,), (9.0,)], 2):
            found.append((call, root))
    assert sorted(found) == [((4.0,), 2.0), ((9.0,), 3.0)]
