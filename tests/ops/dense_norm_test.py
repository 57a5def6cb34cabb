"""A site as one operation: values, gradients, hand-over in FP8, shapes, state.

What the kernels compute is tested where they are. Here XLA's reference stands in for
them ("kernels"), so that what lies around them is tested at the speed of XLA; a few
cases run the kernels themselves in the interpreter.
"""

import functools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import fp8, scaling, xla
from loka_jax.normed import Epilogue, NormGradients, NormVectors
from loka_jax.ops import kernels
from loka_jax.ops import plan as plans
from loka_jax.ops.dense_norm import Activations, dense_norm, describe
from loka_jax.ops.matmul import matmul
from loka_jax.ops.plan import plan
from loka_jax.recipe import INITIALIZED, RECIPES, get_recipe
from tests import support
from tests.ops import oracle, site
from tests.pallas.support import assert_no_races, interpret

__all__ = ["interpret"]

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
def implementation(request, monkeypatch):
    """Runs a test by XLA, and by the kernels' code with XLA's references in it."""
    if request.param == "xla":
        return "xla"
    stand_in(monkeypatch)
    return "pallas"


def stand_in(monkeypatch, forward=None, norm=None, backward=None):
    """Puts XLA's references in the place of the kernels, with these refusals."""

    def kernel(name, function, why_not):
        def call(*args, interpret, **kwargs):
            return function(*args, **kwargs)

        module = types.SimpleNamespace(why_not=lambda *a, **k: why_not, Problem=dict)
        setattr(module, name, call)
        return module

    def norm_quantize(z, scales, vectors, **kwargs):
        for scale in scales:
            z = z.astype(jnp.float32) * scale
        z = z.astype(jnp.bfloat16)
        eye = jnp.eye(z.shape[1], dtype=z.dtype)
        return xla.dense_norm(z, eye, vectors, **kwargs)

    def rows_backward(*args, dz_fp8, dz_scale_inv=None, **kwargs):
        dz, *sums = xla.norm_backward(*args, **kwargs)
        copy = amax = None
        if dz_scale_inv is not None:
            copy, amax = fp8.cast(dz, dz_scale_inv, dz_fp8), fp8.amax_of_parts(dz)
        elif dz_fp8 is not None:
            copy = fp8.quantize(dz, dz_fp8, axes=(1,))
        return NormGradients(dz.astype(jnp.bfloat16), copy, amax, *sums)

    modules = {
        "_forward": kernel("dense_norm", xla.dense_norm, forward),
        "_norm": kernel("norm_quantize", norm_quantize, norm),
        "_norm_backward": kernel("norm_backward", rows_backward, backward),
    }
    for name, module in modules.items():
        monkeypatch.setattr(kernels, name, module)
        monkeypatch.setattr(plans, name, module)


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
    f = lambda lhs, rhs, vectors: site.site(lhs, rhs, vectors, norm, activation)  # noqa: E731
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
    vectors = site.vectors(48, norm, with_bias=True)
    found = run("f32", lhs, rhs, dy, vectors, norm=norm, activation=activation)[:2]
    expected = plain(lhs, rhs, dy, vectors, norm, activation)
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-4)


@every_pair
def test_in_bfloat16_it_is_the_equations_but_for_rounding(
    implementation, norm, activation
):
    lhs, rhs, dy = operands(64, 32, 48)
    vectors = site.vectors(48, norm, with_bias=True)
    y, gradients, _ = run(
        "bf16",
        lhs,
        rhs,
        dy,
        vectors,
        norm=norm,
        activation=activation,
        implementation=implementation,
    )
    # Relu's slope jumps where z rounds to the other side of zero.
    floor = 30 if activation == "relu" else 38
    expected = plain(lhs, rhs, dy, vectors, norm, activation)
    assert worst_db(expected, (y, gradients)) > floor


@pytest.mark.parametrize(
    "norm, name",
    [("layer", name) for name in SERVED if name != "bf16"]
    + [(norm, "fp8_rowwise_bf16_drhs") for norm in ("none", "rms", "block")],
)
def test_in_fp8_it_stays_close_to_the_equations(implementation, norm, name):
    lhs, rhs, dy = operands(128, 64, 96)
    vectors = site.vectors(96, norm)
    y, gradients, _ = run(
        name,
        lhs,
        rhs,
        dy,
        vectors,
        norm=norm,
        activation="swish",
        implementation=implementation,
    )
    expected = plain(lhs, rhs, dy, vectors, norm, "swish")
    assert support.sqnr_db(expected[0], np.asarray(y, np.float64)) > 24
    assert worst_db(expected[1], gradients) > 19


@pytest.mark.parametrize("name", ["f32", "fp8_tensorwise_delayed", "fp8_blockwise"])
def test_by_xla_it_is_the_norm_of_the_product(name):
    recipe = get_recipe(name)
    lhs, rhs, dy = operands(64, 32, 48, recipe.compute_dtype)
    vectors = site.vectors(48, "layer")

    def composed(lhs, rhs, vectors, state):
        z = matmul(lhs, rhs, state, recipe=recipe)
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
def test_kernels_get_the_operands_of_the_recipe(name, monkeypatch):
    stand_in(monkeypatch)
    lhs, rhs, dy = operands(64, 32, 48)
    y, (dlhs, drhs, _), _ = run(
        name, lhs, rhs, dy, {}, norm="none", implementation="pallas"
    )
    out, _, exact_drhs = oracle.products(name, lhs, rhs, dy)
    np.testing.assert_allclose(
        np.asarray(y, np.float64), out, rtol=2**-8, atol=1e-5 * np.abs(out).max()
    )
    np.testing.assert_allclose(drhs, exact_drhs, rtol=1e-4, atol=1e-4)
    assert dlhs.dtype == jnp.bfloat16 and drhs.dtype == jnp.float32


def test_gradients_have_the_dtypes_of_their_operands(implementation):
    lhs, rhs, dy = operands(64, 32, 48)
    vectors = jax.tree.map(
        lambda v: v.astype(jnp.bfloat16), site.vectors(48, "layer", with_bias=True)
    )
    y, gradients, _ = run(
        "fp8_rowwise",
        lhs,
        rhs,
        dy,
        vectors,
        norm="layer",
        implementation=implementation,
    )
    chex.assert_trees_all_equal_dtypes(gradients, [lhs, rhs, vectors])
    assert y.dtype == jnp.bfloat16


# The kernels themselves, in the interpreter.


@pytest.mark.parametrize(
    "name, norm, activation, out",
    [
        ("bf16", "none", "relu", "compute"),
        ("fp8_rowwise_bf16_drhs", "layer", "swish", "fp8"),
        ("fp8_tensorwise", "rms", "gelu", "both"),
        ("fp8_tensorwise_delayed_bf16_drhs", "block", "hard_swish", "compute"),
    ],
)
def test_kernels_do_what_xla_does(interpret, name, norm, activation, out):
    lhs, rhs, dy = operands(112, 64, 128)
    vectors = site.vectors(128, norm, with_bias=norm == "none")
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
    found = jax.jit(
        functools.partial(step, implementation="pallas", interpret=interpret)
    )(*args)
    expected = jax.jit(functools.partial(step, implementation="xla"))(*args)
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


def test_kernels_under_vmap_run_one_by_one(interpret):
    lhs, rhs, dy = operands(128, 64, 128)
    lhs, dy = lhs.reshape(2, 64, 64), dy.reshape(2, 64, 128)

    def gradients(lhs, dy, **route):
        f = lambda lhs, rhs: dense_norm(  # noqa: E731
            lhs, rhs, norm="layer", recipe=get_recipe("bf16"), **route
        )
        y, pull = jax.vjp(f, lhs, rhs)
        return y, pull(dy)

    route = dict(implementation="pallas", interpret=interpret)
    found = jax.jit(jax.vmap(functools.partial(gradients, **route)))(lhs, dy)
    expected = jax.vmap(functools.partial(gradients, implementation="xla"))(lhs, dy)
    assert worst_db(expected, found) > 35


# Hand-over.


def chain(name, implementation, out, *, frozen=False):
    """Returns a function of lhs and two weights: a chain of two sites."""
    recipe = get_recipe(name)
    static = dict(
        norm="layer", activation="swish", recipe=recipe, implementation=implementation
    )

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
    return (lhs, first, second, site.vectors(48, "layer")), dy


def pulled(f, args, g):
    """Returns `f(*args)` and its gradients, compiled."""

    @jax.jit
    def run(args, g):
        y, pull = jax.vjp(f, *args)
        return y, pull(g)

    return run(args, g)


def plain_chain(lhs, first, second, vectors):
    hidden = site.site(lhs, first, vectors, "layer", "swish")
    return site.site(hidden, second, {}, "layer", "swish")


@pytest.mark.parametrize(
    "name, out",
    [
        ("fp8_tensorwise", "both"),
        ("fp8_tensorwise_delayed_bf16_drhs", "fp8"),
        ("fp8_rowwise", "fp8"),
        ("fp8_rowwise_bf16_drhs", "fp8"),
    ],
)
def test_gradients_flow_through_a_hand_over(implementation, name, out):
    args, dy = chain_operands()
    recipe = get_recipe(name)
    f = chain(name, implementation, out)
    y, (*gradients, _) = pulled(f, (*args, (initial(recipe), initial(recipe))), dy)
    args = (args[0].astype(jnp.float32), *args[1:])
    expected, exact = pulled(plain_chain, args, dy.astype(jnp.float32))
    assert support.sqnr_db(expected, np.asarray(y, np.float64)) > 21
    assert worst_db(exact, tuple(gradients)) > 16


def test_the_next_site_multiplies_what_was_handed_over(implementation):
    args, _ = chain_operands()
    recipe = get_recipe("fp8_rowwise_bf16_drhs")
    site_of = functools.partial(
        dense_norm, recipe=recipe, norm="none", implementation=implementation
    )
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
def test_what_is_handed_over_is_the_activations_in_fp8(implementation, norm):
    lhs, rhs, _ = operands(70, 32, 48)
    site_of = functools.partial(
        dense_norm,
        lhs,
        rhs,
        recipe=get_recipe("fp8_rowwise"),
        norm=norm,
        activation="gelu",
        implementation=implementation,
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


def test_a_site_after_a_frozen_one_has_its_weight_gradient(implementation):
    # The frozen site does not know that its activations are read by a drhs.
    args, dy = chain_operands()

    def gradient(out):
        f = chain("fp8_rowwise_bf16_drhs", implementation, out, frozen=True)
        g = lambda second: f(args[0], args[1], second, args[3])  # noqa: E731
        return pulled(g, args[2:3], dy)[1][0]

    assert support.sqnr_db(gradient("both"), gradient("fp8")) > 24


def test_recipes_that_take_no_rows_read_the_wide_form():
    args, dy = chain_operands()
    found = pulled(chain("fp8_blockwise", "xla", "fp8"), args, dy)
    expected = pulled(chain("fp8_blockwise", "xla", "compute"), args, dy)
    chex.assert_trees_all_equal(found, expected)


def test_matmul_takes_what_was_handed_over():
    args, _ = chain_operands()
    recipe = get_recipe("fp8_rowwise")
    hidden = dense_norm(args[0], args[1], recipe=recipe, norm="layer", out="fp8")
    nothing = Activations(jnp.zeros_like(hidden.y), hidden.fp8)
    out = matmul(nothing, args[2], recipe=recipe)
    assert support.sqnr_db(matmul(hidden.y, args[2], recipe=recipe), out) > 24


# Transformations.


def test_eager_jitted_and_rematerialized_chains_are_equal(implementation):
    args, dy = chain_operands()
    f = chain("fp8_rowwise_bf16_drhs", implementation, "fp8")

    def gradients(f):
        loss = lambda *args: jnp.sum((f(*args) * dy).astype(jnp.float32))  # noqa: E731
        return jax.grad(loss, argnums=(0, 1, 2, 3))(*args)

    jitted = jax.jit(gradients, static_argnums=0)
    # XLA may leave bfloat16 roundings out of fusions.
    assert worst_db(gradients(f), jitted(f)) > 35
    assert worst_db(jitted(jax.checkpoint(f)), jitted(f)) > 35


@pytest.mark.parametrize("shared", ["weights", "nothing"])
def test_vmap_equals_a_loop(implementation, shared):
    lhs, rhs, dy = (jnp.stack([x, 3 * x]) for x in operands(64, 32, 48))
    rhs = rhs[0] if shared == "weights" else rhs
    vectors = site.vectors(48, "layer")
    static = dict(norm="layer", activation="swish", out="fp8")
    static |= dict(implementation=implementation)
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


def test_rows_are_padded_and_padding_leaves_no_trace(implementation):
    m = 1
    lhs, rhs, dy = operands(64, 32, 48)
    vectors = site.vectors(48, "layer", with_bias=True)
    static = dict(norm="layer", activation="swish")
    static |= dict(implementation=implementation)
    found = run("bf16", lhs[:m], rhs, dy[:m], vectors, **static)
    whole = run("bf16", lhs, rhs, dy.at[m:].set(0), vectors, **static)
    chex.assert_trees_all_equal(found[0], whole[0][:m])
    (dlhs, *rest), (whole_dlhs, *whole_rest) = found[1], whole[1]
    chex.assert_trees_all_equal(dlhs, whole_dlhs[:m])
    chex.assert_trees_all_close(rest, whole_rest, rtol=1e-5, atol=1e-5)


def test_leading_dims_are_kept(implementation):
    lhs, rhs, _ = operands(128, 32, 48)
    f = functools.partial(
        dense_norm,
        rhs=rhs,
        recipe=get_recipe("fp8_tensorwise"),
        norm="rms",
        out="both",
        implementation=implementation,
    )
    flat, stacked = f(lhs), f(lhs.reshape(4, 32, 32))
    chex.assert_trees_all_equal(stacked, flat.reshape(4, 32, 48))


@pytest.mark.parametrize("name", ["f32", "fp8_tensorwise_delayed", "fp8_blockwise"])
def test_an_empty_batch_has_zero_gradients(name):
    lhs, rhs, dy = operands(0, 32, 48, get_recipe(name).compute_dtype)
    vectors = site.vectors(48, "layer", with_bias=True)
    y, (dlhs, *gradients), _ = run(name, lhs, rhs, dy, vectors, norm="layer")
    chex.assert_shape((y, dlhs), ((0, 48), (0, 32)))
    chex.assert_trees_all_equal(gradients, jax.tree.map(jnp.zeros_like, [rhs, vectors]))


# State.


@pytest.mark.parametrize("name", DELAYED)
def test_the_gradient_of_the_state_is_its_next_value(implementation, name):
    recipe = get_recipe(name)
    lhs, rhs, dy = operands(64, 32, 48)
    state = initial(recipe)
    for suffix in ("", INITIALIZED):
        amaxes = jnp.stack(
            [jnp.max(jnp.abs(x)).astype(jnp.float32) for x in (lhs, rhs, dy)]
        )
        # Once scales are set, g is not measured for products that are not in FP8.
        if suffix and implementation != "xla" and recipe.drhs is None:
            amaxes = amaxes.at[2].set(jnp.nan)
        expected = scaling.update_delayed(state, amaxes, recipe)
        static = dict(norm="none", implementation=implementation)
        *_, state = run(name + suffix, lhs, rhs, dy, {}, state, **static)
        chex.assert_trees_all_equal(state, expected)
        lhs, dy = lhs * 2, dy / 5


@pytest.mark.parametrize("name", ["fp8_tensorwise_delayed"])
def test_the_state_of_a_site_that_is_handed_fp8_bounds_its_amax(implementation, name):
    recipe = get_recipe(name)
    args, dy = chain_operands()
    states = (initial(recipe), initial(recipe))
    f = chain(name, implementation, "both")
    after = pulled(f, (*args, states), dy)[1][-1][1]
    static = dict(norm="layer", activation="swish", recipe=recipe)
    hidden = dense_norm(args[0], args[1], **args[3], **static, state=states[0])
    ratio = after.amax_history[0, 0] / jnp.max(jnp.abs(hidden)).astype(jnp.float32)
    assert 0.98 < ratio < 2.1
    assert np.all(after.amax_history[:, 0] > 0)


# What runs.


def test_kernels_run_by_themselves_only_on_a_hopper_gpu(monkeypatch):
    stand_in(monkeypatch)
    ask = functools.partial(
        plan, get_recipe("bf16"), 64, 32, 48, norm="layer", activation="none"
    )
    monkeypatch.setattr(plans, "has_hopper", lambda: False)
    assert ask()[:4] == ("xla", "xla", "no Hopper GPU", "no Hopper GPU")
    monkeypatch.setattr(plans, "has_hopper", lambda: True)
    assert ask()[:4] == ("fused", "norm", None, None)
    assert ask(implementation="xla").forward == "xla"


@pytest.mark.parametrize(
    "refusals, forward, backward",
    [
        ({}, "fused", "norm"),
        ({"backward": "too wide"}, "fused", "xla"),
        ({"forward": "too wide"}, "norm", "norm"),
        ({"forward": "too wide", "norm": "odd"}, "xla", "xla"),
    ],
)
def test_what_a_kernel_refuses_runs_by_xla(monkeypatch, refusals, forward, backward):
    stand_in(monkeypatch, **refusals)
    monkeypatch.setattr(plans, "has_hopper", lambda: True)
    static = dict(norm="layer", activation="swish")
    chosen = plan(get_recipe("fp8_rowwise"), 64, 32, 48, **static)
    assert (chosen.forward, chosen.backward) == (forward, backward)
    assert chosen.why_not == refusals.get("forward")
    # And gives the same.
    lhs, rhs, dy = operands(64, 32, 48)
    vectors = site.vectors(48, "layer", with_bias=True)
    found = run("fp8_rowwise", lhs, rhs, dy, vectors, **static)[:2]
    expected = plain(lhs, rhs, dy, vectors, "layer", "swish")
    assert worst_db(expected, found) > 19


def test_kernels_that_are_asked_for_and_refuse_are_an_error(monkeypatch):
    stand_in(monkeypatch, forward="too wide", norm="odd")
    lhs, rhs, _ = operands(64, 32, 48)
    with pytest.raises(ValueError, match=r"lhs \(64, 32\), .* too wide"):
        dense_norm(
            lhs,
            rhs,
            norm="layer",
            recipe=get_recipe("bf16"),
            implementation="pallas",
        )


def test_a_backward_kernel_that_refuses_is_an_error_once_it_is_needed(monkeypatch):
    stand_in(monkeypatch, backward="too wide")
    lhs, rhs, _ = operands(64, 32, 48)
    f = functools.partial(
        dense_norm, norm="layer", recipe=get_recipe("bf16"), implementation="pallas"
    )
    f(lhs, rhs)
    with pytest.raises(ValueError, match="the backward pass: too wide"):
        jax.vjp(f, lhs, rhs)


@pytest.mark.parametrize(
    "name, sizes, reason",
    [
        ("f32", (64, 32, 48), "recipe 'f32' computes in float32"),
        ("fp8_blockwise", (64, 128, 128), "recipe 'fp8_blockwise' scales in blocks"),
        ("bf16", (0, 32, 48), "m=0"),
        ("fp8_rowwise", (64, 33, 48), "k=33 is not a positive multiple of 16"),
    ],
)
def test_recipes_and_sizes_without_kernels_tell_why(monkeypatch, name, sizes, reason):
    stand_in(monkeypatch)
    monkeypatch.setattr(plans, "has_hopper", lambda: True)
    chosen = plan(get_recipe(name), *sizes, norm="layer", activation="none")
    assert chosen[:4] == ("xla", "xla", reason, reason)


@pytest.mark.parametrize(
    "name, handed, texts",
    [
        ("bf16", None, ("pallas bf16", "xla bf16, pallas norm", "xla bf16")),
        (
            "fp8_tensorwise",
            "rowwise",
            (
                "pallas fp8 e4m3 rowwise x tensorwise",
                "xla bf16, pallas norm",
                "xla fp8 e4m3 x e5m2 tensorwise",
            ),
        ),
        (
            "fp8_tensorwise_delayed:initialized",
            "tensorwise",
            (
                "pallas fp8 e4m3 tensorwise",
                "xla bf16, pallas norm",
                "xla fp8 e4m3 x e5m2 tensorwise",
            ),
        ),
        (
            "fp8_rowwise_bf16_drhs",
            None,
            (
                "pallas fp8 e4m3 rowwise",
                "xla bf16, pallas norm",
                "xla bf16",
            ),
        ),
    ],
)
def test_what_runs_is_told_in_words(monkeypatch, name, handed, texts):
    stand_in(monkeypatch)
    recipe, sizes = get_recipe(name), (1, 32, 48)
    chosen = plan(
        recipe, *sizes, norm="layer", activation="none", implementation="pallas"
    )
    found = describe(recipe, chosen, *sizes, handed)
    assert tuple(found.values()) == texts


@pytest.mark.parametrize(
    "name, dlhs",
    [
        ("fp8_rowwise", "xla fp8 e4m3 rowwise, pallas norm"),
        ("fp8_tensorwise_delayed", "xla fp8 e4m3 rowwise x tensorwise, pallas norm"),
        (
            "fp8_tensorwise_delayed:initialized",
            "xla fp8 e5m2 x e4m3 tensorwise, pallas norm",
        ),
    ],
)
def test_dlhs_over_many_features_runs_in_fp8(monkeypatch, name, dlhs):
    stand_in(monkeypatch)
    recipe, sizes = get_recipe(name), (64, 32, 2048)
    static = dict(norm="layer", activation="swish", implementation="pallas")
    chosen = plan(recipe, *sizes, **static)
    assert describe(recipe, chosen, *sizes)["dlhs"] == dlhs
    lhs, rhs, dy = operands(*sizes)
    state = initial(recipe)
    if state is not None:
        *_, state = run(name.split(":")[0], lhs, rhs, dy, {}, state, **static)
    found = run(name, lhs, rhs, dy, {}, state, **static)[1][0]
    expected = plain(lhs, rhs, dy, {}, "layer", "swish")[1][0]
    # E5M2 has two bits of mantissa, E4M3 three; in bfloat16 it would be over 40 dB.
    assert 17 < support.sqnr_db(expected, np.asarray(found, np.float64)) < 32


def test_a_norm_after_xlas_product_is_told(monkeypatch):
    stand_in(monkeypatch, forward="too wide", backward="too wide")
    recipe, sizes = get_recipe("bf16"), (64, 32, 48)
    static = dict(norm="layer", activation="none", implementation="pallas")
    found = describe(recipe, plan(recipe, *sizes, **static), *sizes)
    assert found["fwd"] == "xla bf16, pallas norm" and found["dlhs"] == "xla bf16"


# Bad arguments.


def test_a_norm_without_parameters_takes_none():
    lhs, rhs, _ = operands(16, 32, 48)
    with pytest.raises(ValueError, match="'block' takes neither gamma nor beta"):
        dense_norm(lhs, rhs, gamma=jnp.ones(48), norm="block", recipe=RECIPES["bf16"])


def test_a_delayed_recipe_without_a_state_is_refused():
    lhs, rhs, _ = operands(16, 32, 48)
    with pytest.raises(ValueError, match="needs a delayed-scaling state"):
        dense_norm(lhs, rhs, norm="layer", recipe=RECIPES["fp8_tensorwise_delayed"])
