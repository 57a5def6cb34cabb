"""Groups as one operation: every form and recipe, by XLA and by Triton."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from loka_jax.group import Dense, Group, Member
from loka_jax.measure import reference
from loka_jax.normed import Epilogue
from loka_jax.ops.group import run_group
from loka_jax.ops.group_sites import LayerArrays
from loka_jax.site import SiteSpec
from loka_jax.unbiased import uniform
from loka_jax.xla import ACTIVATIONS
from tests import support
from tests.support import hopper, tailed
from tests.support.tailed import BF16_DRHS, DELAYED, CrossedCase, Form
from tests.support.triton import anywhere, interpreted, on_gpu

__all__ = ["anywhere", "interpreted", "on_gpu"]

ODD_FORM = dict(m=47, widths=(95, 271, 79, 63))  # no multiples of 16
FORMS = [
    Form(ends_linear=True, input_norm="rms"),
    Form("block", "relu", use_bias=True),
    Form("none", "relu", use_bias=True),
    Form("none", "relu", use_bias=True, ends_linear=True),
    Form("block", "swish", use_bias=True, input_norm="block", **ODD_FORM),
    Form("none", "gelu", use_bias=True, **ODD_FORM),
    Form("layer", "swish", ends_linear=True),
    Form("layer", "relu", use_bias=True, **ODD_FORM),
    Form("rms", "gelu", input_norm="layer", **ODD_FORM),
    Form("layer", "gelu", use_bias=True, dropout=0.25, **ODD_FORM),
    Form("none", "relu", use_bias=True, dropout=0.5),
    Form("none", "tanh", use_bias=True),
    Form("rms", "exact_gelu", **ODD_FORM),
    Form("layer", "sigmoid"),
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
ODD_SIZES = dict(m=47, widths=(95, 31, 63))
CASES += [
    (
        Form("layer", "swish", True, False, "rms", dropout=0.25, **ODD_SIZES),
        (DELAYED,) * 2,
    ),
    (Form("none", "relu", True, True, dropout=0.5, **ODD_SIZES), (DELAYED, "bf16")),
    (
        Form("none", "relu", True, True, **ODD_SIZES),
        (f"bf16/{DELAYED}/{DELAYED}", DELAYED),
    ),
]


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
    group = tailed.wide_group(form, plans)

    def step(x, layers, states, g):
        def run(x, layers, states):
            each = tuple((layer,) for layer in layers)
            how = dict(implementation="triton")
            return run_group(group, plans, ((x,),), each, states, **how)

        y, pull = jax.vjp(run, x, layers, states)
        return y, pull((g,))

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


def alone(recipe, rank, depth, *, has_bias=True, m=32, n=96):
    """Returns a network without layers."""
    form = Form(m=m, widths=(n,))
    return CrossedCase(recipe, rank, depth, form=form, has_bias=has_bias)


ODD = dict(m=31, n=93)
TWO_LAYERS = CrossedCase("").form._replace(widths=(95, 63, 32))


@pytest.mark.parametrize(
    "case, limit",
    [
        # Of three layers the errors of a flipped rounding grow from one to the next.
        (alone(BF16_DRHS, 48, 3), 2.0**-8),
        (alone(DELAYED, 47, 3, has_bias=False, **ODD), 2.0**-8),
        (alone("bf16", 47, 1, **ODD), 2.0**-8),
        (alone(DELAYED, None, 3), 2.0**-8),
        (alone(BF16_DRHS, None, 1, has_bias=False), 2.0**-8),
        (alone("bf16", 48, 5), 2.0**-7),
        (alone("bf16", None, 5), 2.0**-7),
        (CrossedCase(DELAYED, 31, 2, form=TWO_LAYERS), 2.0**-8),
        (CrossedCase(DELAYED, None, 2, is_beside=True, form=TWO_LAYERS), 2.0**-8),
        (CrossedCase("bf16", is_beside=True), 2.0**-8),
        # Without layers, of sizes that are no multiples of 16.
        (CrossedCase(DELAYED, None, 2, form=Form(m=31, widths=(93,))), 2.0**-8),
        (CrossedCase(BF16_DRHS, rank=None, is_beside=True), 2.0**-8),
    ],
    ids=str,
)
def test_networks_follow_the_equations(case, limit):
    tailed.assert_crossed_follows_the_equations(case, implementation="xla", limit=limit)


# Other roundings to bfloat16 (2^-9) flip a code of E4M3, of steps of 2^-3, with a
# probability of 2^-6, which is an error of 2^-3: in the mean 2^-3 sqrt(2^-6). The
# gradients of four products are cast so, one after the other.
LIMITS = {"bf16": 2.0**-8, DELAYED: 2.0**-5, BF16_DRHS: 2.0**-5}


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(
    "case, limit",
    [
        (alone(DELAYED, 48, 2, has_bias=False), 2.0**-8),
        (alone("bf16", 48, 2), 2.0**-8),
        (alone(BF16_DRHS, 47, 2, **ODD), 2.0**-8),
        (alone(DELAYED, None, 1), 2.0**-8),
        (alone(BF16_DRHS, None, 3), 2 * 2.0**-8),
        (alone("bf16", None, 4), 3 * 2.0**-8),
        *[
            (CrossedCase(recipe, rank, 2, is_beside), limit)
            for recipe, limit in LIMITS.items()
            for rank, is_beside in ((31, False), (None, True))
        ],
    ],
    ids=str,
)
def test_networks_by_triton_give_the_results_of_xla(case, limit):
    results = functools.partial(tailed.crossed_results, case)
    tailed.assert_triton_gives_the_results_of_xla(results, limit)


@pytest.mark.parametrize("rank, is_beside", [(31, False), (None, True)])
def test_inference_gives_the_results_of_training(rank, is_beside):
    case = CrossedCase(DELAYED, rank, 2, is_beside)
    run, arrays, states, g = tailed.crossed_operands(case)
    inference = support.jitted(run)(arrays, states)
    (trained, _), _ = tailed.compiled(run, arrays, states, g)
    # Products hand FP8 on without a rounding to bfloat16 first: of three, other casts.
    tailed.assert_close(inference, trained, 3**0.5 * 2.6e-2)


class Graph(NamedTuple):
    """Layers that read values of others, and their widths."""

    layers: tuple[Dense, ...]
    outputs: tuple[int, ...]
    m: int = 47


def layer(
    reads, size, norm="none", activation="none", order="sum_norm_act", tag="", **options
):
    """Returns a layer of an input's size and another, or a norm alone."""
    spec = None if size is None else SiteSpec(47, *size)
    member = spec and Member(f"{reads}_{size[1]}_{options}{tag}", spec)
    epilogue = Epilogue(norm, activation, order=order)
    return Dense(reads=reads, member=member, norm=epilogue, **options)


K, N = 95, 79
# x -> a; a and a residual x -> b; b -> c, d and e, a norm of b.
READ_TWICE = Graph(
    (
        layer(0, (K, N), "none", "swish"),
        layer(1, (N, K), "layer", residual=0),
        layer(2, (K, 32)),
        layer(2, (K, 48), "none", "swish"),
        layer(2, None, "rms", "gelu"),
    ),
    outputs=(3, 4, 5),
)
ORDERS = Graph(
    (
        layer(0, (K, K), "none", "gelu", "norm_act_sum", residual=0, dropout=0.25),
        layer(1, (K, K), "layer", "tanh", "act_sum_norm", residual=1),
        layer(2, (K, N), "rms", "sigmoid", "act_norm", dropout=0.25),
        layer(3, (N, K), "layer", "swish", "norm_act_sum", residual=2),
        layer(4, (K, N), "none", "none", "norm_act_sum", residual=3, dropout=0.5),
        layer(5, (N, N), "layer", "none", "act_sum_norm", residual=3, dropout=0.5),
    ),
    outputs=(4, 6),
)

# x W and gelu(x V), whose product a layer reads; gates by data, with a norm or neither.
GATES = Graph(
    (
        layer(0, (K, N), "none", "none", tag="up"),
        layer(0, (K, N), "none", "gelu", "norm_act_mul", residual=1, dropout=0.25),
        layer(2, (N, K), "layer", "sigmoid", "norm_act_mul", residual=0),
        layer(3, (K, K), "none", "none", "norm_act_mul", residual=3),
    ),
    outputs=(3, 4),
)
GRAPHS = dict(read_twice=READ_TWICE, orders=ORDERS, gates=GATES)


def arrays_of(graph):
    """Returns the parameters of the layers."""

    def of(i, layer):
        if layer.member is None:
            return LayerArrays()
        k, n = layer.member.spec.k, layer.member.spec.n
        bias, gamma = support.normal(n, seed=8 + i), 1 + support.normal(n, seed=i) / 4
        gamma = None if layer.norm.norm == "none" else gamma
        return LayerArrays((support.normal(k, n, seed=i) / k**0.5,), bias, gamma)

    return tuple(of(i, layer) for i, layer in enumerate(graph.layers))


def equations(graph, arrays, x):
    """Returns what the layers compute, in float32."""
    values, words = [x], tailed.dropout_words(len(graph.layers))
    for layer, own, random in zip(graph.layers, arrays, words, strict=True):
        z = values[layer.reads]
        z = z @ own.kernels[0] + own.bias[None] if own.kernels else z
        r = 0.0 if layer.residual is None else values[layer.residual]
        u = uniform(random, jnp.arange(graph.m), z.shape[1])
        kept = jnp.where(u < layer.dropout, 0.0, 1 / (1 - layer.dropout))
        gamma = 1.0 if own.gamma is None else own.gamma[None]
        norm = lambda z: gamma * reference.normalize(z, layer.norm)[0]  # noqa: B023, E731
        act = lambda z: kept * ACTIVATIONS[layer.norm.activation](z)  # noqa: B023, E731
        match layer.norm.order:
            case "sum_norm_act":
                values.append(act(norm(z + r)))
            case "norm_act_sum":
                values.append(act(norm(z)) + r)
            case "norm_act_mul":
                values.append(act(norm(z)) * r)
            case _:
                values.append(norm(act(z) + r))
    return tuple(values[i] for i in graph.outputs)


def graph_operands(graph):
    """Returns the parameters, the input, and the gradients of the outputs."""
    values = equations(graph, arrays_of(graph), support.normal(graph.m, K, seed=99))
    g = tuple(support.normal(*y.shape, seed=20 + i) for i, y in enumerate(values))
    return arrays_of(graph), support.normal(graph.m, K, seed=9), g


def graph_results(graph, *, step=tailed.compiled, recipe="bf16", **options):
    layers, outputs, m = graph
    group = Group(rows=m, inputs=((K,),), layers=layers, outputs=outputs)
    plans = [tailed.plan(recipe, *x.spec.gemm_sizes("fwd")) for x in group.members]
    states = tuple(tailed.state(recipe) for _ in plans)
    options["words"] = tailed.dropout_words(len(layers))

    def run(operands, states):
        arrays, x = operands
        given = tuple((layer,) for layer in arrays)
        return run_group(group, plans, ((x,),), given, states, **options)

    *operands, g = graph_operands(graph)
    return step(run, tuple(operands), states, g)


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_values_that_several_layers_read_follow_the_equations(graph):
    (ours, gradients), _ = graph_results(graph, implementation="xla")
    arrays, x, g = graph_operands(graph)
    theirs, pull = jax.vjp(functools.partial(equations, graph), arrays, x)
    # Roundings to bfloat16, 2^-9, of products and gradients, one after the other.
    tailed.assert_close(ours, theirs, 2.0**-7)
    tailed.assert_close(gradients, pull(g), 2.0**-6)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("recipe", ["bf16", DELAYED])
@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_values_that_several_layers_read_are_the_same_by_triton(graph, recipe):
    results = functools.partial(graph_results, graph, recipe=recipe)
    tailed.assert_triton_gives_the_results_of_xla(results, LIMITS[recipe])
