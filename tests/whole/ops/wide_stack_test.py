"""Wide layers as one operation: every form and recipe, by XLA and by Triton."""

import functools

import jax
import pytest

from loka_jax.ops.wide_stack import wide_stack
from tests.support import hopper, tailed
from tests.support.tailed import BF16_DRHS, DELAYED, Form
from tests.support.triton import anywhere, interpreted, on_gpu

__all__ = ["anywhere", "interpreted", "on_gpu"]

ODD = dict(m=47, widths=(95, 271, 79, 63))  # no multiples of 16
FORMS = [
    Form(ends_linear=True, input_norm="rms"),
    Form("block", "relu", use_bias=True),
    Form("none", "relu", use_bias=True),
    Form("none", "relu", use_bias=True, ends_linear=True),
    Form("block", "swish", use_bias=True, input_norm="block", **ODD),
    Form("none", "gelu", use_bias=True, **ODD),
    Form("layer", "swish", ends_linear=True),
    Form("layer", "relu", use_bias=True, **ODD),
    Form("rms", "gelu", input_norm="layer", **ODD),
]
# Each with the recipes of three layers: every recipe with every kind of layer.
BY_LAYER = [
    (DELAYED,) * 3,
    (BF16_DRHS,) * 3,
    ("bf16",) * 3,
    (DELAYED, "bf16", BF16_DRHS),
    ("bf16", DELAYED, f"{DELAYED}/bf16/bf16"),
    (f"{DELAYED}/bf16/{DELAYED}", f"{DELAYED}/{DELAYED}/bf16", DELAYED),
    (f"bf16/{DELAYED}/{DELAYED}", f"bf16/bf16/{DELAYED}", "bf16"),
]
CASES = [(form, BY_LAYER[i % len(BY_LAYER)]) for i, form in enumerate(FORMS)]


@pytest.mark.parametrize("form, by_layer", CASES, ids=str)
def test_results_are_those_of_the_equations_on_the_same_rounded_operands(
    form, by_layer
):
    tailed.assert_wide_follows_the_equations(form, by_layer, implementation="xla")


RECIPES = DELAYED, BF16_DRHS, "bf16"


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(
    "form, recipe", [(form, RECIPES[i % 3]) for i, form in enumerate(FORMS)], ids=str
)
def test_tails_by_triton_give_the_results_of_xla(form, recipe):
    results = functools.partial(tailed.wide_results, form, (recipe,) * 3)
    tailed.assert_triton_gives_the_results_of_xla(results)


def program(form):
    """Returns a training step of a stack, compiled for an H200."""
    # Also raises ImportError if JAX has no CUDA plugin.
    pytest.importorskip("jax_triton", exc_type=ImportError)
    by_layer = (DELAYED,) * (len(form.widths) - 1)
    plans, *operands = tailed.wide_operands(form, by_layer)

    def step(x, layers, states, g):
        run = functools.partial(wide_stack, plans=plans, implementation="triton")
        y, pull = jax.vjp(run, x, layers, states)
        return y, pull(g)

    return hopper.compiled(step, *operands)


def test_padding_takes_no_pass_of_its_own_and_all_products_run_in_fp8():
    form = Form("layer", "swish", m=256, widths=(256, 1024, 512))
    even = program(form)
    odd = program(form._replace(m=255, widths=(255, 1023, 511)))
    assert hopper.fp8_gemms(odd) == hopper.fp8_gemms(even) == 6
    assert hopper.other_gemms(odd) == 0
    assert len(hopper.kernels(odd)) == len(hopper.kernels(even))


def test_states_take_no_kernels_of_each_layer():
    form = Form("none", "relu", m=1024, widths=(1024,) * 3)
    two = hopper.kernels(program(form))
    three = hopper.kernels(program(form._replace(widths=(1024,) * 4)))
    # Three products, the casts of the weight and of the activations, and the gradient.
    assert len(three) - len(two) == 6
    assert [x.opcode for x in three].count("fusion") <= 6
