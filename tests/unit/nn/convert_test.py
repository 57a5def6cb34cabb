"""Flax models that nobody here wrote, run as sites by `nn.convert`."""

import functools
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from loka_jax import nn
from loka_jax.dispatch.site_table import site_table
from loka_jax.nn import OVERWRITE_WITH_GRADIENT
from loka_jax.site import Choice
from tests.support import stand_ins
from tests.support.nn import DELAYED, gradients, initialized, listed, rounded

KEY = jax.random.key(0)


pytestmark = pytest.mark.usefixtures("as_users_do")


class Block(linen.Module):
    @linen.compact
    def __call__(self, x):
        h = linen.LayerNorm()(x)
        h = linen.MultiHeadDotProductAttention(num_heads=2, name="attention")(h)
        x = x + h
        h = linen.Dense(64, name="up")(linen.LayerNorm()(x))
        return x + linen.Dense(32, name="down")(linen.gelu(h))


class TwoTower(linen.Module):
    def setup(self):
        self.user, self.item = self._tower(), self._tower()

    def _tower(self):
        norm = linen.LayerNorm(epsilon=0.5)
        layers = [linen.Dense(64, use_bias=False), norm, linen.relu, linen.Dense(32)]
        return linen.Sequential(layers)

    def __call__(self, inputs):
        return jnp.sum(self.user(inputs[0]) * self.item(inputs[1]), axis=-1)

    def embed_item(self, item):
        return self.item(item)


X = np.ones((6, 48), np.float32)
BLOCK, TOWERS = Block(), TwoTower()
ATTENTION = [f"attention/{p}" for p in ("query", "key", "value", "out")]
# Models, their inputs and the paths of their dense layers.
MODELS = {
    "block": (BLOCK, rounded(4, 16, 32), [*ATTENTION, "up", "down"]),
    "towers": (
        TOWERS,
        (rounded(64, 32), rounded(64, 48, seed=1)),
        [f"{t}/layers_{i}" for t in ("user", "item") for i in (0, 3)],
    ),
}


def converted(name, recipe="fp8_rowwise", **options):
    model, inputs, _ = MODELS[name]
    return nn.convert(model, recipe=recipe, **options), inputs


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_sites_at_its_paths_and_in_float32_its_results(name):
    plain, inputs, paths = MODELS[name]
    sites = {p: x for p, x in listed(*converted(name)).items() if x.left is None}
    assert list(sites) == paths and all(site.is_fp8 for site in sites.values())
    model, _ = converted(name, "f32")
    factors = rounded(*jax.eval_shape(plain.init_with_output, KEY, inputs)[0].shape)

    @jax.jit
    def both(variables, inputs, factors):
        run = functools.partial(gradients, variables=variables, x=inputs)
        return [run(m, factors=factors) for m in (plain, model)]

    variables = initialized(plain, inputs)
    results = both(variables, inputs, factors)
    # Sums of at most 256 float32 terms in another order.
    scale = jax.tree.map(lambda x: np.abs(x).max() + 1, results[0])
    results = [jax.tree.map(lambda x, s: x / s, x, scale) for x in results]
    chex.assert_trees_all_close(*results, rtol=1e-4, atol=1e-5)
    delayed = jax.eval_shape(converted(name, DELAYED)[0].init, KEY, inputs)
    chex.assert_trees_all_equal_shapes(delayed["params"], variables["params"])
    assert len(jax.tree.leaves(delayed[OVERWRITE_WITH_GRADIENT])) == len(paths)


def test_parameters_start_as_those_of_the_model():
    for plain in (
        linen.Sequential([linen.Dense(8), linen.LayerNorm(), linen.relu]),
        linen.Einsum((8, 48), "bk,nk->bn", bias_init=linen.initializers.normal()),
    ):
        inits = plain.init, nn.convert(plain).init
        start = jax.jit(lambda key, inits=inits: [init(key, X) for init in inits])
        chex.assert_trees_all_equal(*start(KEY))


EINSUMS = [
    ((48, 16), "bk,kn->nb", (6, 48), (6, 48, 16, None)),
    ((8, 8), "bk,nk->bn", (6, 8), (6, 8, 8, None)),
    ((48, 4, 8), "btk,khd->bthd", (2, 3, 48), (6, 48, 32, None)),
    # Several dims are contracted, in another order than that of the kernel.
    ((4, 8, 16), "...hd,hdk->...k", (2, 3, 4, 8), (6, 32, 16, None)),
    ((8, 16, 4), "bhd,dkh->bk", (6, 4, 8), (6, 32, 16, None)),
    # A dim of the rows alone is summed.
    ((48, 16), "btk,kn->bn", (6, 2, 48), (6, 48, 16, None)),
    # A product for each group.
    ((3, 8, 5), "bgk,gkn->bgn", (6, 3, 8), (6, 8, 5, 3)),
]


def test_an_einsum_is_a_site():
    layers = [(linen.Einsum(*c[:2]), rounded(*c[2])) for c in EINSUMS]
    models = [nn.convert(plain, recipe="f32") for plain, _ in layers]
    sites = [nn.list_sites(m, x)[0] for m, (_, x) in zip(models, layers, strict=True)]
    sizes = [(s.spec.m, s.spec.k, s.spec.n, s.batch) for s in sites]
    assert sizes == [c[3] for c in EINSUMS]
    variables = [initialized(plain, x) for plain, x in layers]

    @jax.jit
    def both(variables):
        every = zip(models, layers, variables, strict=True)
        return [(m.apply(v, x), plain.apply(v, x)) for m, (plain, x), v in every]

    for y, expected in both(variables):
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


# Which layers.


def test_layers_that_are_left_say_why():
    model, inputs = converted("block", only="attention/*", skip="*/out")
    sites = listed(model, inputs)
    assert [p for p, s in sites.items() if s.is_fp8] == ATTENTION[:3]
    assert sites["attention/out"].why_not == "skip='*/out'"
    up = sites["up"]
    assert up.why_not == "not in only=attention/*"
    assert (up.spec.m, up.spec.k, up.spec.n) == (64, 32, 64)
    assert set(up.runs.values()) == {"as written"}


@pytest.mark.parametrize(
    "layer",
    [
        linen.Dense(8),
        linen.DenseGeneral((4, 2)),
        linen.Einsum((8, 48), "bk,nk->bn", use_bias=False),
    ],
    ids=range(3),
)
def test_a_layer_that_is_left_has_its_sizes_and_runs_as_written(layer):
    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            # By keyword, too.
            return layer.copy(name="left")(inputs=x), linen.Dense(8, name="kept")(x)

    model = nn.convert(Model(), skip="left")
    left, kept = nn.list_sites(model, X)
    assert (left.spec.m, left.spec.k, left.spec.n) == (6, 48, 8)
    assert (left.recipe, left.is_fp8, kept.is_fp8) == ("bf16", False, False)
    variables = initialized(model, X)
    program = str(jax.make_jaxpr(model.apply)(variables, X).jaxpr.eqns[0])
    assert "dot_general" in program and "bf16" not in program
    # An empty batch does not hide k and n.
    empty = nn.list_sites(model, X[:0])[0].spec
    assert (empty.k, empty.n) == (48, 8)


def test_methods_run_converted_and_need_not_call_what_patterns_name():
    model, (_, item) = converted("towers", skip="user/*")
    variables = initialized(TOWERS, MODELS["towers"][1])
    for method in ("embed_item", TwoTower.embed_item):
        apply = functools.partial(model.apply, method=method)
        assert "f8_e4m3fn" in str(jax.make_jaxpr(apply)(variables, item))


@pytest.mark.parametrize(
    "model, options, x, said",
    [
        (BLOCK, {"skip": "top"}, "block", "'top' matches no dense layer: there are"),
        (BLOCK, {"only": ("up", "top")}, "block", "'top' matches no dense layer"),
        (BLOCK, {"recipe": "fp9"}, "block", "unknown recipe 'fp9'"),
        (linen.Dense, {}, X, "is a class: give"),
        (nnx.Linear, {}, X, "is a class: give"),
        (jnp.tanh, {}, X, "is no Flax model: give"),
        (linen.LayerNorm(), {}, X, "there is nothing to convert"),
    ],
    ids=range(7),
)
def test_what_cannot_be_converted_is_refused(model, options, x, said):
    with pytest.raises(ValueError, match=said):
        x = MODELS[x][1] if isinstance(x, str) else x
        nn.list_sites(nn.convert(model, **options), x)


def test_a_sequential_computes_what_it_did():
    x = rounded(2, 6, 48)
    plain = linen.Sequential(
        [
            # What a layer returns is what the next one takes.
            *(lambda x: (x, 2 * x), lambda a, b: {"x": a, "y": b}, lambda x, y: x - y),
            *(linen.Dense(32), linen.LayerNorm(epsilon=0.5), linen.silu),
            linen.Dense(16, use_bias=False),
            *(linen.RMSNorm(epsilon=0.5), linen.gelu),
            *(linen.Dense(24), jnp.tanh),
            *(linen.Dense(272, use_bias=False), nn.BlockNorm(), linen.relu),
            *(linen.Dense(16), linen.LayerNorm(use_bias=False)),
            linen.LayerNorm(use_scale=False),
        ]
    )
    model = nn.convert(plain, recipe="f32")
    variables = initialized(plain, x)
    chex.assert_trees_all_equal(initialized(model, x), variables)
    run = jax.jit(lambda v, x: (model.apply(v, x), plain.apply(v, x)))
    np.testing.assert_allclose(*run(variables, x), rtol=1e-4, atol=1e-4)


def test_sites_tell_what_is_fused_and_why_not():
    model, inputs = converted("towers")
    first, last = (listed(model, inputs)[f"user/layers_{i}"] for i in (0, 3))
    spec = first.spec
    assert (spec.m, spec.k, spec.n) == (64, 32, 64)
    assert (spec.norm, spec.activation, spec.use_bias) == ("layer", "relu", False)
    spec = last.spec
    assert (spec.norm, spec.activation, spec.use_bias) == ("none", "none", False)
    with nn.site_context(device=stand_ins.HOPPER):
        sites = listed(model, inputs)
    providers = [site.plan.choice.provider for site in sites.values()]
    assert providers == ["pallas", "xla"] * 2
    sites = listed(*converted("block"))
    assert sites["attention/value"].why_not_fused.startswith("another product follows")
    assert sum(site.share for site in sites.values()) == pytest.approx(1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_follows_is_found_in_every_dtype_though_constants_are_rounded(dtype):
    def gelu_by_hand(x):
        return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    acts = dict(
        hard_swish=jax.nn.hard_swish,
        exact_gelu=functools.partial(jax.nn.gelu, approximate=False),
    )
    acts |= dict(gelu=gelu_by_hand, swish=jax.nn.silu)

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            for act in (*acts.values(), linen.gelu):
                x = linen.Dropout(0.1, deterministic=False)(
                    act(linen.Dense(32, dtype=dtype)(x))
                )
                x = linen.RMSNorm(dtype=dtype)(x)
            return linen.Dense(32, dtype=dtype)(x)

    net = nn.convert(Net(), recipe="bf16")
    *sites, _ = nn.list_sites(net, jnp.ones((64, 32), dtype))
    group = sites[0].group
    assert group is not None
    own = [x for x in group.layers if x.dropout]
    assert [x.norm.activation for x in own] == [*acts, "gelu"]
    assert [x.dropout for x in own] == [0.1] * 5


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_numbers_that_are_not_real_are_no_activations(dtype):
    def function(p, x, others):
        change = jnp.logical_not if dtype == "bool" else jnp.negative
        first = change(others)
        total = jnp.sum(jnp.abs(jnp.sum(first)) + jnp.sum(jnp.abs(change(first))))
        return x @ p["w"] + total.astype(x.dtype)

    model: Any = nn.convert(function, recipe="bf16")
    parameters = {"w": jnp.ones((32, 16))}
    sites = listed(model, parameters, jnp.ones((64, 32)), jnp.ones((64, 32), dtype))
    assert [*sites] == ["w"]


def test_sites_in_no_group_say_why():
    def function(p, x):
        wide = jnp.maximum(x @ p["wide"] + p["bias"], 0)
        mixed = jnp.einsum("bkc,kn->bnc", x.reshape(4, 16, 32), p["mixed"])
        experts = jnp.einsum("ebk,ekn->ebn", x.reshape(2, 32, 32), p["experts"])
        return wide @ p["head"], mixed, experts, jnp.cos(x) @ p["alone"]

    shapes = dict(wide=(32, 48), bias=(48,), head=(48, 1), mixed=(16, 24))
    shapes |= dict(experts=(2, 32, 16), alone=(32, 16))
    parameters = {name: jnp.ones(shape) for name, shape in shapes.items()}
    model: Any = function
    sites = listed(nn.convert(model, recipe="bf16"), parameters, jnp.ones((64, 32)))
    reasons = {name: site.not_joined for name, site in sites.items()}
    assert sites["wide"].group is not None
    assert sites["experts"].why_not == "a batched product (2 of them)"
    assert reasons == dict(
        wide="none of its layers is 1,024 wide",
        head="n=1 is smaller than 16",
        mixed="what it reads is not contracted over its last axis",
        experts=None,
        alone="no other product reads its result or its input, as far as groups reach",
    )
    table = site_table([*sites.values()])
    assert "in no group, as n=1 is smaller than 16." in table
    assert "not in its group, as none of its layers is 1,024 wide." in table


# The library's tools.


def test_plans_and_probe_serve_converted_models():
    model, inputs = converted("block", "bf16")
    planned = nn.Planned(model, (("up", Choice.parse("xla fp8_rowwise")),))
    sites = nn.list_sites(planned, inputs)
    assert [site.path for site in sites if site.is_fp8] == ["up"]
    with nn.probing(nn.ProbeConfig()):
        variables = jax.eval_shape(planned.init, KEY, inputs)
    seen = {site.path for site in sites if site.left is None}
    assert set(nn.by_path(variables[nn.PROBE])) == seen
