"""Models as others write them: caches, subclasses, odd dtypes and transformations."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from loka_jax import nn
from loka_jax.nn import OVERWRITE_WITH_GRADIENT as STATES
from tests.support.nn import (
    DELAYED,
    gradients,
    initialized,
    listed,
    rounded,
    stored_table,
)

pytestmark = pytest.mark.usefixtures("as_users_do")
KEY = jax.random.key(0)
X = rounded(32, 64)


# What JAX has in a cache.


class JitMethod(linen.Module):
    @linen.jit
    @linen.compact
    def __call__(self, x):
        return linen.Dense(32, name="dense")(x)


@jax.jit
def _applied(variables, x):
    return linen.Dense(32, parent=None).apply(variables, x)


class JitApply(linen.Module):
    def setup(self):
        self.kernel = self.param("kernel", linen.initializers.ones, (64, 32))

    def __call__(self, x):
        return _applied({"params": {"kernel": self.kernel, "bias": jnp.zeros(32)}}, x)


JIT_CLASS = linen.jit(linen.Dense)
CACHED = [
    ("dense", JitMethod()),
    ("", JIT_CLASS(32)),
    ("layers_0", linen.Sequential([linen.remat(linen.Dense)(32)])),
    ("", JitApply()),
]


def is_fp8(model, variables):
    return "f8_e4m3" in str(jax.make_jaxpr(model.apply)(variables, X))


@pytest.mark.parametrize("path, plain", CACHED, ids=range(4))
def test_what_jax_traced_before_runs_under_no_other_settings(path, plain):
    model, wide = (nn.convert(plain, recipe=x) for x in ("fp8_rowwise", "bf16"))
    variables = initialized(plain, X)
    for _ in range(2):
        runs = [is_fp8(m, variables) for m in (plain, model, wide)]
        assert runs == [False, True, False]
        with nn.overriding({path: "bf16"}):
            assert not is_fp8(model, variables)
        assert list(listed(model, X)) == [path]
        jax.eval_shape(model.init, KEY, X)


# Which product is a site.


class Lora(linen.Dense):
    @linen.compact
    def __call__(self, inputs):
        low = self.param("low", linen.initializers.ones, (64, 32))
        return super().__call__(inputs) + inputs @ low


class LoraEinsum(linen.Einsum):
    @linen.compact
    def __call__(self, inputs, einsum_str=None):
        low = self.param("low", linen.initializers.ones, (64, 32))
        return super().__call__(inputs, einsum_str) + inputs @ low


class Own(linen.Dense):
    @linen.compact
    def __call__(self, inputs):
        return inputs @ self.param("weight", linen.initializers.ones, (64, 32))


@pytest.mark.parametrize(
    "layer, paths",
    [
        (Lora(32), ["", "low"]),
        (LoraEinsum((64, 32), "bk,kn->bn"), ["", "low"]),
        (Own(32), ["weight"]),
        (linen.jit(linen.Dense)(32), [""]),
    ],
    ids=range(4),
)
def test_every_product_of_a_subclass_is_a_site_at_its_weight(layer, paths):
    inner = nn.convert(layer, recipe="fp8_rowwise")
    for model in (nn.convert(layer, recipe="f32"), nn.convert(inner)):
        sites = nn.list_sites(model, X)
        assert [(x.path, x.left, x.count) for x in sites] == [
            (path, None, 1) for path in paths
        ]
        assert {(x.spec.m, x.spec.k, x.spec.n) for x in sites} == {(32, 64, 32)}
    variables = initialized(layer, X)
    exact = nn.convert(layer, recipe="f32").apply(variables, X)
    np.testing.assert_allclose(exact, layer.apply(variables, X), rtol=1e-4, atol=1e-4)
    left = nn.list_sites(nn.convert(layer, skip="*"), X)
    assert [(x.left, x.count) for x in left] == [("skip='*'", 1)] * len(paths)


def test_of_two_conversions_the_outer_one_prevails():
    plain = linen.Sequential([linen.Dense(32), linen.Dense(48), linen.Dense(16)])
    inner = nn.convert(plain, recipe="fp8_tensorwise", skip="layers_2")
    outer = nn.convert(inner, recipe="fp8_rowwise", only="layers_1")
    sites = {p: (s.recipe, s.count, s.left) for p, s in listed(outer, X).items()}
    assert sites == {
        "layers_0": ("fp8_tensorwise", 1, None),
        "layers_1": ("fp8_rowwise", 1, None),
        "layers_2": ("bf16", 1, "skip='layers_2'"),
    }


class Tied(linen.Module):
    def setup(self):
        self.table = linen.Embed(64, 32)
        self.decoder = linen.Dense(64, use_bias=False)

    def __call__(self, ids):
        kernel = {"params": {"kernel": self.table.embedding.T}}
        return self.decoder.apply(kernel, self.table(ids))


IDS = np.zeros(32, np.int32)


def test_a_tied_decoder_is_a_site_at_its_table_with_scales():
    model = nn.convert(Tied(), recipe=DELAYED)
    assert list(listed(model, IDS)) == ["table/embedding"]
    variables = model.init(KEY, IDS)
    run = lambda variables: jnp.sum(model.apply(variables, IDS) ** 2)  # noqa: E731
    states = jax.jit(jax.grad(run))(variables)
    assert np.all(np.max(stored(states), axis=-1) > 0)
    whole = linen.Sequential([Tied(), linen.Dense(16)])
    (tied, _) = nn.list_sites(nn.convert(whole, skip="layers_0/table/*"), IDS)
    assert (tied.path, tied.is_fp8) == ("layers_0/table/embedding", False)


# Delayed scales under transformations of Flax.

VMAPPED = linen.vmap(linen.Dense, variable_axes={"params": 0}, split_rngs={"params": 1})
SCANNED = linen.scan(
    linen.remat(linen.SimpleCell),
    variable_axes={"params": 0},
    split_rngs={"params": True},
    in_axes=linen.broadcast,
    length=3,
)


def stored(variables):
    (table,) = {x.shape: x for x in jax.tree.leaves(variables[STATES])}.values()
    return table


@pytest.mark.parametrize(
    "model, arguments, shape",
    [
        (linen.RNN(linen.SimpleCell(32)), [rounded(32, 3, 32)], (3, 36)),
        (SCANNED(32), [X[:, :32], rounded(32, 32)], (3, 3, 36)),
    ],
    ids=["rnn", "scan"],
)
def test_scales_go_through_transformations_that_do_not_know_of_them(
    model, arguments, shape
):
    converted = nn.convert(model, recipe=DELAYED)
    variables = converted.init(KEY, *arguments)
    assert stored(variables).shape == shape

    def loss(variables):
        y = converted.apply(variables, *arguments)
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(y))

    states = jax.jit(jax.grad(loss))(variables)[STATES]
    assert all(np.all(np.max(x, axis=-1) > 0) for x in jax.tree.leaves(states))


def test_stacked_layers_are_sites_each_with_scales():
    x, plain = rounded(3, 16, 64), VMAPPED(32)
    (site,) = nn.list_sites(nn.convert(plain, recipe=DELAYED), x)
    assert (site.spec.m, site.batch, site.count, site.is_fp8) == (16, None, 3, True)
    assert "vmap stacked" in str(site.why_not_fused)
    variables = nn.convert(plain, recipe=DELAYED).init(KEY, x)
    assert stored(variables).shape == (3, 3, 36)

    @jax.jit
    def run(variables, x):
        models = plain, *(nn.convert(plain, recipe=r) for r in ("f32", DELAYED))
        loss = lambda v, m: jnp.sum(jnp.sin(m.apply(v, x)))  # noqa: E731
        return [jax.value_and_grad(loss)(variables, m) for m in models]

    (a, da), (b, db), (_, dc) = run(variables, x)
    np.testing.assert_allclose(a, b, rtol=1e-5)
    np.testing.assert_allclose(da["params"]["kernel"], db["params"]["kernel"], 1e-3)
    assert np.all(np.max(stored(dc), axis=-1) > 0)


# Odd operands.


@pytest.mark.parametrize(
    "layer", [linen.Dense(8), linen.Sequential([linen.Dense(8)]), linen.DenseGeneral(8)]
)
@pytest.mark.parametrize(
    "x",
    [X.astype(np.complex64), np.ones((4, 0)), np.ones((0, 64))],
    ids=["i", "k", "m"],
)
def test_a_complex_or_empty_layer_runs_as_in_flax(layer, x):
    model = nn.convert(layer, recipe="fp8_tensorwise")
    variables = initialized(layer, x)
    expected = layer.apply(variables, x)
    # Of an empty product the bias is left, in a Sequential rounded to bfloat16.
    np.testing.assert_allclose(model.apply(variables, x), expected, rtol=2**-8)
    assert not nn.list_sites(model, x)[0].is_fp8


def test_all_variables_may_be_cast_and_forward_mode_is_refused_by_a_sentence():
    model = nn.convert(linen.Dense(32), recipe=DELAYED)
    variables = initialized(model, X, table=stored_table())
    for dtype in (jnp.bfloat16, jnp.float16):  # in float16 scales start anew
        cast = jax.tree.map(lambda x: x.astype(dtype), variables)  # noqa: B023
        y, grads, _ = gradients(model, cast, X, np.ones((32, 32), np.float32))
        assert np.all(np.isfinite(np.float32(y)))
        assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype(dtype)}
        nn.check_scales(grads)

    def run(x):
        return model.apply(variables, x)

    for derive in (jax.jacfwd(run), lambda x: jax.jvp(jax.vmap(run), (x,), (x,))):
        with pytest.raises(ValueError, match="no derivatives in forward mode"):
            derive(X)
    assert jax.eval_shape(jax.hessian(run), X[0]).shape == (32, 64, 64)


@pytest.mark.parametrize("name", ["module", "network"])
def test_an_object_around_a_model_is_told_where_the_model_is(name):
    for model in (linen.Dense(8), nnx.Linear(4, 8, rngs=nnx.Rngs(0))):
        with pytest.raises(ValueError, match=f"its attribute '{name}'"):
            nn.convert(types.SimpleNamespace(**{name: model}))


@pytest.mark.parametrize("rows", [16, 128])
def test_layers_with_stacked_weights_have_bfloat16_gradients_on_a_cpu(rows):
    axes = dict(in_axes=None, variable_axes={"params": 0}, split_rngs={"params": True})
    layers = linen.vmap(nn.Dense, axis_size=4, **axes)(8, recipe="bf16")
    x = rounded(rows, 64)
    variables = initialized(layers, x)
    _, grads, dx = gradients(layers, variables, x, np.ones((4, rows, 8), np.float32))
    kernels = variables["params"]["kernel"].astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_allclose(dx, np.tile(kernels.sum((0, 2)), (rows, 1)), rtol=0.03)
    expected = np.broadcast_to(x.sum(0)[:, None], (4, 64, 8))
    np.testing.assert_allclose(grads["params"]["kernel"], expected, rtol=0.01, atol=0.1)
