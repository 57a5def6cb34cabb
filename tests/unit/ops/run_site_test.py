"""A site as one operation: values, gradients, FP8 between sites, shapes, state.

The kernels' results are tested with the kernels. Here XLA's reference stands in for
them, so that the code around them is tested at the speed of XLA; a few cases run the
kernels themselves in the interpreter.
"""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import scaling, xla
from loka_jax.normed import Epilogue, NormVectors
from loka_jax.ops.device import Device
from loka_jax.ops.matmul import matmul
from loka_jax.ops.plan import KernelPlan, resolve, resolve_served
from loka_jax.ops.products import Activations
from loka_jax.ops.run_site import SiteArrays, run_site
from loka_jax.recipe import INITIALIZED, RECIPES, Recipe, get_recipe
from loka_jax.site import Choice, SiteSpec
from tests import support
from tests.support import oracle, reference, stand_ins
from tests.support.pallas import assert_no_races, interpret  # noqa: F401

DELAYED = [name for name in RECIPES if get_recipe(name).is_delayed]
# Those that kernels serve.
SERVED = [name for name in RECIPES if name not in ("f32", "fp8_blockwise")]
# Every norm and every activation; all pairs are tested where the norm is.
PAIRS = [
    ("none", "relu"),
    ("layer", "swish"),
    ("rms", "gelu"),
    ("block", "hard_swish"),
    ("layer", "none"),
]
every_pair = pytest.mark.parametrize("norm, activation", PAIRS)


@pytest.fixture(params=["xla", "stand-ins"])
def device(request):
    """Runs a test by XLA, and by the kernels' code with XLA's references in it."""
    return stand_ins.CPU if request.param == "xla" else stand_ins.HOPPER


def dense_norm(
    lhs,
    rhs,
    bias=None,
    gamma=None,
    beta=None,
    *,
    recipe: Recipe,
    device: Device = stand_ins.CPU,
    state=None,
    provider=None,
    **spec,
):
    """Plans and runs a site; on a device with kernels they must serve it."""
    plan = plan_of(lhs, rhs, bias, recipe, device, provider, **spec)
    return run_site(plan, SiteArrays(lhs, rhs, bias, gamma, beta), state)


def plan_of(lhs, rhs, bias, recipe, device, provider=None, **spec) -> KernelPlan:
    """Returns the plan of a site by its arrays."""
    spec = SiteSpec(
        math.prod(lhs.shape[:-1]),
        *rhs.shape,
        use_bias=bias is not None,
        fp8_in=lhs.scaling if isinstance(lhs, Activations) else None,
        **spec,
    )
    if provider is None:
        provider = "xla" if device == stand_ins.CPU else "pallas"
    if provider == "served":
        return resolve_served(spec, recipe, device)
    return resolve(spec, Choice(provider, recipe), device)


def operands(m, k, n, dtype=jnp.bfloat16):
    """Returns lhs and dy in `dtype`, and a float32 rhs: (lhs, rhs, dy)."""
    return (
        support.normal(m, k, dtype=dtype),
        support.normal(k, n, seed=1) / k**0.5,
        support.normal(m, n, seed=2, dtype=dtype),
    )


def initial(recipe):
    return scaling.init_delayed(recipe) if recipe.is_delayed else None


def run(name, lhs, rhs, dy, vectors, state=None, **kwargs):
    """Returns y, the gradients of lhs, rhs and the vectors, and the next state."""
    recipe = get_recipe(name)
    state = initial(recipe) if state is None else state

    @jax.jit
    def step(lhs, rhs, vectors, state, dy):
        f = lambda lhs, rhs, vectors, state: dense_norm(  # noqa: E731
            lhs, rhs, **vectors, state=state, recipe=recipe, **kwargs
        )
        y, pull = jax.vjp(f, lhs, rhs, vectors, state)
        return y, pull(dy.astype(y.dtype))

    y, (*gradients, state) = step(lhs, rhs, vectors, state, dy)
    return y, gradients, state


def plain(lhs, rhs, dy, vectors, norm, activation):
    f = lambda lhs, rhs, vectors: reference.site(lhs, rhs, vectors, norm, activation)  # noqa: E731
    lhs, dy = lhs.astype(jnp.float32), dy.astype(jnp.float32)
    y, pull = jax.vjp(f, lhs, rhs, vectors)
    return y, list(pull(dy))


def worst_db(expected, found):
    """Returns the least SQNR over the arrays of two trees."""
    return min(
        support.sqnr_db(e, np.asarray(f, np.float64))
        for e, f in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True)
    )


# Is it right?


@every_pair
def test_in_float32_it_is_the_equations(norm, activation):
    lhs, rhs, dy = operands(16, 32, 48, jnp.float32)
    vectors = reference.vectors(48, norm, with_bias=True)
    found = run("f32", lhs, rhs, dy, vectors, norm=norm, activation=activation)[:2]
    expected = plain(lhs, rhs, dy, vectors, norm, activation)
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-4)


@every_pair
def test_in_bfloat16_it_is_the_equations_but_for_rounding(device, norm, activation):
    lhs, rhs, dy = operands(64, 32, 48)
    vectors = reference.vectors(48, norm, with_bias=True)
    y, gradients, _ = run(
        "bf16",
        lhs,
        rhs,
        dy,
        vectors,
        norm=norm,
        activation=activation,
        device=device,
    )
    # Relu's slope jumps where z rounds to the other side of zero.
    floor = 30 if activation == "relu" else 38
    expected = plain(lhs, rhs, dy, vectors, norm, activation)
    assert worst_db(expected, (y, gradients)) > floor


@pytest.mark.parametrize(
    "norm, name",
    support.slow_except(
        [("layer", name) for name in SERVED if name != "bf16"]
        + [(norm, "fp8_rowwise_bf16_drhs") for norm in ("none", "rms", "block")],
        ("layer", "fp8_tensorwise_delayed"),
        ("none", "fp8_rowwise_bf16_drhs"),
    ),
)
def test_in_fp8_it_stays_close_to_the_equations(device, norm, name):
    lhs, rhs, dy = operands(128, 64, 96)
    vectors = reference.vectors(96, norm)
    y, gradients, _ = run(
        name,
        lhs,
        rhs,
        dy,
        vectors,
        norm=norm,
        activation="swish",
        device=device,
    )
    expected = plain(lhs, rhs, dy, vectors, norm, "swish")
    assert support.sqnr_db(expected[0], np.asarray(y, np.float64)) > 24
    assert worst_db(expected[1], gradients) > 19


@pytest.mark.parametrize("name", ["f32", "fp8_tensorwise_delayed", "fp8_blockwise"])
def test_by_xla_it_is_the_norm_of_the_product(name):
    recipe = get_recipe(name)
    lhs, rhs, dy = operands(64, 32, 48, recipe.compute_dtype)
    vectors = reference.vectors(48, "layer")

    def composed(lhs, rhs, vectors, state):
        plan = plan_of(lhs, rhs, None, recipe, stand_ins.CPU)
        z = matmul(lhs, rhs, state, plan=plan)
        epilogue = Epilogue("layer", "swish")
        y = xla.norm_activation(z, NormVectors(**vectors), epilogue=epilogue)
        return y.astype(recipe.compute_dtype)

    @jax.jit
    def step(*args):
        y, pull = jax.vjp(composed, *args)
        return y, pull(dy)

    y, (*gradients, state) = step(lhs, rhs, vectors, initial(recipe))
    found = run(name, lhs, rhs, dy, vectors, norm="layer", activation="swish")
    chex.assert_trees_all_equal(found, (y, gradients, state))


@pytest.mark.parametrize("name", SERVED)
def test_kernels_get_the_operands_of_the_recipe(name):
    lhs, rhs, dy = operands(64, 32, 48)
    y, (dlhs, drhs, _), _ = run(
        name, lhs, rhs, dy, {}, norm="none", device=stand_ins.HOPPER
    )
    out, _, exact_drhs = oracle.products(name, lhs, rhs, dy)
    np.testing.assert_allclose(
        np.asarray(y, np.float64), out, rtol=2**-8, atol=1e-5 * np.abs(out).max()
    )
    np.testing.assert_allclose(drhs, exact_drhs, rtol=1e-4, atol=1e-4)
    assert dlhs.dtype == jnp.bfloat16 and drhs.dtype == jnp.float32


def test_gradients_have_the_dtypes_of_their_operands(device):
    lhs, rhs, dy = operands(64, 32, 48)
    vectors = jax.tree.map(
        lambda v: v.astype(jnp.bfloat16), reference.vectors(48, "layer", with_bias=True)
    )
    y, gradients, _ = run(
        "fp8_rowwise",
        lhs,
        rhs,
        dy,
        vectors,
        norm="layer",
        device=device,
    )
    chex.assert_trees_all_equal_dtypes(gradients, [lhs, rhs, vectors])
    assert y.dtype == jnp.bfloat16


# The kernels themselves, in the interpreter.


@pytest.fixture
def interpreter(interpret):  # noqa: F811
    return Device(platform="cpu", interpret=interpret)


@pytest.mark.parametrize(
    "m, name, norm, activation, out",
    support.slow_except(
        [
            (112, "bf16", "none", "relu", "compute"),
            (112, "fp8_rowwise_bf16_drhs", "layer", "swish", "fp8"),
            (112, "fp8_tensorwise", "rms", "gelu", "both"),
            (112, "fp8_tensorwise_delayed_bf16_drhs", "block", "hard_swish", "compute"),
            # In two kernels: the fused one takes rows in multiples of 8.
            (100, "bf16", "layer", "swish", "fp8"),
        ],
        (112, "fp8_rowwise_bf16_drhs", "layer", "swish", "fp8"),
    ),
)
def test_kernels_do_what_xla_does(interpreter, m, name, norm, activation, out):
    lhs, rhs, dy = operands(m, 64, 128)
    vectors = reference.vectors(128, norm, with_bias=norm == "none")
    recipe = get_recipe(name)
    static = dict(norm=norm, activation=activation, recipe=recipe, out=out)

    def step(lhs, rhs, vectors, state, **route):
        f = lambda lhs, rhs, vectors, state: dense_norm(  # noqa: E731
            lhs, rhs, **vectors, state=state, **static, **route
        )
        y, pull = jax.vjp(f, lhs, rhs, vectors, state)
        if out == "compute":
            return y, pull(dy)
        zeros = jax.tree.map(jnp.zeros_like, y.fp8)
        return y.fp8.dequantize(), pull(Activations(dy, zeros))

    args = (lhs, rhs, vectors, initial(recipe))
    found = jax.jit(functools.partial(step, device=interpreter))(*args)
    expected = jax.jit(step)(*args)
    y, (dlhs, *gradients, state) = found
    exact_y, (exact_dlhs, *exact_gradients, exact_state) = expected
    assert support.sqnr_db(exact_y, np.asarray(y, np.float64)) > 35
    # Its dlhs is in bfloat16, not in FP8.
    floor = 35 if name == "bf16" else 22
    assert worst_db(exact_dlhs, dlhs) > floor
    assert worst_db(exact_gradients, gradients) > floor
    if recipe.is_delayed:
        np.testing.assert_allclose(state.table[:2], exact_state.table[:2], rtol=1e-6)
        np.testing.assert_allclose(state.table[2], exact_state.table[2], rtol=5e-2)
    assert_no_races()


@pytest.mark.slow
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
    expected = jax.vmap(gradients)(lhs, dy)
    assert worst_db(expected, found) > 35


# Hand-over.


def chain(name, device, out, *, frozen=False):
    """Returns a function of lhs and two weights: a chain of two sites."""
    recipe = get_recipe(name)
    static = dict(norm="layer", activation="swish", recipe=recipe, device=device)

    def f(lhs, first, second, vectors, states=(None, None)):
        hidden = dense_norm(lhs, first, **vectors, **static, out=out, state=states[0])
        if frozen:
            hidden = jax.lax.stop_gradient(hidden)
        return dense_norm(hidden, second, **static, state=states[1])

    return f


def chain_operands(m=64):
    lhs, first, _ = operands(m, 32, 48)
    second = support.normal(48, 16, seed=5) / 7
    dy = support.normal(m, 16, seed=6, dtype=jnp.bfloat16)
    return (lhs, first, second, reference.vectors(48, "layer")), dy


def pulled(f, args, g):
    """Returns `f(*args)` and its gradients, compiled."""

    @jax.jit
    def run(args, g):
        y, pull = jax.vjp(f, *args)
        return y, pull(g)

    return run(args, g)


def plain_chain(lhs, first, second, vectors):
    hidden = reference.site(lhs, first, vectors, "layer", "swish")
    return reference.site(hidden, second, {}, "layer", "swish")


@pytest.mark.parametrize(
    "name, out",
    [
        ("fp8_tensorwise", "both"),
        ("fp8_tensorwise_delayed_bf16_drhs", "fp8"),
        ("fp8_rowwise", "fp8"),
        ("fp8_rowwise_bf16_drhs", "fp8"),
    ],
)
def test_gradients_flow_through_a_hand_over(device, name, out):
    args, dy = chain_operands()
    recipe = get_recipe(name)
    f = chain(name, device, out)
    y, (*gradients, _) = pulled(f, (*args, (initial(recipe), initial(recipe))), dy)
    args = (args[0].astype(jnp.float32), *args[1:])
    expected, exact = pulled(plain_chain, args, dy.astype(jnp.float32))
    assert support.sqnr_db(expected, np.asarray(y, np.float64)) > 21
    assert worst_db(exact, tuple(gradients)) > 16


def test_the_next_site_multiplies_what_was_handed_over(device):
    args, _ = chain_operands()
    recipe = get_recipe("fp8_rowwise_bf16_drhs")
    site_of = functools.partial(dense_norm, recipe=recipe, norm="none", device=device)
    hidden = site_of(args[0], args[1], activation="swish", out="fp8")
    # Its wide form is another array altogether: it must not be read.
    hidden = Activations(jnp.full_like(hidden.y, jnp.nan), hidden.fp8)
    found = site_of(hidden, args[2])
    weight = support.cast_exactly(args[2], support.E4M3, axes=0)
    expected = np.asarray(hidden.fp8.dequantize(), np.float64) @ weight
    np.testing.assert_allclose(
        np.asarray(found, np.float64), expected, rtol=2**-8, atol=1e-4
    )


@pytest.mark.parametrize("norm", ["rms", "none"])
def test_what_is_handed_over_is_the_activations_in_fp8(device, norm):
    lhs, rhs, _ = operands(70, 32, 48)
    site_of = functools.partial(
        dense_norm,
        lhs,
        rhs,
        recipe=get_recipe("fp8_rowwise"),
        norm=norm,
        activation="gelu",
        device=device,
    )
    wide, handed, both = (site_of(out=out) for out in ("compute", "fp8", "both"))
    chex.assert_trees_all_equal(handed.fp8, both.fp8)
    chex.assert_trees_all_equal(both.y, wide)
    chex.assert_shape(handed.fp8.scale_inv, () if norm == "rms" else (70, 1))
    quality = support.sqnr_db(wide, handed.fp8.dequantize(), axis=1)
    # A row of 48 scatters.
    assert quality.min() > support.FLOOR_DB["cast_e4m3"] - 3
    # Of whatever accuracy, y is never garbage.
    assert support.sqnr_db(wide, np.asarray(handed.y, np.float64)) > 29


def test_a_site_after_a_frozen_one_has_its_weight_gradient(device):
    # The frozen site does not know that its activations are read by a drhs.
    args, dy = chain_operands()

    def gradient(out):
        f = chain("fp8_rowwise_bf16_drhs", device, out, frozen=True)
        g = lambda second: f(args[0], args[1], second, args[3])  # noqa: E731
        return pulled(g, args[2:3], dy)[1][0]

    assert support.sqnr_db(gradient("both"), gradient("fp8")) > 24


def test_recipes_that_take_no_rows_read_the_wide_form():
    args, dy = chain_operands()
    found = pulled(chain("fp8_blockwise", stand_ins.CPU, "fp8"), args, dy)
    expected = pulled(chain("fp8_blockwise", stand_ins.CPU, "compute"), args, dy)
    chex.assert_trees_all_equal(found, expected)


def test_matmul_takes_what_was_handed_over():
    args, _ = chain_operands()
    recipe = get_recipe("fp8_rowwise")
    hidden = dense_norm(args[0], args[1], recipe=recipe, norm="layer", out="fp8")
    zeros = Activations(jnp.zeros_like(hidden.y), hidden.fp8)
    plan = functools.partial(plan_of, recipe=recipe, device=stand_ins.CPU, bias=None)
    out = matmul(zeros, args[2], plan=plan(zeros, args[2]))
    expected = matmul(hidden.y, args[2], plan=plan(hidden.y, args[2]))
    assert support.sqnr_db(expected, out) > 24


# Transformations.


@pytest.mark.slow
def test_eager_jitted_and_rematerialized_chains_are_equal(device):
    args, dy = chain_operands()
    f = chain("fp8_rowwise_bf16_drhs", device, "fp8")

    def gradients(f):
        loss = lambda *args: jnp.sum((f(*args) * dy).astype(jnp.float32))  # noqa: E731
        return jax.grad(loss, argnums=(0, 1, 2, 3))(*args)

    jitted = jax.jit(gradients, static_argnums=0)
    # XLA may leave bfloat16 roundings out of fusions.
    assert worst_db(gradients(f), jitted(f)) > 35
    assert worst_db(jitted(jax.checkpoint(f)), jitted(f)) > 35


@pytest.mark.parametrize("shared", ["weights", "nothing"])
def test_vmap_equals_a_loop(device, shared):
    lhs, rhs, dy = (jnp.stack([x, 3 * x]) for x in operands(64, 32, 48))
    rhs = rhs[0] if shared == "weights" else rhs
    vectors = reference.vectors(48, "layer")
    static = dict(norm="layer", activation="swish", out="fp8")
    static |= dict(device=device)
    recipe = get_recipe("fp8_rowwise_bf16_drhs")

    def step(lhs, rhs, dy):
        f = lambda *args: dense_norm(*args, **vectors, **static, recipe=recipe)  # noqa: E731
        y, pull = jax.vjp(f, lhs, rhs)
        zeros = jax.tree.map(jnp.zeros_like, y.fp8)
        return y, pull(Activations(dy, zeros))

    axes = (0, None if shared == "weights" else 0, 0)
    found = jax.jit(jax.vmap(step, axes))(lhs, rhs, dy)
    for i in range(2):
        one = jax.jit(step)(lhs[i], rhs if shared == "weights" else rhs[i], dy[i])
        each = jax.tree.map(lambda x: x[i], found)  # noqa: B023
        assert worst_db(one, each) > 35


# Shapes.


def test_rows_are_padded_and_padding_leaves_no_trace(device):
    m = 1
    lhs, rhs, dy = operands(64, 32, 48)
    vectors = reference.vectors(48, "layer", with_bias=True)
    static = dict(norm="layer", activation="swish")
    static |= dict(device=device)
    found = run("bf16", lhs[:m], rhs, dy[:m], vectors, **static)
    whole = run("bf16", lhs, rhs, dy.at[m:].set(0), vectors, **static)
    chex.assert_trees_all_equal(found[0], whole[0][:m])
    (dlhs, *rest), (whole_dlhs, *whole_rest) = found[1], whole[1]
    chex.assert_trees_all_equal(dlhs, whole_dlhs[:m])
    chex.assert_trees_all_close(rest, whole_rest, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["fp8_tensorwise", "fp8_rowwise"])
def test_fp8_products_beside_kernels_take_any_rows(name):
    m, static = 100, dict(norm="layer", activation="swish", device=stand_ins.HOPPER)
    lhs, rhs, dy = operands(112, 32, 48)
    lhs, dy = lhs.at[m:].set(0), dy.at[m:].set(0)
    vectors = reference.vectors(48, "layer")
    found = run(name, lhs[:m], rhs, dy[:m], vectors, **static)
    whole = run(name, lhs, rhs, dy, vectors, **static)
    chex.assert_trees_all_equal(found[0], whole[0][:m])
    (dlhs, *rest), (whole_dlhs, *whole_rest) = found[1], whole[1]
    chex.assert_trees_all_equal(dlhs, whole_dlhs[:m])
    chex.assert_trees_all_close(rest, whole_rest, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("m", [72, 100])
def test_kernels_of_a_chain_take_any_rows(interpreter, m):
    sizes = zip((64, 128), (128, 128), strict=True)
    first, second = (support.normal(k, n, seed=n + k) / k**0.5 for k, n in sizes)
    lhs, _, dy = operands(m, 64, 128)
    args = (lhs, first, second, reference.vectors(128, "layer"))
    found, expected = (
        pulled(chain("fp8_rowwise_bf16_drhs", device, "fp8"), padded(args), padded(dy))
        for device, padded in ((interpreter, lambda x: x), (stand_ins.CPU, _with_zeros))
    )
    (y, (dlhs, *rest)), (exact_y, (exact_dlhs, *exact_rest)) = found, expected
    # Its dlhs is in bfloat16, not in FP8.
    assert worst_db(exact_y[:m], y) > 22 and worst_db(exact_dlhs[:m], dlhs) > 22
    assert worst_db(exact_rest, rest) > 22
    assert_no_races()


def _with_zeros(x):
    """Returns lhs of a chain's arguments, or dy, with rows of zeros for XLA's FP8."""
    if isinstance(x, tuple):
        return (_with_zeros(x[0]), *x[1:])
    return jnp.pad(x, ((0, -len(x) % 16), (0, 0)))


def test_leading_dims_are_kept(device):
    lhs, rhs, _ = operands(128, 32, 48)
    f = functools.partial(
        dense_norm,
        rhs=rhs,
        recipe=get_recipe("fp8_tensorwise"),
        norm="rms",
        out="both",
        device=device,
    )
    flat, stacked = f(lhs), f(lhs.reshape(4, 32, 32))
    chex.assert_trees_all_equal(stacked, flat.reshape(4, 32, 48))


@pytest.mark.parametrize("name", ["f32", "fp8_tensorwise_delayed", "fp8_blockwise"])
def test_an_empty_batch_has_zero_gradients(name):
    lhs, rhs, dy = operands(0, 32, 48, get_recipe(name).compute_dtype)
    vectors = reference.vectors(48, "layer", with_bias=True)
    y, (dlhs, *gradients), _ = run(name, lhs, rhs, dy, vectors, norm="layer")
    chex.assert_shape((y, dlhs), ((0, 48), (0, 32)))
    chex.assert_trees_all_equal(gradients, jax.tree.map(jnp.zeros_like, [rhs, vectors]))


# State.


@pytest.mark.parametrize("name", DELAYED)
def test_the_gradient_of_the_state_is_its_next_value(device, name):
    recipe = get_recipe(name)
    lhs, rhs, dy = operands(64, 32, 48)
    state = initial(recipe)
    for suffix in ("", INITIALIZED):
        amaxes = jnp.stack(
            [jnp.max(jnp.abs(x)).astype(jnp.float32) for x in (lhs, rhs, dy)]
        )
        # Once scales are set, g is not measured for products that are not in FP8.
        if suffix and device != stand_ins.CPU and recipe.drhs is None:
            amaxes = amaxes.at[2].set(jnp.nan)
        expected = scaling.update_delayed(state, amaxes, recipe)
        static = dict(norm="none", device=device)
        *_, state = run(name + suffix, lhs, rhs, dy, {}, state, **static)
        chex.assert_trees_all_equal(state, expected)
        lhs, dy = lhs * 2, dy / 5


@pytest.mark.parametrize("name", ["fp8_tensorwise_delayed"])
def test_the_state_of_a_site_that_is_handed_fp8_bounds_its_amax(device, name):
    recipe = get_recipe(name)
    args, dy = chain_operands()
    states = (initial(recipe), initial(recipe))
    f = chain(name, device, "both")
    after = pulled(f, (*args, states), dy)[1][-1][1]
    static = dict(norm="layer", activation="swish", recipe=recipe)
    hidden = dense_norm(args[0], args[1], **args[3], **static, state=states[0])
    ratio = after.amax_history[0, 0] / jnp.max(jnp.abs(hidden)).astype(jnp.float32)
    assert 0.98 < ratio < 2.1
    assert np.all(after.amax_history[:, 0] > 0)


# What the kernels do not serve.


@pytest.mark.parametrize(
    "refusals",
    [
        {"norm_backward": "too wide"},
        {"dense_norm": "too wide"},
        {"dense_norm": "too wide", "norm_quantize": "odd"},
    ],
    ids="+".join,
)
def test_a_site_runs_by_xla_where_kernels_refuse(refusals):
    lhs, rhs, dy = operands(64, 32, 48)
    vectors = reference.vectors(48, "layer", with_bias=True)
    static = dict(norm="layer", activation="swish", provider="served")
    static |= dict(device=stand_ins.hopper(**refusals))
    found = run("fp8_rowwise", lhs, rhs, dy, vectors, **static)[:2]
    expected = plain(lhs, rhs, dy, vectors, "layer", "swish")
    assert worst_db(expected, found) > 19


def test_a_chosen_kernel_that_refuses_is_an_error():
    lhs, rhs, _ = operands(64, 32, 48)
    device = stand_ins.hopper(dense_norm="too wide", norm_quantize="odd")
    with pytest.raises(ValueError, match=r"lhs \(64, 32\), .* too wide"):
        dense_norm(lhs, rhs, norm="layer", recipe=RECIPES["bf16"], device=device)


def test_a_chosen_backward_kernel_that_refuses_is_an_error_once_it_is_needed():
    lhs, rhs, _ = operands(64, 32, 48)
    device = stand_ins.hopper(norm_backward="too wide")
    f = functools.partial(
        dense_norm, norm="layer", recipe=RECIPES["bf16"], device=device
    )
    f(lhs, rhs)
    with pytest.raises(ValueError, match="the backward pass: too wide"):
        jax.vjp(f, lhs, rhs)


@pytest.mark.parametrize("name", ["fp8_tensorwise", "fp8_rowwise"])
def test_fp8_products_beside_kernels_take_features_that_are_no_multiple_of_16(name):
    k, device = 47, stand_ins.hopper(dense_norm="no product")
    static = dict(norm="layer", activation="swish", device=device)
    lhs, rhs, dy = operands(64, 48, 2048)  # so many that dlhs is in FP8, too
    lhs, rhs = lhs.at[:, k:].set(0), rhs.at[k:].set(0)
    vectors = reference.vectors(2048, "layer")
    found = run(name, lhs[:, :k], rhs[:k], dy, vectors, **static)
    y, (dlhs, drhs, *rest), _ = run(name, lhs, rhs, dy, vectors, **static)
    whole = y, [dlhs[:, :k], drhs[:k], *rest]
    chex.assert_trees_all_close(found[:2], whole, rtol=1e-5, atol=1e-5)


def test_dlhs_over_many_features_runs_in_fp8_once_scales_are_stored():
    name, sizes = "fp8_tensorwise_delayed:initialized", (64, 32, 2048)
    static = dict(norm="layer", activation="swish", device=stand_ins.HOPPER)
    lhs, rhs, dy = operands(*sizes)
    state = run(name.split(":")[0], lhs, rhs, dy, {}, **static)[2]
    found = run(name, lhs, rhs, dy, {}, state, **static)[1][0]
    expected = plain(lhs, rhs, dy, {}, "layer", "swish")[1][0]
    # E4M3 has three bits of mantissa; in bfloat16 it would be over 40 dB.
    assert 22 < support.sqnr_db(expected, np.asarray(found, np.float64)) < 32


# Bad arguments.


def test_a_norm_without_parameters_takes_none():
    lhs, rhs, _ = operands(16, 32, 48)
    with pytest.raises(ValueError, match="'block' takes neither gamma nor beta"):
        dense_norm(lhs, rhs, gamma=jnp.ones(48), norm="block", recipe=RECIPES["bf16"])


def test_a_delayed_recipe_without_a_state_is_refused():
    lhs, rhs, _ = operands(16, 32, 48)
    with pytest.raises(ValueError, match="needs a delayed-scaling state"):
        dense_norm(lhs, rhs, norm="layer", recipe=RECIPES["fp8_tensorwise_delayed"])
