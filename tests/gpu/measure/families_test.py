"""The kernels of all families pass their checks on this device."""

import pytest

from loka_jax.measure import families
from tests.support.triton import on_gpu, skip_without_triton

__all__ = ["on_gpu"]

skip_without_triton()

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_gpu")]


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_family_passes(name):
    assert families.why_wrong(name) is None
