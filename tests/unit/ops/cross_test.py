"""A cross network as one operation: results, states, and what is served."""

from loka_jax.ops.cross import why_not
from loka_jax.ops.tailed_products import unit_of_fp8
from tests.support import tailed
from tests.support.tailed import DELAYED, CrossedCase, Form


def test_results_are_those_of_the_equations_on_the_same_rounded_operands():
    # Without layers, of sizes that are no multiples of 16.
    case = CrossedCase(DELAYED, None, 2, form=Form(m=31, widths=(93,)))
    tailed.assert_crossed_follows_the_equations(case, implementation="xla")


def test_a_product_in_fp8_has_a_unit_of_the_root_of_its_terms():
    units = [unit_of_fp8(role, k) for role in ("fwd", "dlhs") for k in (16, 250, 4096)]
    assert units == [2.0**9, 2.0**11, 2.0**13, 2.0**7, 2.0**9, 2.0**11]


def test_what_is_not_served_has_a_reason():
    def reason(recipe, m=31):
        return why_not(tailed.cross_plans(m, 93, 47, recipe, 2))

    assert reason(DELAYED) is None and reason("bf16") is None
    assert "does not scale every operand by earlier amaxes" in reason("fp8_rowwise")
    assert "float32 is not bfloat16" in reason("f32")
    assert "no FP8 in fwd or dlhs" in reason(f"{DELAYED}/bf16/bf16")
    assert "no FP8 in fwd or dlhs" in reason(f"bf16/{DELAYED}/bf16")
    assert "m=24 is too far below" in reason(DELAYED, m=24)
