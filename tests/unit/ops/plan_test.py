"""What runs at a site for a choice on a device, and the reasons."""

import pytest

from loka_jax import triton
from loka_jax.ops import device
from loka_jax.ops.plan import describe, resolve, resolve_served
from loka_jax.recipe import get_recipe
from loka_jax.site import Choice, SiteSpec
from tests.support import stand_ins

SPEC = SiteSpec(64, 32, 48, norm="layer")
TOO_WIDE = {"dense_norm": "too wide"}


def pallas(name, spec=SPEC, device=stand_ins.HOPPER):
    return resolve(spec, Choice("pallas", get_recipe(name)), device)


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


@pytest.mark.parametrize(
    "name, sizes, reason",
    [
        ("f32", (64, 32, 48), "recipe 'f32' computes in float32"),
        ("fp8_blockwise", (64, 128, 128), "recipe 'fp8_blockwise' scales in blocks"),
        ("bf16", (0, 32, 48), "m=0"),
        ("fp8_rowwise", (64, 33, 48), "k=33 is too far below a multiple of 16"),
    ],
)
def test_recipes_and_sizes_without_kernels_have_a_reason(name, sizes, reason):
    plan = pallas(name, SiteSpec(*sizes, norm="layer"))
    assert kernels(plan) == (None, None)
    assert plan.why_not == plan.fwd.why_not_kernel == reason


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
    assert "k=40 is too far below a multiple of 16" in refusal("fp8_rowwise", k=40)


XLA, NORM = "xla bf16", ", pallas norm"


@pytest.mark.parametrize(
    "name, fp8_in, sizes, texts",
    [
        ("bf16", None, (1, 32, 48), ("pallas bf16", XLA + NORM, XLA)),
        (
            "fp8_tensorwise",
            "rowwise",
            (1, 32, 48),
            (
                "pallas fp8 e4m3 rowwise x tensorwise",
                XLA + NORM,
                "xla fp8 e4m3 tensorwise",
            ),
        ),
        # Over many features dlhs is in FP8.
        (
            "fp8_tensorwise_delayed",
            None,
            (64, 32, 2048),
            (
                "pallas fp8 e4m3 tensorwise",
                "xla fp8 e4m3 rowwise x tensorwise" + NORM,
                "xla fp8 e4m3 tensorwise",
            ),
        ),
        (
            "fp8_tensorwise_delayed:initialized",
            "tensorwise",
            (64, 32, 2048),
            (
                "pallas fp8 e4m3 tensorwise",
                "xla fp8 e4m3 tensorwise" + NORM,
                "xla fp8 e4m3 tensorwise",
            ),
        ),
    ],
)
def test_a_plan_is_described_in_words(name, fp8_in, sizes, texts):
    spec = SiteSpec(*sizes, norm="layer", fp8_in=fp8_in)
    assert tuple(describe(pallas(name, spec)).values()) == texts
