"""Wide layers as one operation, against their equations on the same FP8 operands."""

import dataclasses
import functools
import math
from typing import NamedTuple

import chex
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import fp8, scaling
from loka_jax.fp8 import E4M3
from loka_jax.ops import tailed_products
from loka_jax.ops.device import local_device
from loka_jax.ops.plan import KernelPlan, resolve
from loka_jax.ops.run_site import SiteArrays, run_site
from loka_jax.ops.wide_stack import WideLayer, why_not, wide_runs, wide_stack
from loka_jax.recipe import ROLES, get_recipe
from loka_jax.site import Choice, SiteSpec
from loka_jax.xla import ACTIVATIONS
from tests import support
from tests.support import hopper
from tests.support.triton import interpreted, on_gpu

__all__ = ["interpreted", "on_gpu"]

DELAYED = "fp8_tensorwise_delayed"
BF16_DRHS = "fp8_tensorwise_delayed_bf16_drhs"
M, WIDTHS = 48, (96, 272, 80, 64)  # 272: a block of a norm that is not full
AMAXES = 8.0, 1.0, 16.0  # of lhs, rhs and g in earlier steps


class Form(NamedTuple):
    """What follows the products of a stack."""

    norm: str = "block"
    activation: str = "hard_swish"
    use_bias: bool = False
    ends_linear: bool = False
    input_norm: str = "none"
    m: int = M
    widths: tuple[int, ...] = WIDTHS


# No multiples of 16.
ODD = dict(m=47, widths=(95, 271, 79, 63))
FORMS = [
    Form(ends_linear=True),
    Form(ends_linear=True, input_norm="rms"),
    Form("block", "relu", use_bias=True),
    Form("none", "relu", use_bias=True),
    Form("none", "relu", use_bias=True, ends_linear=True),
    Form("none", "hard_swish"),
    Form("block", "swish", use_bias=True, input_norm="block", **ODD),
    Form("none", "relu", use_bias=True, ends_linear=True, **ODD),
    Form("none", "gelu", use_bias=True, **ODD),
    Form("layer", "swish", ends_linear=True),
    Form("layer", "relu", use_bias=True, **ODD),
    Form("rms", "gelu", input_norm="layer", **ODD),
]
forms = pytest.mark.parametrize("form", FORMS, ids=str)
recipes = pytest.mark.parametrize("recipe", [DELAYED, BF16_DRHS])


def _choice(recipe: str) -> Choice:
    return Choice.parse(f"xla {recipe}").with_initialized_scales()


def _plans(form: Form, *by_layer: str) -> tuple[KernelPlan, ...]:
    """Returns plans of one recipe, or of one a layer."""
    sizes = list(zip(form.widths, form.widths[1:], strict=False))
    by_layer = by_layer * len(sizes) if len(by_layer) == 1 else by_layer

    def plan(i: int) -> KernelPlan:
        spec = SiteSpec(form.m, *sizes[i], use_bias=form.use_bias)
        if not _is_linear(form, i):
            spec = dataclasses.replace(spec, norm=form.norm, activation=form.activation)
        return resolve(spec, _choice(by_layer[i]), local_device())

    return tuple(map(plan, range(len(sizes))))


def _is_linear(form: Form, i: int) -> bool:
    return form.ends_linear and i == len(form.widths) - 2


def _layers(form: Form) -> tuple[WideLayer, ...]:
    def layer(i):
        k, n = form.widths[i : i + 2]
        kernel = support.normal(k, n, seed=i) / k**0.5
        bias = support.normal(n, seed=10 + i) if form.use_bias else None
        gamma = beta = None
        if form.norm in ("layer", "rms") and not _is_linear(form, i):
            gamma = 1 + support.normal(n, seed=20 + i) / 4
            beta = support.normal(n, seed=30 + i) if form.norm == "layer" else None
        return WideLayer(kernel, bias, gamma, beta)

    return tuple(map(layer, range(len(form.widths) - 1)))


def _inputs(form: Form):
    """Returns x and the gradient of the result."""
    m, first, last = form.m, form.widths[0], form.widths[-1]
    x = support.normal(m, first, seed=98, dtype=jnp.bfloat16)
    return x, support.normal(m, last, seed=99, dtype=jnp.bfloat16)


def _states(plans):
    """Returns a state for each product in FP8, whose history holds one amax."""

    def state(recipe):
        if not recipe.is_delayed:
            return None
        first = scaling.init_delayed(recipe)
        return scaling.update_delayed(first, jnp.array(AMAXES, jnp.float32), recipe)

    return tuple(state(plan.choice.recipe) for plan in plans)


def _value_and_gradients(run, x, layers, states, g):
    """Returns (y, dx, gradients of the layers), and the next states."""
    y, pull = jax.vjp(run, x, layers, states)
    dx, dlayers, states = pull(g.astype(y.dtype))
    return (y, dx, dlayers), states


def _fused(form, plans, implementation="xla"):
    options = dict(plans=plans, input_norm=form.input_norm)
    run = functools.partial(wide_stack, implementation=implementation, **options)
    # Not jitted: XLA for CPUs drops a rounding to bfloat16 within a program.
    return functools.partial(_value_and_gradients, run)


def _one_by_one(form, plans, x, layers, states):
    x = _normalized(x.astype(jnp.float32), form.input_norm)[0].astype(x.dtype)
    for plan, layer, state in zip(plans, layers, states, strict=True):
        x = run_site(plan, SiteArrays(x, *layer), state)
        assert isinstance(x, jax.Array)
    return x


# The equations, with roundings where the operation has them.


def _activation(name):
    return ACTIVATIONS[name]


def _normalized(z, norm):
    """Returns the normalized rows, and rstd for every element."""
    if norm == "none":
        return z, jnp.ones_like(z)
    z = z - _mean(z, norm) if norm == "layer" else z
    rate = 1 / jnp.sqrt(_mean(z**2, norm) + 1e-6)
    return z * rate, rate


def _affine(xhat, layer):
    u = xhat if layer.gamma is None else xhat * layer.gamma[None, :]
    return u if layer.beta is None else u + layer.beta[None, :]


def _bound(layer, norm, n):
    """Returns the largest magnitude that an element after a norm can have."""
    largest = math.sqrt(min(n, 256) if norm == "block" else n)
    return float(jnp.max(_affine(jnp.full((1, n), largest), jax.tree.map(abs, layer))))


def _scale_of(bound):
    return 2.0 ** math.ceil(math.log2(bound / 448))


def _mean(x, norm):
    """Returns the mean that belongs to every element."""
    size = 256 if norm == "block" else x.shape[1]
    parts = jnp.split(x, list(range(size, x.shape[1], size)), axis=1)
    means = [
        jnp.broadcast_to(jnp.mean(p, axis=1, keepdims=True), p.shape) for p in parts
    ]
    return jnp.concatenate(means, axis=1)


def _norm_gradient(g, xhat, rate, norm):
    """Returns the gradient of a norm's argument."""
    if norm == "none":
        return g
    centred = g - _mean(g, norm) if norm == "layer" else g
    return rate * (centred - xhat * _mean(g * xhat, norm))


def _fp8(x, scale, dtype=E4M3):
    return fp8.cast(x, jnp.float32(scale), dtype).dequantize()


def _bf16(x, scale=1.0):
    """Returns multiples of a scale that are in bfloat16."""
    return (x / scale).astype(jnp.bfloat16).astype(jnp.float32) * scale


def _dot(a, b):
    return jnp.dot(a, b, precision="highest")


def _equations(form: Form, recipe, scales, x, layers, g):
    """Returns (y, dx, gradients of the layers) in float32.

    Args:
        form: of the stack.
        recipe: of all layers.
        scales: of lhs, rhs and g; ones in bfloat16.
        x, layers, g: operands.
    """
    to_lhs, to_rhs, to_g = scales
    is_fp8, is_fp8_drhs = recipe != "bf16", recipe == DELAYED
    cast = _fp8 if is_fp8 else lambda x, _, dtype=None: _bf16(x)
    given, rate_in = _normalized(x.astype(jnp.float32), form.input_norm)
    x, kept = given, []
    if form.input_norm != "none" and is_fp8:
        to_lhs = _scale_of(math.sqrt(x.shape[1]))
    for i, layer in enumerate(layers):
        is_linear = _is_linear(form, i)
        norm = "none" if is_linear else form.norm
        f = _activation("none" if is_linear else form.activation)
        lhs, rhs = cast(x, to_lhs), cast(layer.kernel, to_rhs)
        if kept and kept[-1][2] == "none" and form.activation == "relu":
            kept[-1][4] = lhs  # relu's backward pass reads signs of that
        z = _bf16(_dot(lhs, rhs), to_lhs * to_rhs)
        z = z if layer.bias is None else z + layer.bias[None, :]
        xhat, rate = _normalized(z, norm)
        kept.append([lhs if is_fp8_drhs else _bf16(x), rhs, norm, f, xhat, rate])
        x = f(_affine(xhat, layer))
        if norm != "none" and is_fp8:
            to_lhs = _scale_of(_bound(layer, norm, xhat.shape[1]))
        else:
            to_lhs = scales[0]
    y, d, gradients = _bf16(x), g.astype(jnp.float32), []
    for layer, (lhs, rhs, norm, f, xhat, rate) in zip(
        reversed(layers), reversed(kept), strict=True
    ):
        xhat = _fp8(xhat, 1 / 16) if norm != "none" and is_fp8 else _bf16(xhat)
        (du,) = jax.vjp(f, _affine(xhat, layer))[1](d)
        dz = du if layer.gamma is None else du * layer.gamma[None, :]
        dz = _norm_gradient(dz, xhat, rate, norm)
        dz_cast = cast(dz, to_g, E4M3)
        drhs_g = dz_cast if is_fp8_drhs else _bf16(dz)
        dbias = None if layer.bias is None else jnp.sum(dz, axis=0)
        dgamma = None if layer.gamma is None else jnp.sum(du * xhat, axis=0)
        dbeta = None if layer.beta is None else jnp.sum(du, axis=0)
        gradients.append(WideLayer(_dot(lhs.T, drhs_g), dbias, dgamma, dbeta))
        d = _bf16(_dot(dz_cast, rhs.T), to_g * to_rhs)
    if form.input_norm != "none":
        given = _fp8(given, 1 / 16) if is_fp8 else _bf16(given)
        d = _norm_gradient(d, given, rate_in, form.input_norm)
    return y, _bf16(d), tuple(reversed(gradients))


def _assert_close(ours, theirs, limit):
    """Asserts that the relative L2 error of each array is small."""

    def error(x, y):
        x, y = (np.asarray(v, np.float64) for v in (x, y))
        return float(np.linalg.norm(x - y) / np.linalg.norm(y))

    errors = jax.tree.map(error, ours, theirs)
    assert max(jax.tree.leaves(errors)) < limit, errors


@forms
@pytest.mark.parametrize("recipe", [DELAYED, BF16_DRHS, "bf16"])
def test_results_are_those_of_the_equations_on_the_same_rounded_operands(form, recipe):
    plans, layers, (x, g) = _plans(form, recipe), _layers(form), _inputs(form)
    states = _states(plans)
    ours, _ = _fused(form, plans)(x, layers, states, g)
    scales = 1.0, 1.0, 1.0
    if recipe != "bf16":
        scales = tuple(map(float, states[0].scale_inv))
    theirs = _equations(form, recipe, scales, x, layers, g)
    # Another order of sums flips few roundings to FP8 and bfloat16.
    _assert_close(ours, theirs, len(layers) * 2.0**-8)
    chex.assert_trees_all_equal_dtypes(ours[1:], (x, layers))


@pytest.mark.parametrize("norm", ["block", "layer", "rms"])
def test_a_last_product_without_a_bias_has_the_gain_of_one_with_a_bias(norm):
    """Its scales become a factor in bfloat16, which is exact for powers of two.

    The error of the sum of many elements is that of a gain, not of their roundings,
    which are 2^-9 each and independent.
    """
    form = Form(norm, ends_linear=True)
    *first, last = _layers(form)
    plans, (x, _) = _plans(form, DELAYED), _inputs(form)
    run = functools.partial(wide_stack, x, states=_states(plans), plans=plans)
    zeros = last._replace(bias=jnp.zeros(last.kernel.shape[1]))
    ours, theirs = (
        np.asarray(run((*first, end)), np.float64).ravel() for end in (last, zeros)
    )
    gain = ours @ theirs / (theirs @ theirs)
    assert abs(gain - 1) < 5 * 2.0**-9 / len(ours) ** 0.5


def _exact(form: Form, x, layers, states):
    """Returns the activations in float32, differentiable."""
    del states
    x, _ = _normalized(x.astype(jnp.float32), form.input_norm)
    for i, layer in enumerate(layers):
        z = _dot(x, layer.kernel)
        z = z if layer.bias is None else z + layer.bias[None, :]
        is_linear = _is_linear(form, i)
        norm = "none" if is_linear else form.norm
        activation = "none" if is_linear else form.activation
        x = _activation(activation)(_affine(_normalized(z, norm)[0], layer))
    return x


# relu's slopes flip where values round to the other side of zero: compared above.
smooth = pytest.mark.parametrize(
    "form", [form for form in FORMS if form.activation != "relu"], ids=str
)


@smooth
def test_the_bfloat16_twin_is_near_float32(form):
    plans, layers, (x, g) = _plans(form, "bf16"), _layers(form), _inputs(form)
    states = _states(plans)
    ours, _ = _fused(form, plans)(x, layers, states, g)
    run = functools.partial(_exact, form)
    theirs, _ = _value_and_gradients(run, x, layers, states, g)
    # A few roundings of 2^-9 each in every layer; hard_swish's slope jumps at 3.
    _assert_close(ours, theirs, 2.0**-5)


@smooth
@recipes
def test_fp8_is_good_enough(form, recipe):
    plans, layers, (x, g) = _plans(form, recipe), _layers(form), _inputs(form)
    states = _states(plans)
    ours, _ = _fused(form, plans)(x, layers, states, g)
    run = functools.partial(_exact, form)
    theirs, _ = _value_and_gradients(run, x, layers, states, g)
    # The errors of the products add up: forward of the layers, and those backward.
    depth_db = 10 * math.log10(len(layers))
    floor = support.FLOOR_DB["e4m3_x_e4m3"] - depth_db
    assert support.sqnr_db(theirs[0], ours[0]) > floor
    floor -= 10 * math.log10(2)
    pairs = zip(*map(jax.tree.leaves, (theirs[1:], ours[1:])), strict=True)
    assert min(support.sqnr_db(*pair) for pair in pairs) > floor


@forms
@recipes
def test_states_are_those_of_the_sites_one_after_another(form, recipe):
    plans, layers, (x, g) = _plans(form, recipe), _layers(form), _inputs(form)
    states = _states(plans)
    ours, next_ours = _fused(form, plans)(x, layers, states, g)
    run = functools.partial(_one_by_one, form, plans)
    theirs, next_theirs = _value_and_gradients(run, x, layers, states, g)
    if form.activation != "relu":
        # Roundings to FP8 flip, whose error is 2.6e-2 in each of the layers, both ways.
        _assert_close(ours, theirs, 6 * 2.6e-2)
    history = jax.tree.map(lambda s: s[:, 1:], (next_ours, next_theirs))
    for mine, other in zip(*map(jax.tree.leaves, history), strict=True):
        np.testing.assert_array_equal(mine[:, 1:], other[:, 1:])
        np.testing.assert_allclose(mine[:, 0], other[:, 0], rtol=2.0**-3)
        assert np.all(mine[:, 0] > 0)
    chex.assert_trees_all_equal_structs(next_ours, states)


def _dots(jaxpr):
    """Yields the products of a program, and of those in it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in jex.jaxprs_in_params(equation.params):
            yield from _dots(inner)


# One layer in FP8 in all roles, one in none, and one in the forward role alone.
MIXED = [
    (DELAYED, "bf16", BF16_DRHS),
    ("bf16", DELAYED, f"{DELAYED}/bf16/bf16"),
    (f"{DELAYED}/bf16/{DELAYED}", f"{DELAYED}/{DELAYED}/bf16", DELAYED),
    (f"bf16/{DELAYED}/{DELAYED}", f"bf16/bf16/{DELAYED}", "bf16"),
]
mixed = pytest.mark.parametrize("by_layer", MIXED, ids=str)


@mixed
def test_each_role_runs_in_the_precision_of_its_recipe(by_layer):
    form = Form("block", "relu", use_bias=True)
    plans, layers, (x, g) = _plans(form, *by_layer), _layers(form), _inputs(form)
    run = _fused(form, plans)
    program = jax.make_jaxpr(run)(x, layers, _states(plans), g)
    found = {
        (*(v.aval.shape for v in dot.invars),): dot.invars[0].aval.dtype.itemsize
        for dot in _dots(program.jaxpr)
    }
    for plan in plans:
        for role in ROLES:
            m, k, n = plan.spec.gemm_sizes(role)
            is_fp8 = plan.choice.recipe.gemm(role) is not None
            assert found[(m, k), (n, k)] == (1 if is_fp8 else 2), (plan.spec, role)


@mixed
def test_layers_of_different_recipes_are_as_one_after_another(by_layer):
    form = Form("block", "hard_swish")
    plans, layers, (x, g) = _plans(form, *by_layer), _layers(form), _inputs(form)
    states = _states(plans)
    ours, next_ours = _fused(form, plans)(x, layers, states, g)
    run = functools.partial(_one_by_one, form, plans)
    theirs, next_theirs = _value_and_gradients(run, x, layers, states, g)
    _assert_close(ours, theirs, 3 * 5.3e-2)
    measured = jax.tree.map(lambda s: s[:, 1] > 0, (next_ours, next_theirs))
    chex.assert_trees_all_equal(*measured)


def _assert_triton_gives_the_results_of_xla(form, recipe):
    plans, layers, (x, g) = _plans(form, recipe), _layers(form), _inputs(form)
    states = _states(plans)
    theirs = _fused(form, plans)(x, layers, states, g)
    ours = _fused(form, plans, "triton")(x, layers, states, g)
    # Float32 operations in another order flip few roundings.
    _assert_close(ours, theirs, 2.0**-8)


by_triton = pytest.mark.parametrize(
    "form, recipe",
    [
        (FORMS[0], DELAYED),
        (FORMS[0], "bf16"),
        (FORMS[1], DELAYED),
        (FORMS[2], BF16_DRHS),
        (FORMS[3], DELAYED),
        (FORMS[4], "bf16"),
        (FORMS[6], DELAYED),
        (FORMS[7], BF16_DRHS),
        (FORMS[8], "bf16"),
        (FORMS[9], DELAYED),
        (FORMS[10], "bf16"),
        (FORMS[11], BF16_DRHS),
    ],
    ids=str,
)


@by_triton
@pytest.mark.usefixtures("interpreted")
def test_tails_by_triton_give_the_results_of_xla(form, recipe, monkeypatch):
    # The interpreter takes no tracers.
    monkeypatch.setattr(
        tailed_products, "by_kernel", lambda run, *operands: run(*operands)
    )
    _assert_triton_gives_the_results_of_xla(form, recipe)


@by_triton
@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
def test_tails_by_triton_give_the_results_of_xla_on_a_gpu(form, recipe):
    _assert_triton_gives_the_results_of_xla(form, recipe)


def test_a_compiled_stack_is_differentiable():
    form = Form("none", "relu", use_bias=True)
    plans, layers, (x, g) = _plans(form, DELAYED), _layers(form), _inputs(form)
    states = _states(plans)
    run = jax.jit(functools.partial(wide_stack, plans=plans, implementation="xla"))
    (_, *ours), _ = _value_and_gradients(run, x, layers, states, g)
    (_, *theirs), _ = _fused(form, plans)(x, layers, states, g)
    # XLA for CPUs drops roundings to bfloat16 within a program, which flips slopes.
    _assert_close(ours, theirs, 3 * 5.3e-2)


def _program(form):
    """Returns a training step of a stack, compiled for an H200."""
    plans, layers, (x, g) = _plans(form, DELAYED), _layers(form), _inputs(form)
    run = functools.partial(wide_stack, plans=plans, implementation="triton")

    def step(x, layers, states, g):
        y, pull = jax.vjp(run, x, layers, states)
        return y, pull(g)

    return hopper.compiled(step, x, layers, _states(plans), g)


def test_padding_takes_no_pass_of_its_own_and_all_products_run_in_fp8():
    # Also raises ImportError if JAX has no CUDA plugin.
    pytest.importorskip("jax_triton", exc_type=ImportError)
    form = Form("layer", "swish", m=256, widths=(256, 1024, 512))
    even = _program(form)
    odd = _program(form._replace(m=255, widths=(255, 1023, 511)))
    assert hopper.fp8_gemms(odd) == hopper.fp8_gemms(even) == 6
    assert hopper.other_gemms(odd) == 0
    assert len(hopper.kernels(odd)) == len(hopper.kernels(even))


def test_states_take_no_kernels_of_each_layer():
    # Also raises ImportError if JAX has no CUDA plugin.
    pytest.importorskip("jax_triton", exc_type=ImportError)
    form = Form("none", "relu", m=1024, widths=(1024,) * 3)
    two = hopper.kernels(_program(form))
    three = hopper.kernels(_program(form._replace(widths=(1024,) * 4)))
    # Three products, the casts of the weight and of the activations, and the gradient.
    assert len(three) - len(two) == 6
    assert [x.opcode for x in three].count("fusion") <= 6


def test_inference_writes_nothing_for_a_backward_pass():
    form = FORMS[0]
    plans, layers, (x, _) = _plans(form, DELAYED), _layers(form), _inputs(form)
    states = _states(plans)
    run = functools.partial(wide_stack, plans=plans, implementation="xla")
    program = jax.make_jaxpr(run)(x, layers, states)
    transposed = [x for x in _transposed(program.jaxpr) if x.dtype.itemsize == 1]
    assert [x.shape for x in transposed] == [x.kernel.shape for x in layers]
    trained, _ = _fused(form, plans)(x, layers, states, _inputs(form)[1])
    chex.assert_trees_all_equal(run(x, layers, states), trained[0])


def _transposed(jaxpr):
    """Yields the types of arrays that are transposed in a program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "transpose":
            yield equation.invars[0].aval
        for inner in jex.jaxprs_in_params(equation.params):
            yield from _transposed(inner)


@pytest.mark.parametrize(
    "changes, recipe, reason",
    [
        ({}, DELAYED, None),
        ({}, "bf16", None),
        ({}, "fp8_rowwise", "does not scale every operand by earlier amaxes"),
        ({}, "f32", "float32 is not bfloat16"),
        ({"norm": "layer"}, DELAYED, None),
        ({"m": 31, "k": 63, "n": 95}, DELAYED, None),
        ({"k": 13}, "bf16", None),
        ({"m": 24}, DELAYED, "24 is too far below a multiple of 16"),
        ({"n": 40}, DELAYED, "n=40 is too far below a multiple of 16"),
        ({"out": "fp8"}, DELAYED, "hands FP8 on"),
    ],
)
def test_what_is_not_served_has_a_reason(changes, recipe, reason):
    spec = SiteSpec(32, 64, 96, norm="block", activation="relu")
    spec = dataclasses.replace(spec, **changes)
    plan = resolve(spec, _choice(recipe), local_device())
    found = why_not(plan)
    assert found == reason or (reason and reason in found), found
    if reason is not None:
        x = jnp.zeros((spec.m, spec.k), jnp.bfloat16)
        layer = WideLayer(jnp.zeros((spec.k, spec.n)))
        with pytest.raises(ValueError, match="wide_stack: .*"):
            wide_stack(x, (layer,), _states((plan,)), plans=(plan,))


def test_scales_that_are_no_powers_of_two_are_refused():
    """The operation multiplies by their product in bfloat16."""
    choice = _choice(DELAYED)
    cast = dataclasses.replace(choice.recipe.fwd.first, pow2_scale=False)
    gemm = dataclasses.replace(choice.recipe.fwd, first=cast, second=cast)
    recipe = dataclasses.replace(choice.recipe, fwd=gemm, dlhs=gemm, drhs=gemm)
    choice = dataclasses.replace(choice, recipe=recipe)
    plan = resolve(SiteSpec(32, 64, 96), choice, local_device())
    assert "scales that are no powers of two" in why_not(plan)


def test_scales_that_are_not_set_and_other_providers_are_refused():
    spec = SiteSpec(32, 64, 96)
    recipe = get_recipe(DELAYED)
    plan = resolve(spec, Choice("xla", recipe), local_device())
    assert why_not(plan) == "delayed scales are not initialized"
    plan = resolve(spec, Choice("pallas", recipe), local_device())
    assert why_not(plan) == "provider 'pallas'"


@pytest.mark.parametrize(
    "widths, runs",
    [
        ((13, 512, 1024, 64), [range(1, 3)]),
        ((512, 256, 128), []),  # narrow
        ((2048, 1024, 100, 512, 4096), [range(0, 1), range(3, 4)]),
    ],
)
def test_layers_that_are_served_run_together_if_one_is_wide(widths, runs):
    assert wide_runs(_plans(Form(widths=widths), DELAYED)) == runs
