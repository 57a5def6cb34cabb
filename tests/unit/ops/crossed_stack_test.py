"""A cross network and layers behind or beside it as one operation."""

import pytest

from loka_jax.ops.cross import Crossed
from loka_jax.ops.crossed_stack import (
    CrossedBeside,
    crossed_beside,
    crossed_stack,
    why_not_beside,
)
from tests.support import tailed
from tests.support.tailed import BF16_DRHS, DELAYED, CrossedCase

M, N, RANK = 47, 95, 31


@pytest.mark.parametrize(
    "case",
    [CrossedCase(DELAYED), CrossedCase(BF16_DRHS, rank=None, is_beside=True)],
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
