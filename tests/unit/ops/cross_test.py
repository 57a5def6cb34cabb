"""A cross network as one operation, against its equations on the same FP8 operands."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import fp8, scaling
from loka_jax.fp8 import E4M3
from loka_jax.ops import tailed_products
from loka_jax.ops.cross import Crossed, CrossLayer, cross_network, why_not
from loka_jax.ops.device import local_device
from loka_jax.ops.plan import resolve
from loka_jax.ops.run_site import SiteArrays, run_site
from loka_jax.recipe import get_recipe
from loka_jax.site import Choice, SiteSpec
from tests import support
from tests.support.triton import interpreted, on_gpu

__all__ = ["interpreted", "on_gpu"]

DELAYED = "fp8_tensorwise_delayed:initialized"
BF16_DRHS = "fp8_tensorwise_delayed_bf16_drhs:initialized"
M, N, RANK = 32, 96, 48
ranks = pytest.mark.parametrize("rank", [None, RANK])
depths = pytest.mark.parametrize("depth", [1, 3])


def _widths(rank):
    return (N, N) if rank is None else (N, rank, N)


def _plans(rank, depth, recipe=DELAYED, m=M):
    choice = Choice("xla", get_recipe(recipe))
    sizes = zip(_widths(rank), _widths(rank)[1:], strict=False)
    specs = [SiteSpec(m, k, n) for k, n in sizes]
    return (tuple(resolve(spec, choice, local_device()) for spec in specs),) * depth


def _layers(rank, depth, has_bias=True):
    def layer(i):
        sizes = zip(_widths(rank), _widths(rank)[1:], strict=False)
        kernels = tuple(
            support.normal(k, n, seed=10 * i + j) / k**0.5
            for j, (k, n) in enumerate(sizes)
        )
        bias = support.normal(N, seed=10 * i + 5) if has_bias else None
        return CrossLayer(kernels, bias)

    return tuple(map(layer, range(depth)))


def _inputs(m=M):
    """Returns x0 and the gradient of the result."""
    x0, g = (support.normal(m, N, seed=i, dtype=jnp.bfloat16) for i in (98, 99))
    return x0, g


def _states(layers, amax=8.0):
    """Returns a state for each product, whose history holds one amax."""
    recipe = get_recipe(DELAYED)
    amaxes = jnp.array([amax, 1.0, 2 * amax], jnp.float32)
    state = scaling.update_delayed(scaling.init_delayed(recipe), amaxes, recipe)
    return tuple(tuple(state for _ in layer.kernels) for layer in layers)


def _value_and_gradients(network, x0, layers, states, g):
    """Returns y, the gradients of x0 and layers, and the next states."""
    y, pull = jax.vjp(network, x0, layers, states)
    dx0, dlayers, states = pull(g.astype(y.dtype))
    return (y, dx0, dlayers), states


def _network(x0, layers, states, *, plans, **options):
    """Returns the features of a cross network of an array, or of two to be joined."""
    parts = x0 if isinstance(x0, tuple) else (x0,)
    return cross_network(Crossed(parts, layers, states, plans), **options)


def _fused(plans):
    run = functools.partial(_network, plans=plans, implementation="xla")
    # Not jitted: XLA for CPUs drops a rounding to bfloat16 within a program.
    return functools.partial(_value_and_gradients, run)


def _bf16(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _fp8(scale, dtype, x):
    return fp8.cast(x, jnp.float32(scale), dtype).dequantize()


def _rounded(rounding, x):
    """Returns x rounded; gradients pass."""
    return x + jax.lax.stop_gradient(rounding(x) - x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradient_rounded(rounding, x):
    """Returns x, whose gradient is rounded."""
    del rounding
    return x


_gradient_rounded.defvjp(
    lambda rounding, x: (x, None), lambda rounding, _, g: (rounding(g),)
)


def _equations(scales, recipe, x0, layers, states):
    """Returns the features in float32, from operands that are rounded alike.

    Products that other products read are rounded to bfloat16, the others to FP8.
    Scales are of lhs, rhs and g of every product; None without rounding.
    """
    del states

    def fp8_cast(dtype, *factors):
        if scales is None:
            return lambda x: x
        return functools.partial(_fp8, math.prod(factors), dtype)

    of_lhs, of_rhs, of_g = scales or (1.0, 1.0, 1.0)
    bf16 = (lambda x: x) if scales is None else _bf16
    to_lhs, to_rhs = fp8_cast(E4M3, of_lhs), fp8_cast(E4M3, of_rhs)
    to_g = fp8_cast(E4M3, of_g)
    first = _rounded(to_lhs, x0.astype(jnp.float32))
    s, y = jnp.ones(()), first
    for layer in layers:
        # dlhs sums over the columns of the first kernel, fwd over the last one's rows.
        to_d = fp8_cast(E4M3, of_g, of_rhs, _unit("dlhs", layer.kernels[0].shape[1]))
        to_z = fp8_cast(E4M3, of_lhs, of_rhs, _unit("fwd", layer.kernels[-1].shape[0]))
        h = _gradient_rounded(to_d, first * s)
        given = x0 if layer is layers[0] else h
        for j, kernel in enumerate(layer.kernels):
            lhs = _rounded(to_lhs, h)
            if recipe == BF16_DRHS:  # of zeros, whose gradient is drhs
                kernel, own = jax.lax.stop_gradient(kernel), kernel
                given = bf16(jax.lax.stop_gradient(given if j == 0 else h))
                drhs = _dot(given, own - kernel)
            else:
                drhs = jnp.zeros(())
            is_last = j + 1 == len(layer.kernels)
            z = _gradient_rounded(to_g, _dot(lhs, _rounded(to_rhs, kernel)))
            z = _rounded(to_z if is_last else bf16, z)
            z = jnp.add(z, _gradient_rounded(bf16, drhs))
            h = z if is_last else _gradient_rounded(bf16, z)
        s = s + h if layer.bias is None else s + h + layer.bias[None, :]
        y = _rounded(bf16, first * s)
    return y


def _unit(role, k):
    """Returns what 1 stands for in a product in FP8, in units of its operands' data."""
    return 2.0 ** ({"fwd": 7, "dlhs": 5}[role] + int(math.log2(k)) // 2)


def _dot(a, b):
    return jnp.dot(a, b, precision="highest")


def _present(plans, x0, layers, states):
    """Returns the features from one site after another."""
    x = x0
    for own, layer, layer_states in zip(plans, layers, states, strict=True):
        h = x
        for plan, kernel, state in zip(own, layer.kernels, layer_states, strict=True):
            h = run_site(plan, SiteArrays(h, kernel), state)
            assert isinstance(h, jax.Array)
        if layer.bias is not None:
            h = h + layer.bias.astype(h.dtype)[None, :]
        x = x0 * h + x
    return x


def _errors(ours, theirs):
    """Returns the relative L2 error of each array."""

    def error(x, y):
        x, y = (np.asarray(v, np.float64) for v in (x, y))
        return float(np.linalg.norm(x - y) / np.linalg.norm(y))

    return jax.tree.map(error, ours, theirs)


def _assert_close(ours, theirs, limit):
    errors = _errors(ours, theirs)
    assert max(jax.tree.leaves(errors)) < limit, errors


@ranks
@depths
@pytest.mark.parametrize("recipe", [DELAYED, BF16_DRHS])
@pytest.mark.parametrize("has_bias", [True, False])
def test_results_are_those_of_the_equations_on_the_same_rounded_operands(
    rank, depth, recipe, has_bias
):
    layers, (x0, g) = _layers(rank, depth, has_bias), _inputs()
    states = _states(layers)
    scales = tuple(float(s) for s in states[0][0].scale_inv)
    ours, _ = _fused(_plans(rank, depth, recipe))(x0, layers, states, g)
    run = functools.partial(_equations, scales, recipe)
    theirs, _ = _value_and_gradients(run, x0, layers, states, g)
    # Gradients of x0 add up in bfloat16; another order of sums flips few roundings.
    _assert_close(ours, theirs, depth * 2.0**-8)
    chex.assert_trees_all_equal_dtypes(ours[1:], (x0, layers))


@ranks
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("depth", [3, 5])  # of 5, sums of 3 products are kept
def test_the_bfloat16_twin_follows_the_equations(rank, has_bias, depth):
    layers, (x0, g) = _layers(rank, depth, has_bias), _inputs()
    layers = jax.tree.map(lambda x: x / 2, layers)
    states = tuple((None,) * len(layer.kernels) for layer in layers)
    ours, _ = _fused(_plans(rank, depth, "bf16"))(x0, layers, states, g)
    run = functools.partial(_equations, None, None)
    theirs, _ = _value_and_gradients(run, x0, layers, states, g)
    # A few roundings of 2^-9 each in every layer.
    _assert_close(ours, theirs, 2.0**-6)


@ranks
@pytest.mark.parametrize("recipe", [DELAYED, BF16_DRHS])
def test_states_are_those_of_the_sites_one_after_another(rank, recipe):
    layers, (x0, g) = _layers(rank, 3), _inputs()
    states, plans = _states(layers), _plans(rank, 3, recipe)
    ours, next_ours = _fused(plans)(x0, layers, states, g)
    present = functools.partial(_present, plans)
    theirs, next_theirs = _value_and_gradients(present, x0, layers, states, g)
    # They round to bfloat16 more often, which flips roundings to FP8, whose error is
    # 2.6e-2 in each of the layers, both ways.
    _assert_close(ours, theirs, 6 * 2.6e-2)
    # An element is rounded by up to 2^-4 in each of the layers.
    history = jax.tree.map(lambda s: s[:, 1:], (next_ours, next_theirs))
    for mine, other in zip(*map(jax.tree.leaves, history), strict=True):
        np.testing.assert_array_equal(mine[:, 1:], other[:, 1:])
        np.testing.assert_allclose(mine[:, 0], other[:, 0], rtol=3 * 2.0**-4)
        assert np.all(mine[:, 0] > 0)
    chex.assert_trees_all_equal_structs(next_ours, states)


@pytest.mark.parametrize("recipe", [DELAYED, BF16_DRHS, "bf16"])
def test_two_arrays_of_features_are_joined(recipe):
    layers, (x0, g) = _layers(RANK, 2), _inputs()
    states = _states(layers)
    if recipe == "bf16":
        states = tuple((None,) * len(layer.kernels) for layer in layers)
    run = _fused(_plans(RANK, 2, recipe))
    parts = x0[:, :16], x0[:, 16:]
    (y, dparts, dlayers), next_states = run(parts, layers, states, g)
    (theirs, dx0, their_dlayers), their_states = run(x0, layers, states, g)
    dx0 = dx0[:, :16], dx0[:, 16:]
    chex.assert_trees_all_equal((y, dparts), (theirs, dx0))
    chex.assert_trees_all_equal(next_states, their_states)
    chex.assert_trees_all_equal(dlayers, their_dlayers)


@pytest.mark.parametrize("recipe", [DELAYED, BF16_DRHS, "bf16"])
def test_results_do_not_see_the_zeros_that_pad_odd_sizes(recipe):
    layers, (x0, g) = _layers(RANK, 3), _inputs()
    states = _states(layers)
    if recipe == "bf16":
        states = tuple((None,) * len(layer.kernels) for layer in layers)
    choice = Choice("xla", get_recipe(recipe))
    shape = m, n, rank = M - 1, N - 3, RANK - 1
    specs = SiteSpec(m, n, rank), SiteSpec(m, rank, n)
    plans = (tuple(resolve(spec, choice, local_device()) for spec in specs),) * 3

    def zeroed(layer):
        v, u = layer.kernels
        v, u = v.at[n:].set(0).at[:, rank:].set(0), u.at[rank:].set(0).at[:, n:].set(0)
        return CrossLayer((v, u), layer.bias.at[n:].set(0))

    def cut(x0, g, layers):
        layers = [
            CrossLayer((v[:n, :rank], u[:rank, :n]), bias[:n])
            for (v, u), bias in layers
        ]
        return x0[:m, :n], g[:m, :n], tuple(layers)

    x0, g = (x.at[m:].set(0).at[:, n:].set(0) for x in (x0, g))
    layers = tuple(map(zeroed, layers))
    (y, dx0, dlayers), theirs = _fused(_plans(RANK, 3, recipe))(x0, layers, states, g)
    x0, g, layers = cut(x0, g, layers)
    ours, next_states = _fused(plans)(x0, layers, states, g)
    assert ours[0].shape == shape[:2]
    dx0, y, dlayers = cut(dx0, y, dlayers)
    # Sums over fewer terms may be added in another order, which flips few roundings.
    _assert_close(ours, (y, dx0, dlayers), 2.0**-8)
    chex.assert_trees_all_close(next_states, theirs, rtol=2.0**-4)


# Relative error of a cast in the L2 norm.
_OF_E4M3 = 2.6e-2


@pytest.mark.parametrize("spread", [0.0, 0.7])
def test_what_tails_read_in_fp8_adds_the_errors_of_its_casts(spread):
    """Rows of very different size have errors of their own size."""
    depth, plans, layers = 3, _plans(RANK, 3, m=128), _layers(RANK, 3)
    of_rows = jnp.exp(spread * support.normal(128, 1, seed=97))
    x0 = (support.normal(128, N, seed=98) * of_rows).astype(jnp.bfloat16)
    g = support.normal(128, N, seed=99, dtype=jnp.bfloat16)
    by_sites = functools.partial(_present, plans)
    present = functools.partial(_value_and_gradients, by_sites)
    _, states = present(x0, layers, _states(layers), g)  # of the inputs' own amaxes
    _, states = present(x0, layers, states, g)
    run = functools.partial(_equations, None, None)
    exact, _ = _value_and_gradients(run, x0, layers, states, g)
    theirs, _ = present(x0, layers, states, g)
    ours, _ = _fused(plans)(x0, layers, states, g)

    def of_each_row(results):
        return jax.tree.map(lambda x, y: _row_errors(x, y), results[:2], exact[:2])

    y, dx0 = (np.sqrt(depth + 1) * _OF_E4M3, np.sqrt(depth) * _OF_E4M3)
    added = y, np.hypot(y, dx0)  # of x0 and z, and for dx0 of d, too
    for mine, other, more in zip(*map(of_each_row, (ours, theirs)), added, strict=True):
        assert np.median(mine) <= np.hypot(np.median(other), more)
        assert np.max(mine) <= np.max(other) + 2 * more
    limit = np.hypot(y, dx0)
    mine, other = (_errors(x[2], exact[2]) for x in (ours, theirs))
    for x, y in zip(*map(jax.tree.leaves, (mine, other)), strict=True):
        assert x <= y + limit  # those of rows of one size may point the same way


def _row_errors(x, y):
    x, y = (np.asarray(v, np.float64) for v in (x, y))
    return np.linalg.norm(x - y, axis=1) / np.linalg.norm(y, axis=1)


def test_a_state_that_serves_two_networks_has_the_larger_amaxes():
    layers, (x0, g) = _layers(RANK, 1), _inputs()
    states, plans = _states(layers), _plans(RANK, 1)
    run = functools.partial(_network, plans=plans)

    def twice(x0, layers, states):
        return run(x0, layers, states) + run(4 * x0, layers, states)

    _, both = _value_and_gradients(twice, x0, layers, states, g)
    _, larger = _value_and_gradients(run, 4 * x0, layers, states, g)
    lhs = both[0][0].amax_history[0], larger[0][0].amax_history[0]
    np.testing.assert_array_equal(*lhs)


def _assert_triton_gives_the_results_of_xla(recipe, rank, depth, is_split):
    layers, (x0, g) = _layers(rank, depth), _inputs()
    states = _states(layers)
    if recipe == "bf16":
        states = tuple((None,) * len(layer.kernels) for layer in layers)
    plans = _plans(rank, depth, recipe)
    if is_split:  # the last columns are zeros
        x0 = x0[:, :13], x0[:, 13 : N - 5]
    theirs = _fused(plans)(x0, layers, states, g)
    run = functools.partial(_network, plans=plans, implementation="triton")
    ours = _value_and_gradients(run, x0, layers, states, g)
    # Float32 operations in another order flip few roundings, of deep networks more.
    _assert_close(ours, theirs, max(1, depth - 1) * 2.0**-8)


recipes = pytest.mark.parametrize("recipe", [DELAYED, BF16_DRHS, "bf16"])
networks = pytest.mark.parametrize(
    "rank, depth, is_split",
    [
        *[(RANK, 2, False), (RANK, 2, True), (None, 1, True), (None, 3, True)],
        (None, 4, True),  # more layers than the kernel of dx0 takes
    ],
)


@recipes
@networks
@pytest.mark.usefixtures("interpreted")
def test_kernels_of_triton_give_the_results_of_xla(
    recipe, rank, depth, is_split, monkeypatch
):
    # The interpreter takes no tracers.
    monkeypatch.setattr(
        tailed_products, "by_kernel", lambda run, *operands: run(*operands)
    )
    _assert_triton_gives_the_results_of_xla(recipe, rank, depth, is_split)


@recipes
@networks
@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
def test_kernels_of_triton_give_the_results_of_xla_on_a_gpu(
    recipe, rank, depth, is_split
):
    _assert_triton_gives_the_results_of_xla(recipe, rank, depth, is_split)


def test_what_is_not_served_has_a_reason():
    plans = _plans(RANK, 2)
    assert why_not(plans) is None
    assert why_not(_plans(RANK, 2, "bf16")) is None
    mixed = (plans[0], _plans(RANK, 1, "bf16")[0])
    assert why_not(mixed) == "the sites have 2 different choices"
    reasons = {
        "fp8_rowwise": "does not scale every operand by earlier amaxes",
        "fp8_tensorwise_delayed": "delayed scales are not initialized",
        "f32": "float32 is not bfloat16",
    }
    for recipe, reason in reasons.items():
        found = why_not(_plans(RANK, 2, recipe))
        assert found is not None and reason in found
    assert why_not(_plans(RANK, 1, m=24)) is not None
    assert why_not(_plans(RANK, 1, m=31)) is None
    layers, (x0, _) = _layers(RANK, 2), _inputs()
    with pytest.raises(ValueError, match="different choices"):
        _network(x0, layers, _states(layers), plans=mixed)


def test_a_network_without_its_state_is_refused():
    layers, (x0, _) = _layers(RANK, 1), _inputs()
    with pytest.raises(ValueError, match="needs a delayed-scaling state"):
        _network(x0, layers, ((None, None),), plans=_plans(RANK, 1))
