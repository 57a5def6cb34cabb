"""Wide layers as one operation: results, states, precisions, and what is served."""

import functools

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import pytest

from loka_jax.ops.device import local_device
from loka_jax.ops.plan import resolve
from loka_jax.ops.wide_stack import WideLayer, why_not, wide_runs, wide_stack
from loka_jax.recipe import get_recipe
from loka_jax.site import Choice, SiteSpec
from tests import support
from tests.support import tailed
from tests.support.tailed import DELAYED, Form

RELU = Form("none", "relu", use_bias=True, m=47, widths=(95, 31, 63))
NORMED = Form("layer", "swish", True, input_norm="rms", m=47, widths=(95, 31, 63))
CASES = [
    (NORMED, (DELAYED, DELAYED)),
    (RELU._replace(ends_linear=True), (f"bf16/{DELAYED}/{DELAYED}", DELAYED)),
]


@pytest.mark.parametrize("form, by_layer", CASES, ids=str)
def test_results_are_those_of_the_equations_on_the_same_rounded_operands(
    form, by_layer
):
    tailed.assert_wide_follows_the_equations(form, by_layer, implementation="xla")


def equations_of(jaxpr, name):
    """Yields the operations of a name in a program, and in those within it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == name:
            yield equation
        for inner in jex.jaxprs_in_params(equation.params):
            yield from equations_of(inner, name)


def test_inference_writes_nothing_for_a_backward_pass():
    form = Form(ends_linear=True, widths=(96, 272, 64))
    plans, x, layers, states, _ = tailed.wide_operands(form, (DELAYED, DELAYED))
    run = functools.partial(wide_stack, plans=plans, implementation="xla")
    program = jax.make_jaxpr(run)(x, layers, states).jaxpr
    transposed = [e.invars[0].aval for e in equations_of(program, "transpose")]
    in_fp8 = [x.shape for x in transposed if x.dtype.itemsize == 1]
    assert in_fp8 == [layer.kernel.shape for layer in layers]
    assert not [x for x in transposed if x.shape == (form.m, form.widths[0])]


def test_inference_hands_fp8_on_and_gives_the_activations_of_training():
    by_layer = DELAYED, DELAYED
    plans, x, layers, states, _ = tailed.wide_operands(RELU, by_layer)
    run = functools.partial(wide_stack, plans=plans, implementation="xla")
    y = support.jitted(run)(x, layers, states)
    expected = tailed.WideStack(RELU, layers, by_layer).forward(x)
    # One rounding to bfloat16 less, before that to FP8: of 2^-9, which flips a code of
    # E4M3 with a probability of 2^-6, by 2^-3: 2^-3 sqrt(2^-6) in the mean.
    tailed.assert_close(y, expected, 2.0**-6)


@pytest.mark.parametrize(
    "changes, recipe, reason",
    [
        ({}, DELAYED, None),
        ({"k": 13}, "bf16", None),
        ({"norm": "layer", "m": 31, "k": 63, "n": 95}, DELAYED, None),
        ({}, "fp8_rowwise", "does not scale every operand by earlier amaxes"),
        ({}, "f32", "float32 is not bfloat16"),
        ({"n": 40}, DELAYED, "n=40 is too far below a multiple of 16"),
        ({"out": "fp8"}, DELAYED, "hands FP8 on"),
        ({"fp8_in": "rowwise"}, DELAYED, "hands FP8 on, or takes it"),
    ],
)
def test_what_is_not_served_has_a_reason(changes, recipe, reason):
    spec = dict(m=32, k=64, n=96, norm="block", activation="relu") | changes
    plan = tailed.plan(recipe, **spec)
    found = why_not(plan)
    if reason is None:
        assert found is None
        return
    assert reason in found
    x = jnp.zeros((spec["m"], spec["k"]), jnp.bfloat16)
    layer = WideLayer(jnp.zeros((spec["k"], spec["n"])))
    with pytest.raises(ValueError, match="wide_stack: .*"):
        wide_stack(x, (layer,), (tailed.state(recipe),), plans=(plan,))


def test_scales_that_are_not_set_and_other_providers_are_refused():
    def reason(provider, recipe):
        return why_not(resolve(SiteSpec(32, 64, 96), Choice(provider, recipe), device))

    device, recipe = local_device(), get_recipe(DELAYED)
    assert reason("xla", recipe) == "delayed scales are not initialized"
    assert reason("pallas", recipe) == "provider 'pallas'"


@pytest.mark.parametrize(
    "widths, runs",
    [
        ((13, 512, 1024, 64), [range(1, 3)]),
        # Too narrow.
        ((1023, 496, 128), []),
        ((2048, 1024, 100, 512, 4096), [range(0, 1), range(3, 4)]),
    ],
)
def test_layers_that_are_served_run_together_if_one_is_wide(widths, runs):
    plans = tailed.wide_plans(Form(widths=widths), (DELAYED,) * (len(widths) - 1))
    assert wide_runs(plans) == runs
