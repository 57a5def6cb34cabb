"""The checks of Triton's families pass with the kernels themselves, interpreted."""

import pytest

from loka_jax.measure import families
from tests.support.triton import interpreted, skip_without_triton

__all__ = ["interpreted"]

skip_without_triton()

TRITON = [n for n, x in families.FAMILIES.items() if x.entries[0].startswith("triton")]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", TRITON)
def test_what_is_right_passes(name):
    how = dict(compiled=lambda kernel: kernel, workers=1)
    assert families.why_wrong(name, **how) is None
