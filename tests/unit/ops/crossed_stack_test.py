"""A cross network, alone and with layers behind or beside it, as one operation."""

import pytest

from loka_jax.ops.cross import Crossed, why_not
from loka_jax.ops.crossed_stack import (
    CrossedBeside,
    crossed_beside,
    crossed_stack,
    why_not_beside,
)
from loka_jax.ops.tailed_products import unit_of_fp8
from tests.support import tailed
from tests.support.tailed import BF16_DRHS, DELAYED, CrossedCase, Form

M, N, RANK = 47, 95, 31


@pytest.mark.parametrize(
    "case",
    [
        # Without layers, of sizes that are no multiples of 16.
        CrossedCase(DELAYED, None, 2, form=Form(m=31, widths=(93,))),
        CrossedCase(DELAYED),
        CrossedCase(BF16_DRHS, rank=None, is_beside=True),
    ],
    ids=str,
)
def test_results_are_those_of_the_equations_on_the_same_rounded_operands(case):
    tailed.assert_crossed_follows_the_equations(case, implementation="xla")


def plans_of(recipe, *widths):
    """Returns the plans of layers of these widths."""
    sizes = zip(widths, widths[1:], strict=False)
    return tuple(tailed.plan(recipe, M, *size) for size in sizes)


def test_what_is_not_served_is_refused():
    _, (x0, cross, layers, head), states, _ = tailed.crossed_operands(
        CrossedCase(DELAYED)
    )
    wide, own = plans_of(DELAYED, N, 32), plans_of(DELAYED, N, RANK, N)
    mixed = Crossed(x0, cross, states[0], ((own[0], *plans_of("bf16", RANK, N)),))
    with pytest.raises(ValueError, match="different choices"):
        crossed_stack(mixed, layers, states[1], plans=wide)
    crossed = mixed._replace(plans=(own,))
    with pytest.raises(ValueError, match="has another choice"):
        plans = plans_of("bf16", N, 32)
        crossed_beside(CrossedBeside(crossed, layers, (None,), plans), head)
    with pytest.raises(ValueError, match="needs a delayed-scaling state"):
        crossed_stack(crossed, layers, (None,), plans=wide)


def test_layers_beside_read_x0_as_the_network_does():
    def reason(recipe):
        return why_not_beside(*plans_of(DELAYED, N, N), plans_of(recipe, N, 32))

    # The same forms of x0: dlhs does not read it.
    assert reason(DELAYED) is reason(f"{DELAYED}/bf16/{DELAYED}") is None
    assert "another choice" in reason(BF16_DRHS)
    assert "does not scale every operand" in reason("fp8_rowwise")


def test_a_product_in_fp8_has_a_unit_of_the_root_of_its_terms():
    units = [unit_of_fp8(role, k) for role in ("fwd", "dlhs") for k in (16, 250, 4096)]
    assert units == [2.0**9, 2.0**11, 2.0**13, 2.0**7, 2.0**9, 2.0**11]


def test_a_network_that_is_not_served_has_a_reason():
    def reason(recipe, m=31):
        return why_not(tailed.cross_plans(m, 93, 47, recipe, 2))

    assert reason(DELAYED) is None and reason("bf16") is None
    assert "does not scale every operand by earlier amaxes" in reason("fp8_rowwise")
    assert "float32 is not bfloat16" in reason("f32")
    assert "no FP8 in fwd or dlhs" in reason(f"{DELAYED}/bf16/bf16")
    assert "no FP8 in fwd or dlhs" in reason(f"bf16/{DELAYED}/bf16")
    assert "m=24 is too far below" in reason(DELAYED, m=24)
