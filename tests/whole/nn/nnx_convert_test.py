"""Flax NNX models run as sites by `nn.convert`."""

import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from loka_jax import nn
from tests import support
from tests.support.nn import (
    BF16,
    DELAYED,
    FACTORS,
    e4m3,
    listed,
    rounded,
    stored_table,
    table_after,
)

X = rounded(32, 48)


pytestmark = pytest.mark.usefixtures("as_users_do")


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(48, 32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 32, decode=False, rngs=rngs)
        self.einsum = nnx.Einsum("bk,nk->bn", (16, 32), (16,), rngs=rngs)
        self.head = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        h = nnx.relu(self.up(x))
        h = h + self.attention(h[None])[0]
        return self.head(nnx.relu(self.einsum(h)))[:, 0]


PATHS = ["up", *(f"attention/{p}" for p in ("query", "key", "value", "out")), "einsum"]


def drawn(make):
    """Returns a model whose parameters numpy drew, for JAX would compile each."""
    with jax.numpy_dtype_promotion("standard"):
        graph, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    def value(path, leaf):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return rounded(*leaf.shape, seed=len(str(path)), scale=0.2)
        return jax.random.key(0) if "key" in str(leaf.dtype) else jnp.uint32(0)

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(value, state))


@pytest.fixture(scope="module")
def net():
    return drawn(Net)


def test_layers_are_sites_at_their_own_paths(net):
    every = listed(nn.convert(net, recipe="fp8_rowwise"), X)
    assert sum(site.share for site in every.values()) == pytest.approx(1)
    sites = {path: site for path, site in every.items() if site.left is None}
    assert list(sites) == [*PATHS, "head"]
    left = {site.left for path, site in every.items() if path not in sites}
    scores = "the scores of softmax attention: no Hopper GPU"
    assert left == {scores, "a product of data and data"}
    assert [path for path, site in sites.items() if site.is_fp8] == PATHS
    assert {site.recipe for site in sites.values()} == {"fp8_rowwise"}
    spec = sites["einsum"].spec
    assert (spec.m, spec.k, spec.n) == (32, 32, 16)
    assert sites["up"].spec.activation == sites["einsum"].spec.activation == "relu"
    groups = [sites[path].group for path in PATHS[1:4]]
    assert groups == [groups[0]] * 3 and groups[0] is not None
    ours = nn.convert(net, recipe="f32")
    y, expected = nnx.jit(lambda a, b, x: (a(x), b(x)))(ours, net, X)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_equal(nnx.state(ours, nnx.Param), nnx.state(net, nnx.Param))


def test_only_and_skip_choose_layers(net):
    model = nn.convert(net, only=("attention/*", "up"), recipe="bf16", skip="*/out")
    assert [s.path for s in nn.list_sites(model, X) if s.left is None] == PATHS[:4]
    for options in ({"skip": "top"}, {"only": ("up", "top")}):
        with pytest.raises(ValueError, match="'top' matches no dense layer: there are"):
            nn.list_sites(nn.convert(net, **options), X)
    with pytest.raises(ValueError, match="there is nothing to convert"):
        nn.list_sites(nn.convert(nnx.LayerNorm(48, rngs=nnx.Rngs(0))), X)


WRT = nnx.DiffState(0, nnx.Any(nnx.Param, nn.Fp8State))


class Pair(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(48, 16, use_bias=False, rngs=rngs)
        self.general = nnx.LinearGeneral(
            (6, 8), 16, axis=(-2, -1), use_bias=False, rngs=rngs
        )
        self.einsum = nnx.Einsum("bk,nk->bn", (16, 48), None, rngs=rngs)
        # None can be in FP8, so that they keep no scales: n is 12, or k is.
        self.narrow = nnx.Linear(48, 12, use_bias=False, rngs=rngs)
        self.few = nnx.Linear(12, 16, use_bias=False, rngs=rngs)
        self.few_einsum = nnx.Einsum("bk,nk->bn", (16, 12), None, rngs=rngs)

    def __call__(self, x):
        outs = self.linear(x), self.general(x.reshape(-1, 6, 8)), self.einsum(x)
        few = self.narrow(x)
        return outs, self.few(few), self.few_einsum(few)


def test_delayed_sites_cast_each_operand_by_its_own_stored_factor():
    model = nn.convert(drawn(Pair), X, recipe=DELAYED)
    kernel, g = rounded(48, 16, seed=1), rounded(32, 16, seed=2, scale=3.0)
    tables = nnx.state(model, nn.Fp8State)
    assert len(jax.tree.leaves(tables)) == 3
    nnx.update(model, jax.tree.map(lambda _: stored_table(), tables))
    layers = {"linear": kernel, "general": kernel.reshape(6, 8, 16), "einsum": kernel.T}
    for name, value in layers.items():
        getattr(model, name).kernel.set_value(value)

    def loss(model, x, g):
        outs, *_ = model(x)
        return sum(jnp.sum(y.astype(jnp.float32) * g) for y in outs), outs

    @nnx.jit
    def step(model, x, g):
        grads, outs = nnx.grad(loss, argnums=WRT, has_aux=True)(model, x, g)
        rest = nn.take_scaling(model, grads)
        assert not jax.tree.leaves(nnx.filter_state(rest, nn.Fp8State))
        return rest, outs

    rest, outs = step(model, X, g)
    x, w, g_cast = (e4m3(*pair) for pair in zip((X, kernel, g), FACTORS, strict=True))
    for y in outs:
        support.assert_is_product(y, x, w.T, BF16)
    grads = {name: rest[name]["kernel"].get_value() for name in layers}
    grads["einsum"] = grads["einsum"].T
    for dkernel in grads.values():
        support.assert_is_product(dkernel.reshape(48, 16), x.T, g_cast.T, BF16)
    amaxes = [np.abs(operand).max() for operand in (X, kernel, g)]
    expected = table_after(stored_table(), amaxes)
    for table in jax.tree.leaves(nnx.state(model, nn.Fp8State)):
        np.testing.assert_array_equal(table, expected)


class Stack(nnx.Module):
    def __init__(self, make):
        self.layers = nnx.vmap(make)(nnx.Rngs(0).split(3))

    def __call__(self, x):
        return nnx.scan(
            lambda x, layer: layer(x).reshape(x.shape),
            in_axes=(nnx.Carry, nnx.StateAxes({nnx.Param: 0})),
            out_axes=nnx.Carry,
        )(x, self.layers)


class Hand(nnx.Module):
    """Products without a layer."""

    def __init__(self, rngs):
        self.w = nnx.Param(jnp.zeros((48, 32)))
        self.parts = nnx.List([nnx.Param(jnp.zeros((32, 16)))])

    def __call__(self, x):
        h = nnx.relu(x @ self.w)
        return jnp.einsum("bk,kn->bn", h, self.parts[0][...])


class Shared(nnx.Module):
    """A table that embeds and is read as a head, twice, by other names."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 48, rngs=rngs)

    def __call__(self, x):
        return self.embed.attend(x) + x @ self.embed.embedding.T


MODELS = {
    "scan": (
        lambda rngs: Stack(lambda rngs: nnx.Linear(48, 48, rngs=rngs)),
        {"layers": ((3, 3, 36), 3)},
    ),
    "scan_of_einsums": (
        lambda rngs: Stack(lambda rngs: nnx.Einsum("bk,kn->bn", (48, 48), rngs=rngs)),
        {"layers": ((3, 3, 36), 3)},
    ),
    "hand": (Hand, {"w": ((3, 36), 1), "parts/0": ((3, 36), 1)}),
    "shared": (Shared, {"embed/embedding": ((3, 36), 2)}),
}


@pytest.mark.parametrize("name", MODELS)
def test_delayed_scales_lie_beside_the_weights_of_any_model(name):
    make, expected = MODELS[name]
    model = nn.convert(drawn(make), X, recipe=DELAYED)
    found = {
        "/".join(map(str, path)): state.shape
        for path, state in nnx.to_flat_state(nnx.state(model, nn.Fp8State))
    }
    sites = listed(model, X)
    assert {path: site.count for path, site in sites.items()} == {
        path: count for path, (_, count) in expected.items()
    }
    assert sorted(found.values()) == sorted(shape for shape, _ in expected.values())
    assert all(path.endswith("fp8_scaling") for path in found)
    x, g = X, rounded(*jax.eval_shape(model, X).shape, seed=5)

    def loss(model, x):
        return jnp.sum(jnp.float32(model(x)) * g)

    # The gradient of each table is its next value, whether a scan cut it or not.
    gradients = nnx.jit(nnx.grad(loss, argnums=WRT))(model, x)
    for table in jax.tree.leaves(nnx.filter_state(gradients, nn.Fp8State)):
        assert (np.asarray(table)[..., 0] > 0).all()
    # In float32 it is the model as written, by bits of the same products.
    plain, ours = drawn(make), nn.convert(drawn(make), recipe="f32")
    for a, b in zip(
        *(jax.tree.leaves(nnx.jit(nnx.grad(loss))(m, x)) for m in (plain, ours)),
        strict=True,
    ):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5 * np.abs(a).max())


def test_delayed_scales_are_made_by_a_first_call():
    model = nn.convert(drawn(Hand), recipe=DELAYED)
    with pytest.raises(ValueError, match="site 'w' cannot be made here: call the"):
        jax.grad(lambda x: jnp.sum(jnp.float32(model(x))))(X)
    nnx.jit(lambda model, x: model(x))(model, X)
    assert len(jax.tree.leaves(nnx.state(model, nn.Fp8State))) == 2
    with pytest.raises(ValueError, match="takes inputs in `init`"):
        nn.convert(linen.Dense(8), X)
    with pytest.raises(ValueError, match="Counter has no __call__ that could take"):
        nn.convert(Counter(), X)


class Stateful(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(48, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls, self.last = 0, nnx.data({"h": jnp.zeros((32, 16))})

    def __call__(self, x):
        self.calls += 1
        self.last["h"] = h = self.linear(x)
        self.seen = nnx.Intermediate(h)
        return self.dropout(self.norm(self.shifted(h)))

    @staticmethod
    def shifted(h):
        return h + 1

    def part(self):
        return self.linear


def test_calls_change_the_model_as_they_do_the_one_as_written():
    plain, ours = drawn(Stateful), nn.convert(drawn(Stateful), recipe="f32")
    assert isinstance(ours, Stateful) and ours.part() is ours.linear
    assert ours.shifted(1) == 2
    for _ in range(2):
        results = [(m(X), m.last, m.calls) for m in (plain, ours)]
        chex.assert_trees_all_close(*results, rtol=1e-5, atol=1e-5)
    states = [
        nnx.to_pure_dict(nnx.state(m, nnx.Not(nnx.RngKey))) for m in (plain, ours)
    ]
    chex.assert_trees_all_close(*states, rtol=1e-5, atol=1e-5)
    assert states[1]["dropout"]["rngs"]["count"] == 2
    again = pickle.loads(pickle.dumps(nn.convert(ours, recipe="bf16", only="linear")))
    assert type(again) is type(ours) and listed(again, X)["linear"].recipe == "bf16"
    # A part, and what reads the model alone, run converted under any transformation.
    site = nn.list_sites(nn.convert(plain, recipe="fp8_rowwise").linear, X)
    assert [(s.path, s.is_fp8) for s in site] == [("linear", True)]
    parts = plain.linear, ours.linear
    dx = [jax.grad(lambda x, m=m: jnp.sum(m(x) ** 2))(X) for m in parts]
    np.testing.assert_allclose(dx[1], dx[0], rtol=1e-4, atol=1e-5)


class Counter(nnx.Module):
    def __init__(self):
        self.count = nnx.Variable(jnp.uint32(0))


class Counted(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(48, 16, rngs=rngs)

    def __call__(self, x, *, counters):
        for counter in counters:
            counter.count[...] += 1
        return self.linear(x)


def test_modules_among_the_arguments_are_changed():
    model, counters = nn.convert(drawn(Counted)), [Counter(), Counter()]
    assert [s.path for s in nn.list_sites(model, X, counters=counters)] == ["linear"]
    assert [counter.count[...] for counter in counters] == [0, 0]
    model(X, counters=counters)
    assert [counter.count[...] for counter in counters] == [1, 1]


def test_plans_serve_converted_models(net):
    model = nn.convert(net, recipe="bf16")
    with nn.overriding({"up": "fp8_rowwise"}):
        assert [s.path for s in nn.list_sites(model, X) if s.is_fp8] == ["up"]
    with nn.overriding({"up": DELAYED}):
        assert listed(model, X)["up"].recipe == DELAYED
    assert not nnx.to_flat_state(nnx.state(model, nn.Fp8State))


def test_probe_sees_a_converted_model():
    model = nn.convert(drawn(lambda rngs: nnx.Linear(48, 16, rngs=rngs)), recipe="bf16")
    with nn.probing(nn.Capture(max_rows=16)):
        with pytest.raises(ValueError, match="call the model once before"):
            nnx.eval_shape(lambda m, x: m(x), model, X)
        model(X)
        wrt = nnx.DiffState(0, nn.ProbeStats)
        (seen,) = jax.tree.leaves(
            nnx.grad(lambda m, x: jnp.sum(jnp.float32(m(x))), argnums=wrt)(model, X),
            is_leaf=lambda x: hasattr(x, "operands"),
        )
    np.testing.assert_array_equal(seen.operands.lhs, X[::2])
    np.testing.assert_array_equal(seen.operands.g, np.ones((16, 16), np.float32))


def test_the_state_of_a_site_without_a_gradient_stays_as_it_was():
    model = nn.convert(nnx.eval_shape(lambda: Pair(nnx.Rngs(0))), X, recipe=DELAYED)
    old = nnx.state(model, nn.Fp8State)
    nnx.update(model, jax.tree.map(lambda _: jnp.asarray(stored_table()), old))
    gradients = jax.tree.map(lambda _: jnp.asarray(2 * stored_table()), old)
    gradients["linear"] = jax.tree.map(jnp.zeros_like, gradients["linear"])
    nn.take_scaling(model, gradients)
    found = nnx.state(model, nn.Fp8State)
    for name, factor in (("einsum", 2), ("general", 2), ("linear", 1)):
        (table,) = jax.tree.leaves(found[name])
        np.testing.assert_array_equal(table, factor * stored_table())
