"""What runs at a site for a choice on a device, and the reasons."""

import pytest

from loka_jax import triton
from loka_jax.ops import device
from loka_jax.ops.plan import describe, resolve, resolve_served
from loka_jax.recipe import get_recipe
from loka_jax.site import Choice, SiteSpec
from tests.support import stand_ins
from tests.support.recipes import recipe_of

SPEC = SiteSpec(64, 32, 48, norm="layer")
TOO_WIDE = {"dense_norm": "too wide"}


def pallas(name, spec=SPEC, device=stand_ins.HOPPER):
    return resolve(spec, Choice("pallas", recipe_of(name)), device)


def kernels(plan):
    """Returns the names of the kernels of the forward and backward passes."""
    return tuple(role.kernel and role.kernel.name for role in (plan.fwd, plan.dlhs))


def test_kernels_run_on_a_hopper_gpu_only():
    recipe = get_recipe("bf16")
    plan = resolve_served(SPEC, recipe, stand_ins.CPU)
    assert kernels(plan) == (None, None) and plan.why_not is None
    assert plan.fwd.why_not_kernel == plan.dlhs.why_not_kernel == "no Hopper GPU"
    assert pallas("bf16").is_fused
    by_xla = resolve(SPEC, Choice("xla", recipe), stand_ins.HOPPER)
    assert kernels(by_xla) == (None, None) and by_xla.refusal is None
    assert pallas("bf16", device=stand_ins.CPU).why_not == "no Hopper GPU"


@pytest.mark.parametrize(
    "refusals, expected, why_not, refusal",
    [
        ({}, ("dense_norm", "norm_backward"), None, None),
        ({"norm_backward": "odd"}, ("dense_norm", None), None, "odd"),
        (TOO_WIDE, ("norm_quantize", "norm_backward"), None, None),
        (TOO_WIDE | {"norm_quantize": "odd"}, (None, None), "too wide", "too wide"),
    ],
)
def test_a_kernel_that_refuses_leaves_its_part_to_xla(
    refusals, expected, why_not, refusal
):
    device = stand_ins.hopper(**refusals)
    plan = pallas("fp8_rowwise", device=device)
    assert kernels(plan) == expected
    assert (plan.why_not, plan.refusal) == (why_not, refusal)
    assert plan.fwd.why_not_kernel == refusals.get("dense_norm")
    served = resolve_served(SPEC, get_recipe("fp8_rowwise"), device)
    assert kernels(served) == expected and served.why_not is None


def test_sizes_keep_a_role_out_of_fp8():
    plan = resolve(SiteSpec(20, 32, 48), Choice.parse("xla fp8_rowwise"), stand_ins.CPU)
    assert plan.fwd.gemm is plan.drhs.gemm is None
    assert plan.drhs.why_not_fp8 == "k=20 is too far below a multiple of 16"
    # XLA runs it in the compute dtype, but it is no candidate.
    assert plan.why_not is None
    assert plan.refusal == "fwd: m=20 is too far below a multiple of 16"
    # Kernels pad fewer rows than a tile's.
    padded = pallas("fp8_rowwise", SiteSpec(20, 32, 48))
    assert padded.refusal is None and padded.padding == 44


@pytest.mark.parametrize(
    "m, n, is_fused, padding, reason",
    [
        (49_999, 256, False, 0, "m=49999 is not a multiple of 8"),
        # Only the fused kernel serves 64 columns.
        (49_999, 64, True, 49, None),
        (63, 256, True, 1, None),
    ],
)
def test_rows_are_padded_where_no_kernel_takes_them(m, n, is_fused, padding, reason):
    plan = pallas("bf16", SiteSpec(m, 256, n, "layer"), device.HOPPER)
    found = plan.is_fused, plan.padding, plan.fwd.why_not_kernel
    assert found == (is_fused, padding, reason)


@pytest.mark.skipif(triton.why_not_installed() is not None, reason="needs triton")
def test_triton_multiplies_in_fp8_on_a_gpu():
    def refusal(name, k=32):
        choice, spec = Choice.parse(f"triton {name}"), SiteSpec(64, k, 48)
        assert resolve(spec, choice, stand_ins.CPU).why_not == "no GPU"
        return resolve(spec, choice, stand_ins.HOPPER).refusal

    assert refusal("fp8_rowwise") is None
    assert "it multiplies in FP8 only" in refusal("bf16")
    assert "'mxfp8' is multiplied by XLA only" in refusal("mxfp8")
    assert "k=40 is too far below a multiple of 16" in refusal("fp8_rowwise", k=40)


def test_a_plan_is_described_in_words():
    def described(name, sizes, **options):
        spec = SiteSpec(*sizes, norm="layer", **options)
        return [*describe(pallas(name, spec)).values()]

    words = ["pallas bf16", "xla bf16, pallas norm", "xla bf16"]
    assert described("bf16", (1, 32, 48)) == words
    found = described("fp8_tensorwise", (1, 32, 48), fp8_in="rowwise")
    words = ["pallas fp8 e4m3 rowwise x tensorwise", words[1]]
    assert found == [*words, "xla fp8 e4m3 tensorwise"]
    # Over many features dlhs is in FP8.
    by_row, of_all = "xla fp8 e4m3 rowwise x tensorwise", "xla fp8 e4m3 tensorwise"
    for name, dlhs in (("", by_row), (":initialized", of_all)):
        found = described(f"fp8_tensorwise_delayed{name}", (64, 32, 2048))
        assert found == ["pallas fp8 e4m3 tensorwise", f"{dlhs}, pallas norm", of_all]
