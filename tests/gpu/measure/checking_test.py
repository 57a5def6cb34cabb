"""Kernels are right at rows that fill no tile."""

import pytest

from loka_jax.measure.checking import why_wrong
from loka_jax.measure.programs import form_spec
from loka_jax.site import Choice, SiteSpec


# 5,000 rows are for all kernels, 49,999 for those that work by rows.
@pytest.mark.gpu
@pytest.mark.parametrize(
    "m, n, norm, form",
    [
        (5000, 256, "layer", "in out"),
        (5000, 256, "none", "out"),
        (5000, 2048, "rms", ""),
        (49_999, 256, "layer", "in out"),
        (49_999, 512, "block", "out"),
        (49_999, 1024, "rms", ""),
    ],
)
def test_rows_that_fill_no_tile_are_right_on_the_device(m, n, norm, form):
    spec = form_spec(SiteSpec(m, 256, n, norm, "swish", use_bias=True), form)
    names = ("fp8_tensorwise",) if spec.fp8_in else ("bf16", "fp8_tensorwise")
    choices = [Choice.parse(f"pallas {name}") for name in names]
    assert [why_wrong(spec, choice) for choice in choices] == [None] * len(names)
