"""Sites as one operation: every recipe and norm, and the kernels in the interpreter."""

import functools

import jax
import pytest

from loka_jax.ops.device import Device
from loka_jax.recipe import get_recipe
from tests.support import sites, tailed
from tests.support.pallas import assert_no_races, interpret  # noqa: F401
from tests.support.sites import Case, dense_norm, operands

DELAYED = "fp8_tensorwise_delayed"
TOO_WIDE = {"dense_norm": "too wide"}
WIDE = 112, 32, 2048  # so that kernels leave dlhs in FP8
CASES = [
    Case("bf16", "layer", "swish", {}),
    Case("bf16", "rms", "gelu"),
    Case("fp8_tensorwise", "none", "relu", {}, (63, 48, 80)),
    Case("fp8_tensorwise", "block", "gelu", {}, WIDE),
    Case("fp8_rowwise", "rms", "gelu", {}, (100, 47, 80)),
    Case("fp8_rowwise", "layer", "swish", {}, WIDE),
    Case("fp8_rowwise", "block", "swish", {"norm_backward": "odd"}, (64, 32, 80)),
    Case("fp8_rowwise", "layer", "gelu", TOO_WIDE | {"norm_quantize": "odd"}),
    Case("fp8_rowwise_bf16_drhs", "none", "swish", TOO_WIDE, (64, 32, 80)),
    Case(DELAYED, "layer", "swish", {}, (64, 32, 80)),
    Case(f"{DELAYED}:initialized", "block", "swish", {}, WIDE),
    Case(f"{DELAYED}_bf16_drhs:initialized", "rms", "gelu", {}, (64, 32, 80)),
    Case("fp8_blockwise", "layer", "swish", None, (144, 272, 160)),
    Case("f32", "block", "swish", None, (48, 32, 272)),
    Case("f32", "rms", "gelu"),
    Case("f32", "block", "hard_swish", None, (48, 32, 600)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_state_are_those_of_the_equations(case):
    provider = "served" if case.refusals else None
    sites.assert_follows_the_equations(case, provider=provider)


@pytest.fixture
def interpreter(interpret):  # noqa: F811
    return Device(platform="cpu", interpret=interpret)


@pytest.mark.parametrize(
    "case",
    [
        Case("bf16", "none", "relu", {}, (112, 64, 128)),
        Case("fp8_tensorwise", "rms", "gelu", {}, (112, 64, 128)),
        Case(f"{DELAYED}_bf16_drhs", "block", "swish", {}, (112, 64, 128)),
        # In two kernels: the fused one takes rows in multiples of 8.
        Case("bf16", "layer", "swish", TOO_WIDE, (100, 64, 128)),
    ],
    ids=str,
)
def test_kernels_follow_the_equations(interpreter, case):
    sites.assert_follows_the_equations(case, device=interpreter, limit=2.0**-7)
    assert_no_races()


def test_kernels_under_vmap_run_one_by_one(interpreter):
    lhs, rhs, dy = operands(128, 64, 128)
    lhs, dy = lhs.reshape(2, 64, 64), dy.reshape(2, 64, 128)

    def gradients(lhs, dy, **route):
        f = lambda lhs, rhs: dense_norm(  # noqa: E731
            lhs, rhs, norm="layer", recipe=get_recipe("bf16"), **route
        )
        y, pull = jax.vjp(f, lhs, rhs)
        return y, pull(dy)

    by_kernels = functools.partial(gradients, device=interpreter)
    found = jax.jit(jax.vmap(by_kernels))(lhs, dy)
    tailed.assert_close(found, jax.vmap(gradients)(lhs, dy), 2.0**-6)
