"""Flax models that nobody here wrote, run as sites by `nn.convert`."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from loka_jax import nn
from loka_jax.dispatch.plan import make_plan
from loka_jax.nn import OVERWRITE_WITH_GRADIENT
from loka_jax.recipe import get_recipe
from loka_jax.site import Choice
from tests import support

DELAYED = "fp8_tensorwise_delayed"
KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def promoting():
    # As in a user's process: Flax's norms and attention need it.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Ranker(linen.Module):
    """An MLP ranker, as in the guides: dense features to a logit."""

    @linen.compact
    def __call__(self, x):
        for size in (64, 32):
            x = linen.Dense(size)(x)
            x = linen.LayerNorm()(x)
            x = linen.relu(x)
        return linen.Dense(1, name="head")(x)[..., 0]


class Block(linen.Module):
    """A transformer block as in Flax's lm1b example."""

    @linen.compact
    def __call__(self, x):
        h = linen.LayerNorm()(x)
        h = linen.MultiHeadDotProductAttention(num_heads=2, name="attention")(h)
        x = x + h
        h = linen.LayerNorm()(x)
        h = linen.Dense(64, name="up")(h)
        h = linen.gelu(h)
        return x + linen.Dense(32, name="down")(h)


class TwoTower(linen.Module):
    """A retriever: the cosine of a user's and an item's vectors."""

    def setup(self):
        self.user, self.item = self._tower(), self._tower()

    def _tower(self):
        return linen.Sequential(
            [
                linen.Dense(64, use_bias=False),
                linen.LayerNorm(),
                linen.relu,
                linen.Dense(32),
            ]
        )

    def __call__(self, user, item):
        return jnp.sum(self.user(user) * self.item(item), axis=-1)

    def embed_item(self, item):
        return self.item(item)


RANKER = Ranker(), (support.normal(64, 48),)
BLOCK = Block(), (support.normal(4, 16, 32),)
TOWERS = TwoTower(), (support.normal(64, 32), support.normal(64, 48, seed=1))
MODELS = {"ranker": RANKER, "block": BLOCK, "towers": TOWERS}


def by_path(model, *inputs):
    return {site.path: site for site in nn.list_sites(model, *inputs)}


def converted(name, recipe="fp8_rowwise", **options):
    model, inputs = MODELS[name]
    return nn.convert(model, recipe=recipe, **options), inputs


@pytest.mark.parametrize(
    "name, paths",
    [
        ("ranker", ["Dense_0", "Dense_1", "head"]),
        (
            "block",
            [f"attention/{p}" for p in ("query", "key", "value", "out")]
            + ["up", "down"],
        ),
        ("towers", [f"{t}/layers_{i}" for t in ("user", "item") for i in (0, 3)]),
    ],
)
def test_dense_layers_are_sites_at_their_own_paths(name, paths):
    model, inputs = converted(name)
    sites = by_path(model, *inputs)
    assert list(sites) == paths
    assert all(s.is_fp8 for s in sites.values() if s.path != "head")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", ["fp8_rowwise", DELAYED])
def test_parameters_are_those_of_the_model(name, recipe):
    model, inputs = converted(name, recipe)
    variables = jax.jit(model.init)(KEY, *inputs)
    plain = jax.jit(MODELS[name][0].init)(KEY, *inputs)
    chex.assert_trees_all_equal(variables["params"], plain["params"])
    assert (OVERWRITE_WITH_GRADIENT in variables) == (recipe == DELAYED)


@pytest.mark.parametrize("name", MODELS)
def test_in_float32_it_computes_what_the_model_does(name):
    model, inputs = converted(name, "f32")
    plain = MODELS[name][0]
    variables = jax.jit(plain.init)(KEY, *inputs)

    def loss(model):
        return lambda v: jnp.sum(jnp.sin(model.apply(v, *inputs)))

    ours, theirs = (jax.jit(jax.grad(loss(m)))(variables) for m in (model, plain))
    # Sums of at most 256 float32 terms in another order.
    chex.assert_trees_all_close(ours, theirs, rtol=1e-3, atol=1e-4)
    y = model.apply(variables, *inputs)
    assert y.dtype == plain.apply(variables, *inputs).dtype
    np.testing.assert_allclose(y, plain.apply(variables, *inputs), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_losses_of_converted_and_plain_models_fall_alike(name):
    inputs = MODELS[name][1]
    plain = MODELS[name][0]
    target = jnp.tanh(plain.apply(plain.init(jax.random.key(7), *inputs), *inputs))
    losses = {}
    for arm, model in {"plain": plain, "fp8": converted(name, DELAYED)[0]}.items():
        tx = nn.overwriting(optax.adam(1e-2))

        def loss(variables, model=model):
            return jnp.mean((model.apply(variables, *inputs) - target) ** 2)

        @jax.jit
        def step(carry, _, tx=tx, loss=loss):
            variables, opt_state = carry
            value, gradients = jax.value_and_grad(loss)(variables)
            updates, opt_state = tx.update(gradients, opt_state, variables)
            return (optax.apply_updates(variables, updates), opt_state), value

        variables = jax.jit(model.init)(KEY, *inputs)
        start = variables, tx.init(variables)
        losses[arm] = jax.lax.scan(step, start, length=40)[1]
    first, last = losses["plain"][0], losses["plain"][-1]
    assert last < 0.5 * first and losses["fp8"][-1] < 0.5 * first
    # Products in FP8 are off by 3 to 4 %.
    np.testing.assert_allclose(losses["fp8"][0], first, rtol=0.15)


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", DELAYED, "fp8_rowwise"])
def test_gradients_of_a_float16_model_stay_in_range(recipe):
    init = linen.initializers.uniform(0.1)  # positive terms, whose sums are large
    plain = linen.Dense(32, dtype=jnp.float16, kernel_init=init)
    x = jnp.abs(support.normal(64, 48)).astype(jnp.float16)
    model = nn.convert(plain, recipe=recipe)
    variables = model.init(KEY, x)

    def gradients(model):
        def loss(params, x):
            out = model.apply(variables | {"params": params}, x)
            return jnp.sum(out.astype(jnp.float32))

        return jax.grad(loss, argnums=(0, 1))(variables["params"], x)

    ours, theirs = (jax.tree.leaves(gradients(m)) for m in (model, plain))
    assert [g.dtype for g in ours] == [g.dtype for g in theirs]
    assert min(map(support.sqnr_db, theirs, ours)) > 15


def test_parameters_without_their_state_are_refused():
    model, inputs = converted("ranker", DELAYED)
    variables = RANKER[0].init(KEY, *inputs)
    with pytest.raises(ValueError, match="site 'Dense_0' has no delayed scales"):
        model.apply(variables, *inputs)


def test_methods_by_name_run_converted_too():
    model, (_, item) = converted("towers")
    variables = TOWERS[0].init(KEY, *TOWERS[1])
    exact = TOWERS[0].apply(variables, item, method="embed_item")
    ours = model.apply(variables, item, method="embed_item")
    assert 20 < support.sqnr_db(exact, ours) < 45


# Fused sites.


def test_dense_norm_and_activation_of_a_sequential_are_one_site():
    model, inputs = converted("towers")
    site = by_path(model, *inputs)["user/layers_0"]
    assert (site.spec.norm, site.spec.activation) == ("layer", "relu")
    assert not site.spec.use_bias and site.apart is None
    last = by_path(model, *inputs)["user/layers_3"]
    assert last.spec.norm == last.spec.activation == "none" and last.spec.use_bias


def test_elsewhere_a_site_says_why_nothing_is_fused():
    model, inputs = converted("ranker")
    site = by_path(model, *inputs)["Dense_0"]
    assert site.spec.norm == "none" and "nn.Sequential" in site.why_not_fused


@pytest.mark.parametrize(
    "layers, fused, why",
    [
        ([linen.RMSNorm(), linen.silu], ("rms", "swish"), None),
        ([nn.BlockNorm(), linen.gelu], ("block", "gelu"), None),
        ([linen.hard_swish], ("none", "hard_swish"), None),
        ([linen.LayerNorm(use_scale=False)], ("layer", "none"), None),
        ([linen.LayerNorm(), jnp.tanh], ("layer", "none"), "tanh is none of relu"),
        ([linen.LayerNorm(reduction_axes=(0, 1))], ("none", "none"), "other axes"),
        ([linen.LayerNorm(use_fast_variance=False)], ("none", "none"), "own way"),
        ([linen.GroupNorm(4), linen.relu], ("none", "none"), "GroupNorm is none of"),
        ([linen.Dropout(0.5, deterministic=True)], ("none", "none"), None),
    ],
)
def test_what_follows_a_dense_in_a_sequential(layers, fused, why):
    plain = linen.Sequential([linen.Dense(32), *layers, linen.Dense(16)])
    x = support.normal(32, 48)
    model = nn.convert(plain, recipe="f32")
    site = by_path(model, x)["layers_0"]
    assert (site.spec.norm, site.spec.activation) == fused
    assert site.apart is None if why is None else why in site.apart
    variables = plain.init(KEY, x)
    chex.assert_trees_all_equal(model.init(KEY, x), variables)
    y = plain.apply(variables, x)
    np.testing.assert_allclose(model.apply(variables, x), y, rtol=1e-4, atol=1e-5)


def test_intermediates_are_those_of_the_model():
    model, inputs = converted("towers", "f32")
    variables = TOWERS[0].init(KEY, *inputs)
    seen = [
        m.apply(variables, *inputs, capture_intermediates=True)[1]["intermediates"]
        for m in (model, TOWERS[0])
    ]
    chex.assert_trees_all_close(*seen, rtol=1e-4, atol=1e-5)


# Einsum and what is left alone.


@pytest.mark.parametrize(
    "shape, equation, x_shape, mkn",
    [
        ((48, 4, 8), "btk,khd->bthd", (2, 16, 48), (32, 48, 32)),
        ((4, 8, 16), "...hd,hdk->...k", (2, 16, 4, 8), (32, 32, 16)),
        ((48, 16), "bk,kn->nb", (32, 48), (32, 48, 16)),
    ],
)
def test_an_einsum_is_a_site(shape, equation, x_shape, mkn):
    plain, x = linen.Einsum(shape, equation), support.normal(*x_shape)
    model = nn.convert(plain, recipe="f32")
    variables = model.init(KEY, x)
    chex.assert_trees_all_equal(variables, plain.init(KEY, x))
    (site,) = nn.list_sites(model, x)
    assert (site.spec.m, site.spec.k, site.spec.n) == mkn
    expected = plain.apply(variables, x)
    np.testing.assert_allclose(
        model.apply(variables, x), expected, rtol=1e-5, atol=1e-5
    )


def test_an_einsum_that_sums_alone_is_refused():
    model = nn.convert(linen.Einsum((48, 16), "btk,kn->bn"))
    with pytest.raises(ValueError, match="is more than a product: skip it"):
        model.init(KEY, jnp.ones((4, 8, 48)))


def test_layers_that_are_left_say_why():
    model, inputs = converted("block", only="attention/*", skip="*/out")
    sites = by_path(model, *inputs)
    assert [p for p, s in sites.items() if s.is_fp8] == [
        f"attention/{p}" for p in ("query", "key", "value")
    ]
    assert sites["attention/out"].why_not == "skip='*/out'"
    assert sites["up"].why_not == "not in only=attention/*"
    spec = sites["up"].spec
    assert (spec.m, spec.k, spec.n) == (64, 32, 64)
    assert set(sites["up"].runs.values()) == {"as written"}
    own = linen.Dense(16, dot_general=jax.lax.dot_general)
    (site,) = nn.list_sites(nn.convert(own), jnp.ones((16, 16)))
    assert site.why_not == "has a dot_general of its own"


def test_a_skipped_layer_computes_what_it_did():
    model, inputs = converted("ranker", skip="*")
    variables = RANKER[0].init(KEY, *inputs)
    chex.assert_trees_all_equal(
        model.apply(variables, *inputs), RANKER[0].apply(variables, *inputs)
    )


def test_a_skipped_layer_takes_an_empty_batch():
    layers = linen.Sequential([linen.Dense(32), linen.Dense(1)])
    model = nn.convert(layers, skip="layers_1")
    x = jnp.ones((32, 48))
    assert model.apply(model.init(KEY, x), x[:0]).shape == (0, 1)
    site = by_path(model, x[:0])["layers_1"]
    assert (site.spec.k, site.spec.n) == (32, 1)


@pytest.mark.parametrize("options", [{"only": ("up", "top")}, {"skip": "top"}])
def test_a_pattern_that_matches_no_layer_is_refused(options):
    model, inputs = converted("block", **options)
    with pytest.raises(ValueError, match="'top' matches no dense layer: there are att"):
        nn.list_sites(model, *inputs)
    variables = BLOCK[0].init(KEY, *inputs)
    with pytest.raises(ValueError, match="'top' matches no dense layer"):
        model.apply(variables, *inputs)


def test_a_pattern_may_name_a_layer_that_a_method_does_not_call():
    model, (_, item) = converted("towers", skip="user/*")
    variables = model.init(KEY, *TOWERS[1])
    got = model.apply(variables, item, method="embed_item")
    plain = TOWERS[0].apply(variables, item, method="embed_item")
    assert support.sqnr_db(plain, got) > 20


@pytest.mark.parametrize("method", ["embed_item", TwoTower.embed_item])
def test_a_method_may_initialize_layers_that_no_pattern_names(method):
    model, (_, item) = converted("towers", skip="user/*")
    variables = model.init(KEY, item, method=method)
    assert set(variables["params"]) == {"item"}
    out = model.apply(variables, item, method=method)
    again = model.init_with_output(KEY, item, method=method)[0]
    np.testing.assert_array_equal(out, again)
    with pytest.raises(ValueError, match="'user/.' matches no dense layer: there are "):
        converted("ranker", skip="user/*")[0].init(KEY, item, method="__call__")


@pytest.mark.parametrize("model", [linen.Dense, nnx.Linear, jnp.tanh, {"params": 1}])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(ValueError, match="is a class: give|is no Flax model: give"):
        nn.convert(model)


def test_a_model_without_dense_layers_is_refused():
    model, x = linen.LayerNorm(), jnp.ones((4, 8))
    with pytest.raises(ValueError, match="there is nothing to convert"):
        nn.convert(model).init(KEY, x)
    with pytest.raises(ValueError, match="there is nothing to convert"):
        nn.convert(model).apply(model.init(KEY, x), x)


# The library's tools.


@pytest.mark.parametrize("name", MODELS)
def test_plans_and_probe_serve_converted_models(name):
    model, inputs = converted(name, "bf16")
    sites = nn.list_sites(model, *inputs)
    path = sites[0].path
    plan = make_plan(sites, None, rules={path: "fp8_rowwise"})
    planned = nn.Planned(model, plan.choices)
    assert [s.path for s in nn.list_sites(planned, *inputs) if s.is_fp8] == [path]
    assert dict(plan.choices) == {path: Choice.parse("xla fp8_rowwise")}
    with nn.probing(nn.ProbeConfig()):
        variables = jax.eval_shape(planned.init, KEY, *inputs)
    assert set(nn.by_path(variables[nn.PROBE])) == {site.path for site in sites}


@pytest.mark.parametrize("recipe", [DELAYED, f"{DELAYED}:initialized"])
@pytest.mark.parametrize("is_object", [False, True])
def test_a_planned_model_initializes_the_scales_of_any_recipe(recipe, is_object):
    plain = linen.Sequential([linen.Dense(32), linen.relu, linen.Dense(16)])
    x = support.normal(32, 48)
    model = nn.convert(plain, recipe=get_recipe(recipe) if is_object else recipe)
    planned = nn.Planned(model).with_initialized_scales()
    sites = nn.list_sites(planned, x)
    assert sites and all(site.plan.recipe.scales_initialized for site in sites)
