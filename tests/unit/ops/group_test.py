"""Groups as one operation: results, states, precisions, and what is served."""

import dataclasses

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import scaling
from loka_jax.group import Cross, Dense, Group, Member
from loka_jax.normed import Epilogue
from loka_jax.ops.group import run_group, why_not
from loka_jax.ops.group_sites import LayerArrays, _joint_states, unit_of_fp8
from loka_jax.ops.plan import resolve
from loka_jax.recipe import get_recipe
from tests import support
from tests.support import tailed
from tests.support.tailed import BF16_DRHS, DELAYED, Form

RELU = Form("none", "relu", use_bias=True, m=47, widths=(95, 31, 63))


def test_results_are_those_of_the_equations_on_the_same_rounded_operands():
    form, by_layer = RELU._replace(ends_linear=True), (DELAYED, "bf16")
    tailed.assert_wide_follows_the_equations(form, by_layer, implementation="xla")


def equations_of(jaxpr, name):
    """Yields the operations of a name in a program, and in those within it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == name:
            yield equation
        for inner in jex.jaxprs_in_params(equation.params):
            yield from equations_of(inner, name)


def inference(form, plans):
    """Returns a function of x, the layers and their states."""
    group = tailed.wide_group(form, plans)

    def run(x, layers, states):
        each = tuple((layer,) for layer in layers)
        (y,) = run_group(group, plans, ((x,),), each, states, implementation="xla")
        return y

    return run


def test_inference_writes_nothing_for_a_backward_pass():
    form = Form(ends_linear=True, widths=(96, 272, 64))
    plans, x, layers, states, _ = tailed.wide_operands(form, (DELAYED, DELAYED))
    program = jax.make_jaxpr(inference(form, plans))(x, layers, states).jaxpr
    transposed = [e.invars[0].aval for e in equations_of(program, "transpose")]
    in_fp8 = [x.shape for x in transposed if x.dtype.itemsize == 1]
    assert in_fp8 == [layer.kernels[0].shape for layer in layers]
    assert not [x for x in transposed if x.shape == (form.m, form.widths[0])]


def test_inference_hands_fp8_on_and_gives_the_activations_of_training():
    by_layer = DELAYED, DELAYED
    plans, x, layers, states, _ = tailed.wide_operands(RELU, by_layer)
    y = support.jitted(inference(RELU, plans))(x, layers, states)
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
    found = plan.why_not
    if reason is None:
        assert found is None
        return
    assert reason in found
    layer = Dense(reads=0, member=Member("a", plan.spec), norm=Epilogue("none"))
    group = Group(rows=32, inputs=((64,),), layers=(layer,), outputs=(1,))
    x = jnp.zeros((spec["m"], spec["k"]), jnp.bfloat16)
    arrays = LayerArrays((jnp.zeros((spec["k"], spec["n"])),))
    with pytest.raises(ValueError, match="run_group: .*"):
        run_group(group, (plan,), ((x,),), ((arrays,),), (tailed.state(recipe),))


def test_scales_that_are_not_set_are_refused():
    plan = tailed.plan(DELAYED, 32, 64, 96)
    recipe = get_recipe(DELAYED)
    choice = dataclasses.replace(plan.choice, recipe=recipe)
    plan = resolve(plan.spec, choice, plan.device)
    assert plan.why_not == "delayed scales are not initialized"


def why_not_crossed(recipe, *widths, of_second="", m=47, layers=()):
    """Returns why a network, with layers that read its x0 too, is not one operation."""
    second = of_second or recipe
    named = zip((recipe, second), widths, strict=False)
    own = [tailed.plan(name, m, *size) for name, size in named]
    members = (tuple(Member(f"u_{i}", plan.spec) for i, plan in enumerate(own)),)
    beside = [tailed.plan(name, m, widths[0][0], 32) for name in layers]
    dense = [
        Dense(reads=0, member=Member(f"d_{i}", plan.spec), norm=Epilogue("none"))
        for i, plan in enumerate(beside)
    ]
    group = Group(
        rows=m,
        inputs=((widths[0][0],),),
        layers=(Cross(reads=0, members=members), *dense),
        outputs=(1,),
    )
    return why_not(group, [*own, *beside])


def test_a_cross_network_has_one_choice_in_fp8_at_fwd_and_dlhs():
    sizes = (95, 31), (31, 95)
    assert why_not_crossed(DELAYED, *sizes) is why_not_crossed("bf16", *sizes) is None
    for of_first, of_second, why, m in (
        (DELAYED, "bf16", "2 different choices", 47),
        ("fp8_rowwise", "", "does not scale every operand by earlier amaxes", 47),
        ("f32", "", "float32 is not bfloat16", 47),
        (f"{DELAYED}/bf16/bf16", "", "no FP8 in fwd or dlhs", 47),
        (f"bf16/{DELAYED}/bf16", "", "no FP8 in fwd or dlhs", 47),
        (DELAYED, "", "m=24 is too far below", 24),
    ):
        assert why in why_not_crossed(of_first, *sizes, of_second=of_second, m=m)


def test_sites_that_read_the_same_rows_read_them_alike():
    def reason(recipe):
        return why_not_crossed(DELAYED, (95, 95), layers=(recipe,))

    # The same forms of x0: dlhs does not read it.
    assert reason(DELAYED) is reason(f"{DELAYED}/bf16/{DELAYED}") is None
    assert "read the same rows differ in their choices" in reason(BF16_DRHS)
    assert "does not scale every operand" in reason("fp8_rowwise")


def test_a_state_that_is_missing_is_refused():
    plans, x, layers, _, _ = tailed.wide_operands(RELU, (DELAYED, DELAYED))
    with pytest.raises(ValueError, match="needs a delayed-scaling state"):
        inference(RELU, plans)(x, layers, (None, None))


def test_a_product_in_fp8_has_a_unit_of_the_root_of_its_terms():
    units = [unit_of_fp8(role, k) for role in ("fwd", "dlhs") for k in (16, 250, 4096)]
    assert units == [2.0**9, 2.0**11, 2.0**13, 2.0**7, 2.0**9, 2.0**11]


def test_states_of_one_recipe_lie_together_below_a_kibibyte_with_their_scales():
    # More of one recipe than lie together.
    recipes = (*(DELAYED,) * 4, "bf16", BF16_DRHS, *(DELAYED,) * 3)
    plans, states = [tailed.plan(name, 32, 64, 32) for name in recipes], []
    for i, recipe in enumerate(map(get_recipe, recipes)):
        amaxes = 2.0 ** jnp.arange(3.0 * i, 3 * i + 3)
        state = scaling.init_delayed(recipe) if recipe.is_delayed else None
        states.append(state and scaling.update_delayed(state, amaxes, recipe))
    joint = list(_joint_states(plans, states))
    assert [x.sites for x in joint] == [(0, 1), (2, 3), (6, 7), (8,), (5,)]
    assert all(x.tables.nbytes < 1024 for x in joint)
    for site, scales in (pair for x in joint for pair in x.scales()):
        found = [scale.value for scale in scales]
        np.testing.assert_array_equal(found, states[site].scale_inv)
