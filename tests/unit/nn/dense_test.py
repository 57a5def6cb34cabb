"""Dense layers and products of Flax's layers as sites: numbers, states, dtypes."""

import functools

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen

from loka_jax import nn
from loka_jax.nn import OVERWRITE_WITH_GRADIENT, Dense, Fp8DotGeneral
from tests import support
from tests.support import stand_ins
from tests.support.nn import (
    BF16,
    DELAYED,
    FACTORS,
    e4m3,
    gradients,
    initialized,
    rounded,
    scales_of,
    states,
    stored_table,
    table_after,
)

M, K, N = 32, 48, 16
X, KERNEL, G = rounded(M, K), rounded(K, N, seed=1), rounded(M, N, seed=2, scale=3.0)


def of_flax(layer, recipe, **options):
    """Returns a layer of Flax with our product."""
    product = functools.partial(Fp8DotGeneral, recipe=recipe)
    return layer(**options, use_bias=False, dot_general_cls=product)


def einsum(recipe):
    plain = linen.Einsum((N, K), "bk,nk->bn", use_bias=False)
    return nn.convert(plain, recipe=recipe)


def fused(recipe):
    plain = linen.Sequential([linen.Dense(N, use_bias=False)])
    return nn.convert(plain, recipe=recipe)


# Modules with the product x W: how x comes, and how the kernel does.
KINDS = {
    "dense": lambda recipe: Dense(N, recipe=recipe, use_bias=False),
    "norm_dense": lambda recipe: nn.NormDense(N, recipe=recipe, norm="none"),
    "several dims": lambda recipe: of_flax(
        linen.DenseGeneral, recipe, features=N, axis=(-2, -1)
    ),
    "fused": fused,
    "einsum": einsum,
}


def products(recipe):
    """Returns by kind y, dx and dW of x, W and g, and gradients of all variables."""
    table = stored_table()

    def run(x, kernel, g):
        found = {}
        for kind, make in KINDS.items():
            module, rows = make(recipe), x
            if kind == "several dims":
                rows = x.reshape(M, 6, 8)
            variables = initialized(module, rows, table=table)
            own = kernel.T if kind == "einsum" else kernel
            params = jax.tree.map(lambda p: own.reshape(p.shape), variables["params"])  # noqa: B023
            y, grads, dx = gradients(module, variables | {"params": params}, rows, g)
            (dkernel,) = jax.tree.leaves(grads["params"])
            dkernel = dkernel.T if kind == "einsum" else dkernel.reshape(K, N)
            found[kind] = (y, dx.reshape(M, K), dkernel), grads
        return found

    return jax.jit(run)(X, KERNEL, G)


def test_delayed_sites_cast_each_operand_by_its_own_stored_factor():
    x, w, g = (e4m3(*pair) for pair in zip((X, KERNEL, G), FACTORS, strict=True))
    amaxes = [np.abs(operand).max() for operand in (X, KERNEL, G)]
    next_table = table_after(stored_table(), amaxes)
    for (y, dx, dkernel), grads in products(DELAYED).values():
        support.assert_is_product(y, x, w.T, BF16)
        support.assert_is_product(dx, g, w, BF16)
        support.assert_is_product(dkernel, x.T, g.T, BF16)
        found = scales_of(states(grads)[0])
        np.testing.assert_array_equal(found, scales_of(next_table))


def test_a_bias_is_added_and_its_gradient_summed_in_float32():
    layer, rows = Dense(N, recipe="bf16"), 1 << 12
    x = np.ones((2, rows // 2, K), np.float32)
    variables = initialized(layer, x)
    params = variables["params"]
    # Not jitted: within a program XLA for CPUs drops roundings to bfloat16.
    y, pull = jax.vjp(lambda p: layer.apply({"params": p}, x), params)
    chex.assert_shape(y, (2, rows // 2, N))
    kernel = params["kernel"].astype(ml_dtypes.bfloat16).astype(np.float64)
    expected = kernel.sum(0) + params["bias"]
    np.testing.assert_allclose(np.float64(y[1, 3]), expected, rtol=2 * BF16, atol=0.02)
    g = np.ones(y.shape, ml_dtypes.bfloat16)
    g[0, 0] = 2
    # 2^12 + 1 is no bfloat16.
    np.testing.assert_array_equal(
        pull(jnp.asarray(g))[0]["bias"], np.full(N, rows + 1, np.float32)
    )


# Roundings of the products of two parts and of their sum; FP8 reads the whole rows.
@pytest.mark.parametrize("recipe, limit", [("bf16", 3 * BF16), ("fp8_rowwise", 0.0)])
def test_parts_of_rows_are_multiplied_as_the_rows_are(recipe, limit):
    layer = Dense(N, recipe=recipe)
    parts = X[:, :13], X[:, 13:]
    variables = initialized(layer, X)
    chex.assert_trees_all_equal(initialized(layer, parts), variables)

    @jax.jit
    def both(parts, x, g):
        y, dvariables, dparts = gradients(layer, variables, parts, g)
        ours = y, dvariables["params"]["kernel"], jnp.concatenate(dparts, axis=1)
        y, dvariables, dx = gradients(layer, variables, x, g)
        return list(zip(ours, (y, dvariables["params"]["kernel"], dx), strict=True))

    for a, b in both(parts, X, G):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= limit * np.linalg.norm(b)
    with nn.probing(nn.ProbeConfig()):  # sees whole rows, in one product
        seen = jax.eval_shape(layer.init, jax.random.key(0), parts)[nn.PROBE]
    assert seen["stats"].lhs.moments.mean.shape == (K,)


def test_parameters_start_as_those_of_flax():
    @jax.jit
    def start(key):
        dense = linen.Dense(N).init(key, X)["params"]
        norm = linen.LayerNorm().init(key, G)["params"]
        ours = (m.init(key, X)["params"] for m in (Dense(N), nn.NormDense(N)))
        return [*ours], [dense, {"kernel": dense["kernel"], "norm": norm}]

    chex.assert_trees_all_equal(*start(jax.random.key(0)))


def flat(tree):
    """Returns pairs of paths and leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in leaves
    ]


@pytest.mark.parametrize(
    "recipe, features, has_state",
    [
        (DELAYED, N, True),
        (DELAYED, N + 1, False),  # can never be FP8, and runs as bf16
        ("fp8_tensorwise", N, False),
    ],
)
def test_only_delayed_fp8_sites_have_a_state(recipe, features, has_state):
    layer = nn.Mlp((features,), recipe=recipe)
    # Initialized with one row, as models often are.
    found = initialized(layer, X[:1]).get(OVERWRITE_WITH_GRADIENT, {})
    paths = [(path, leaf.shape) for path, leaf in flat(found)]
    assert paths == [("dense_0/fp8_scaling", (3, 36))] * has_state
    assert nn.list_sites(layer, X)[0].is_fp8 == (features == N)


def test_evaluation_leaves_the_state_alone():
    layer = Dense(N, recipe=DELAYED)
    variables = initialized(layer, X, table=stored_table())
    apply = jax.jit(functools.partial(layer.apply, mutable=[OVERWRITE_WITH_GRADIENT]))
    _, updated = apply(variables, X)
    chex.assert_trees_all_equal(states(updated), states(variables))


@pytest.mark.parametrize(
    "features, axis, x_shape, mkn",
    [
        ((4, 8), -1, (2, 3, 48), (6, 48, 32)),
        (8, (0, 2), (4, 3, 12), (3, 48, 8)),
        (16, (2, 1), (5, 6, 8), (5, 48, 16)),
    ],
)
def test_inside_a_dense_general_it_contracts_the_same_dims(
    features, axis, x_shape, mkn
):
    make = functools.partial(linen.DenseGeneral, features, axis=axis, name="layer")
    ours = make(dot_general_cls=functools.partial(Fp8DotGeneral, recipe="f32"))
    x = support.normal(*x_shape)
    apply = jax.jit(lambda v, x: (ours.apply(v, x), make().apply(v, x)))
    chex.assert_trees_all_close(*apply(initialized(ours, x), x), rtol=1e-5, atol=1e-5)
    (site,) = nn.list_sites(ours, x)
    assert (site.spec.m, site.spec.k, site.spec.n) == mkn


class Heads(linen.Module):
    @linen.compact
    def __call__(self, lhs, rhs):
        dims = (((3,), (3,)), ((0, 2), (2, 0)))
        return Fp8DotGeneral(name="heads")(lhs, rhs, dims)


def test_batched_products_run_in_their_own_dtype():
    lhs, rhs = support.normal(5, 3, 2, 7), support.normal(2, 4, 5, 7, seed=1)
    y = jax.jit(functools.partial(Heads().apply, {}))(lhs, rhs)
    expected = np.einsum("amhk,hnak->ahmn", lhs, rhs)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_gradients_of_a_float16_layer_stay_in_range():
    plain = linen.Dense(N, dtype=jnp.float16, use_bias=False)
    layer = nn.convert(plain, recipe="fp8_rowwise")
    x, g = np.abs(X).astype(np.float16), np.full((M, N), 200, np.float32)
    variables = initialized(layer, x)
    # Positive terms, whose sums are large.
    params = jax.tree.map(lambda p: np.abs(p) + 1, variables["params"])
    _, found, dx = gradients(layer, variables | {"params": params}, x, g)
    dkernel, kernel = found["params"]["kernel"], np.float64(params["kernel"])
    assert (dx.dtype, dkernel.dtype) == (jnp.float16, jnp.float32)
    # Of a cast to E4M3 at most 2^-4, and those of bfloat16.
    sums = np.broadcast_to(200 * x.astype(np.float64).sum(0)[:, None], (K, N))
    np.testing.assert_allclose(dkernel, sums, rtol=1.1 * 2.0**-4)
    sums = np.broadcast_to(200 * kernel.sum(1), (M, K))
    np.testing.assert_allclose(np.float64(dx), sums, rtol=1.1 * 2.0**-4)


# Dense, norm and activation.


def test_sites_tell_their_epilogue_and_what_runs():
    layer = nn.NormDense(
        48, recipe="bf16", norm="rms", activation="gelu", use_bias=True
    )
    x = jax.ShapeDtypeStruct((4, 16, 32), jnp.float32)
    (site,) = nn.list_sites(layer, x)
    assert site.group is None and not site.follows
    assert site.why_not_fused == "no Hopper GPU" and site.plan.choice.provider == "xla"
    spec = site.spec
    assert (spec.m, spec.k, spec.n) == (64, 32, 48)
    assert (spec.norm, spec.activation, spec.use_bias) == ("rms", "gelu", True)
    assert (spec.out, spec.fp8_in) == ("compute", None)
    with nn.site_context(device=stand_ins.HOPPER):
        (site,) = nn.list_sites(layer, x)
        (by_xla,) = nn.list_sites(layer.clone(implementation="xla"), x)
    assert site.plan.choice.provider == "pallas"
    assert by_xla.plan.choice.provider == "xla"


def test_a_plan_that_is_given_is_the_sites():
    layer, x = nn.NormDense(48, recipe="bf16", norm="none"), jnp.ones((64, 32))
    (site,) = nn.list_sites(layer.clone(recipe="fp8_rowwise"), x)
    (planned,) = nn.list_sites(layer.clone(plan=site.plan), x)
    assert planned.plan == site.plan != nn.list_sites(layer, x)[0].plan


def test_initializers_are_those_that_are_given():
    ones, twos = (linen.initializers.constant(float(i)) for i in (1, 2))
    options = dict(kernel_init=ones, bias_init=twos, use_bias=True)
    for layer in (
        nn.NormDense(16, norm="none", **options),
        Dense(16, **options),
        nn.Mlp((16,), norm="none", kernel_init=ones),
        nn.CrossNet(1, recipe="f32", kernel_init=ones),
    ):
        init = functools.partial(layer.init, jax.random.key(0))
        params = jax.jit(init)(jnp.ones((4, 16)))["params"]
        for path, leaf in flat(params):
            expected = 1 if path.endswith("kernel") else 2 if path == "bias" else 0
            np.testing.assert_array_equal(leaf, np.full(leaf.shape, expected, "f4"))
