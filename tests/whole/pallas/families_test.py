"""The checks of Wukong's FM and LCB pass with the kernels themselves, interpreted."""

import pytest

from loka_jax.measure import families, family_pallas
from tests.support import pallas as support
from tests.support.pallas import interpret

__all__ = ["interpret"]


@pytest.mark.parametrize("name", ["fm_lcb", "fm_lcb_backward"])
def test_what_is_right_passes(name, interpret, monkeypatch):
    module = getattr(family_pallas, name)
    run = support.interpreted(getattr(module, name), interpret)
    monkeypatch.setattr(module, name, run)
    monkeypatch.setattr(family_pallas, "_BATCH", 5)  # on two SMs
    how = dict(compiled=lambda kernel: kernel, workers=1)
    assert families.why_wrong(name, **how) is None
