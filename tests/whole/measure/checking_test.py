"""The check of a candidate with delayed scales finds wrong maxima."""

import pytest

from loka_jax import scaling
from loka_jax.measure.checking import lower_check
from loka_jax.measure.compiling import compile_lowered
from loka_jax.recipe import OPERANDS
from loka_jax.site import Choice, SiteSpec
from tests.support import stand_ins


@pytest.fixture(scope="module")
def delayed():
    """Returns the check of a candidate with delayed scales, compiled once."""
    choice = Choice.parse("xla fp8_tensorwise_delayed")
    check = lower_check(SiteSpec(80, 32, 48, "none", "relu"), choice, stand_ins.HOPPER)
    return check, compile_lowered(check.programs)


@pytest.mark.parametrize("operand", [0, 1, 2])
@pytest.mark.parametrize("factor", [0.5, 2.0, 0.0])
def test_a_wrong_maximum_of_an_operand_is_found(delayed, operand, factor):
    check, compiled = delayed
    assert check.why_wrong(compiled) is None
    recipe = Choice.parse("xla fp8_tensorwise_delayed").recipe

    def training(*arguments):
        trained = compiled["training"](*arguments)
        factors = trained.state.history[:, 0].at[operand].multiply(factor)
        return trained._replace(state=scaling.stored(factors, recipe))

    reason = check.why_wrong({**compiled, "training": training})
    assert reason is not None and reason.startswith(f"{OPERANDS[operand]}: the next")


def test_the_maximum_of_activations_in_fp8_is_that_which_the_site_reports():
    recipe = "xla fp8_tensorwise_delayed"
    spec = SiteSpec(80, 32, 48, "none", "relu", fp8_in="tensorwise")
    check = lower_check(spec, Choice.parse(recipe), stand_ins.HOPPER)
    assert check.numerics is not None and check.numerics.reads_fp8
    assert check.why_wrong(compile_lowered(check.programs)) is None
