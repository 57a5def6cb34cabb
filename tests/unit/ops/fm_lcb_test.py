"""`fm_lcb` and its parts against numpy in float64, its kernels against XLA."""

import functools

import chex
import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from loka_jax.ops import fm_lcb as ops
from loka_jax.ops import kernels
from loka_jax.ops.device import HOPPER, Device
from loka_jax.ops.fm_lcb import (
    BY_XLA,
    FmLcbPlan,
    compress,
    fm_lcb,
    plan_fm_lcb,
    product,
)
from loka_jax.ops.joined_norm import joined_norm
from tests import support
from tests.support.pallas import assert_no_races, interpret  # noqa: F401

B, N, D, K, L = 5, 12, 8, 3, 4


def operands(dtype=jnp.float32, batch=B):
    weight = support.normal(N, K + L, seed=1) / N**0.5
    return support.normal(batch, N, D, dtype=dtype), weight


def plain(x, weight):
    """Returns FM and LCB of `X (X^T Y)` and `W_L^T X`, one example after the other."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    fm = np.stack([x_i @ (x_i.T @ weight[:, :K]) for x_i in x])
    return fm, np.stack([weight[:, K:].T @ x_i for x_i in x])


def plain_gradients(x, weight, dfm, dlcb):
    """Returns the gradients in float64, by the rule of each product."""
    args = (np.asarray(a, np.float64) for a in (x, weight, dfm, dlcb))
    x, weight, dfm, dlcb = args
    dx, dweight = np.zeros_like(x), np.zeros_like(weight)
    for x_i, dfm_i, dlcb_i, dx_i in zip(x, dfm, dlcb, dx, strict=True):
        p = x_i.T @ weight[:, :K]
        dp = x_i.T @ dfm_i  # [d, k]
        dx_i += dfm_i @ p.T + weight[:, :K] @ dp.T + weight[:, K:] @ dlcb_i
        dweight += np.concatenate([x_i @ dp, x_i @ dlcb_i.T], axis=1)
    return dx, dweight


def assert_close(x, exact, magnitude, roundings):
    """Asserts equality up to float32 sums, and some roundings of values on the way.

    `magnitude` is the result of the operands' absolute values.
    """
    chex.assert_equal_shape([x, exact])
    bound = support.sum_error(2 * N * D * B, magnitude) + roundings * magnitude
    assert np.all(np.abs(np.asarray(x, np.float64) - exact) <= bound)


# An operand in bfloat16 differs by half an ulp; at most four are rounded one after the
# other: the weight, P, dP and the result.
@pytest.mark.parametrize(
    "dtype, roundings", [(jnp.float32, 0.0), (jnp.bfloat16, 4.1 * 2.0**-9)]
)
def test_results_and_gradients_are_those_of_the_equations(dtype, roundings):
    args = operands(dtype)
    out, pull = jax.vjp(lambda x, w: fm_lcb(x, w, k=K), *args)
    chex.assert_type(out, dtype)
    bounds = plain(*map(np.abs, args))
    for found, exact, bound in zip(out, plain(*args), bounds, strict=True):
        assert_close(found, exact, bound, roundings)
    g = (
        support.normal(B, N, K, seed=2, dtype=dtype),
        support.normal(B, L, D, seed=3, dtype=dtype),
    )
    dx, dweight = pull(g)
    chex.assert_type([dx, dweight], [dtype, jnp.float32])
    exact = plain_gradients(*args, *g)
    bounds = plain_gradients(*map(np.abs, (*args, *g)))
    # The gradient of x is also a sum of two rounded products.
    assert_close(dx, exact[0], bounds[0], 2 * roundings)
    assert_close(dweight, exact[1], bounds[1], roundings)


def test_gradients_agree_with_differences():
    run = lambda x, w: fm_lcb(jnp.asarray(x), jnp.asarray(w), k=K)  # noqa: E731
    jax.test_util.check_grads(run, operands(batch=2), 1, modes=["rev"], rtol=1e-2)


def test_the_gradient_of_a_weight_is_not_rounded_to_bfloat16():
    args = operands(jnp.bfloat16)
    _, pull = jax.vjp(compress, *args)
    _, dweight = pull(jnp.ones((B, K + L, D), jnp.bfloat16))
    assert np.any(dweight != dweight.astype(jnp.bfloat16).astype(jnp.float32))


def test_products_are_those_of_each_example():
    lhs, rhs = support.normal(3, 4, 5), support.normal(3, 5, 6, seed=1)
    expected = np.stack([a @ b for a, b in zip(lhs, rhs, strict=True)])
    chex.assert_trees_all_close(product(lhs, rhs), expected, atol=1e-5)


def test_under_shard_map_the_gradient_of_the_weight_is_summed():
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    x, weight = operands(batch=16)

    def gradients(x, weight):
        def loss(x, weight):
            return sum(jnp.sum(part**2) for part in fm_lcb(x, weight, k=K))

        return jax.grad(loss, argnums=(0, 1))(x, weight)

    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((8,), ("data",), axis_types=auto)
    specs = dict(in_specs=(P("data"), P()), out_specs=(P("data"), P()))
    step = jax.jit(jax.shard_map(gradients, mesh=mesh, **specs))
    expected = gradients(x, weight)
    largest = max(float(np.abs(g).max()) for g in expected)
    chex.assert_trees_all_close(
        step(x, weight), expected, atol=1e-5 * largest, rtol=1e-5
    )


# The kernels, in the interpreter.

SIZES = dict(batch=3, n=24, d=16, k=16, m=32)
K_SERVED, L_SERVED = SIZES["k"], SIZES["m"] - SIZES["k"]
WUKONG_M = dict(batch=300, n=64, d=128, k=32, m=64)


@pytest.fixture
def interpreter(interpret):  # noqa: F811
    return Device(platform="cpu", interpret=interpret)


def served(batch, n, d, k, m):
    """Returns operands that both kernels serve, and gradients of the results."""
    weight = support.normal(n, m, seed=1) / n**0.5
    shapes = (batch, n, d), (batch, n, k), (batch, m - k, d)
    x, dfm, dlcb = (
        support.normal(*shape, seed=seed, dtype=jnp.bfloat16)
        for seed, shape in enumerate(shapes)
    )
    return x, weight, (dfm, dlcb)


def both_passes(x, weight, gradients, *, plan=BY_XLA):
    run = functools.partial(fm_lcb, k=gradients[0].shape[-1], plan=plan)
    out, pull = jax.vjp(run, x, weight)
    return out, pull(gradients)


# Each pass of either has at most four roundings of 2**-9, one after the other.
LEAST_DB = 42.0


@pytest.mark.parametrize(
    "reasons, launches",
    [
        ({}, ["fm_lcb", "fm_lcb_backward"]),
        (dict(why_not_forward="a test"), ["fm_lcb_backward"]),
        (dict(why_not_backward="a test"), ["fm_lcb"]),
    ],
)
def test_kernels_do_what_xla_does(interpreter, monkeypatch, reasons, launches):
    launched = []

    def by_kernel(run, *operands):
        launched.append(run.func.__name__)
        return kernels.by_kernel(run, *operands)

    monkeypatch.setattr(ops, "by_kernel", by_kernel)
    args = served(**SIZES)
    plan = plan_fm_lcb(args[0], SIZES["m"], SIZES["k"], interpreter)
    plan = plan._replace(**reasons)
    found = jax.jit(functools.partial(both_passes, plan=plan))(*args)
    expected = jax.jit(both_passes)(*args)
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    assert all(support.sqnr_db(exact, x) > LEAST_DB for x, exact in pairs)
    assert launched == launches
    assert_no_races()


def layer(x, weight, part, joined, plan):
    """Returns a layer of Wukong without its MLP, for a residual in parts or whole."""
    if joined:
        options = dict(k=K_SERVED, counts=(8, L_SERVED), plan=plan)
        fm, lcb, x = ops.fm_lcb_residual(x, weight, **options)
    else:
        fm, lcb = fm_lcb(x, weight, k=K_SERVED, plan=plan)
    return fm, joined_norm((part, lcb), x)


@pytest.mark.parametrize("by_kernel", [False, True])
def test_a_residual_in_parts_has_the_gradient_of_a_whole_one(interpreter, by_kernel):
    x, weight, (dfm, _) = served(**SIZES)
    part = support.normal(SIZES["batch"], 8, SIZES["d"], seed=5, dtype=jnp.bfloat16)
    dy = support.normal(*x.shape, seed=6, dtype=jnp.bfloat16)
    plan = plan_fm_lcb(x, SIZES["m"], K_SERVED, interpreter) if by_kernel else BY_XLA

    def gradients(joined):
        run = functools.partial(layer, joined=joined, plan=plan)
        out, pull = jax.vjp(run, x, weight, part)
        return out, pull((dfm, dy))

    (out, ours), (whole, theirs) = gradients(True), gradients(False)
    chex.assert_trees_all_equal(out, whole)
    chex.assert_trees_all_equal(ours[1:], theirs[1:])
    # The sum is rounded once in place of twice, where a kernel adds it.
    assert support.sqnr_db(theirs[0], ours[0]) > LEAST_DB
    assert by_kernel or np.array_equal(theirs[0], ours[0])


@pytest.mark.parametrize(
    "counts, backward, reason",
    [
        ((8, 16), None, None),
        ((8, 16), "a test", "a test"),
        ((12, 12), None, r"(12, 12) embeddings are no multiples of 8"),
    ],
)
def test_a_plan_says_why_a_residual_stays_whole(counts, backward, reason):
    found = FmLcbPlan(None, backward).why_not_residual(counts)
    assert found == reason or reason in found


def test_kernels_under_vmap_run_one_by_one(interpreter):
    x, weight, gradients = served(**SIZES | dict(batch=4))
    pairs = jax.tree.map(lambda g: g.reshape(2, 2, *g.shape[1:]), (x, gradients))
    plan = plan_fm_lcb(x[:2], SIZES["m"], SIZES["k"], interpreter)
    run = lambda x, g, **plan: both_passes(x, weight, g, **plan)  # noqa: E731
    found = jax.vmap(functools.partial(run, plan=plan))(*pairs)
    expected = jax.vmap(run)(*pairs)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    assert all(support.sqnr_db(exact, x) > LEAST_DB for x, exact in pairs)


@pytest.mark.gpu
def test_on_the_device_kernels_do_what_xla_does():
    args = served(**WUKONG_M)
    plan = plan_fm_lcb(args[0], WUKONG_M["m"], WUKONG_M["k"], HOPPER)
    found = jax.jit(functools.partial(both_passes, plan=plan))(*args)
    expected = jax.jit(both_passes)(*args)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    assert all(support.sqnr_db(exact, x) > LEAST_DB for x, exact in pairs)


@pytest.mark.parametrize(
    "sizes, dtype, device, forward, backward",
    [
        ({}, "bfloat16", HOPPER, None, None),
        ({}, "bfloat16", Device(platform="cpu"), "no Hopper", "no Hopper"),
        ({}, "float32", HOPPER, "embeddings in float32", "embeddings in float32"),
        (dict(k=8), "bfloat16", HOPPER, None, "k=8 is not"),
        (dict(n=20), "bfloat16", HOPPER, "n=20 is not", "n=20 is not"),
    ],
)
def test_the_plan_says_why_xla_runs_a_pass(sizes, dtype, device, forward, backward):
    sizes = SIZES | sizes
    shape = sizes["batch"], sizes["n"], sizes["d"]
    x = jax.ShapeDtypeStruct(shape, dtype)
    plan = plan_fm_lcb(x, sizes["m"], sizes["k"], device)
    for expected, reason in zip((forward, backward), plan, strict=False):
        assert reason is None if expected is None else expected in reason
