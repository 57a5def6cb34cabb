"""What runs softmax attention, and what sites say of it."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen

from loka_jax import nn
from loka_jax.nn.context import site_context
from loka_jax.ops.device import HOPPER, Device
from loka_jax.ops.softmax_attention import plan_softmax_attention
from tests.support.nn import listed

CPU = Device(platform="cpu")


@pytest.mark.parametrize(
    "sizes, dtype, scale, device, reason",
    [
        ((64, 64), "bfloat16", 0.1, HOPPER, None),
        ((64, 64), "bfloat16", 0.1, CPU, "no Hopper GPU"),
        ((64, 64), "float32", 0.1, HOPPER, "rows in float32"),
        ((32, 48), "bfloat16", 0.1, HOPPER, None),
        ((64, 264), "bfloat16", 0.1, HOPPER, "heads of size 264, not 64, 128, 256"),
        ((64, 64), "bfloat16", -1.0, HOPPER, "scores times -1.0"),
    ],
)
def test_the_plan_says_why_xla_runs_it(sizes, dtype, scale, device, reason):
    q, v = (jax.ShapeDtypeStruct((9, 2, size), dtype) for size in sizes)
    plan = plan_softmax_attention(q, q, v, device, scale=scale)
    if reason is None:
        assert plan.why_xla is None
    else:
        assert reason in plan.why_xla


class Layer(linen.Module):
    @linen.compact
    def __call__(self, q, kernels):
        """Returns the attention of rows to themselves."""
        row = jnp.arange(len(q), dtype=jnp.int32)
        visible = nn.span_visibility(row, row + 1, len(q))
        how = dict(length=1, recipe="bf16", implementation=kernels)
        return nn.attend(q, q, q, visible, **how)


@pytest.mark.parametrize(
    "device, kernels, runs, reason",
    [
        (HOPPER, None, "pallas", None),
        (HOPPER, "xla", "xla", "provider 'xla'"),
        (CPU, None, "xla", "no Hopper GPU"),
    ],
)
def test_both_products_are_sites_that_say_what_runs_them(device, kernels, runs, reason):
    rows = jax.ShapeDtypeStruct((128, 2, 64), jnp.bfloat16)
    with site_context(device=device):
        sites = listed(Layer(), rows, kernels)
    assert sites.keys() == {"scores", "values"}
    for site in sites.values():
        assert {text.split()[0] for text in site.runs.values()} == {runs}
        assert site.why_not_fused == reason and "a batched product" in site.why_not
