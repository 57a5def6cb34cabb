"""Groups and sites found in models that others wrote call by call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from loka_jax import nn
from loka_jax.nn import OVERWRITE_WITH_GRADIENT as STATES
from loka_jax.nn import group as groups
from loka_jax.nn.follow import following
from loka_jax.nn.program import Origin, read_program
from loka_jax.site import Choice
from tests.support import stand_ins
from tests.support.flow import (
    MODELS,
    CallByCall,
    Gated,
    Transformer,
    Wide,
    X,
    layers_of,
    loss,
)
from tests.support.nn import DELAYED, initialized, listed, rounded

KEY = jax.random.key(0)
pytestmark = pytest.mark.usefixtures("as_users_do")


@pytest.mark.parametrize("plain", MODELS, ids=lambda m: type(m).__name__)
def test_values_and_gradients_are_those_as_written(plain):
    model = nn.convert(plain, recipe="f32")
    variables = initialized(plain, X)

    @jax.jit
    def both(variables, x):
        run = [functools.partial(loss, m) for m in (plain, model)]
        return [jax.value_and_grad(f, argnums=(0, 1))(variables, x) for f in run]

    expected, found = both(variables, X)
    scale = max(np.abs(x).max() for x in jax.tree.leaves(expected))
    for a, b in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * scale)


def test_groups_are_found_in_code():
    sites = listed(nn.convert(CallByCall(), skip="head"), X)
    assert layers_of(sites["Dense_1"].group) == [
        ("Dense_0", "none", "relu", False),
        ("Dense_1", "none", "relu", False),
    ]
    assert "Dense_1" not in [x.path for x in sites["Dense_2"].group.members]
    (group,) = {x.group for x in listed(nn.convert(Gated()), X).values() if x.group}
    gates = [(x.member.path, x.norm.activation, x.half) for x in group.layers]
    assert gates == [
        ("geglu", "gelu", 1),
        ("down", "none", None),
        ("swiglu", "swish", 0),
        ("last", "none", None),
        ("bilinear", "none", 0),
    ]
    sites = listed(nn.convert(Transformer()), X)
    block = "blocks"
    assert layers_of(sites[f"{block}/up"].group) == [
        (f"{block}/attention/out", "none", "none", True),
        (None, "layer", "none", False),
        (f"{block}/up", "none", "gelu", False),
        (f"{block}/down", "none", "none", True),
    ]
    heads = [f"{block}/attention/{name}" for name in ("query", "key", "value")]
    layers = layers_of(sites[heads[0]].group)
    assert layers[0] == (None, "layer", "none", False)
    assert [path for path, *_ in layers[1:]] == heads


@pytest.mark.parametrize("plain", MODELS, ids=lambda m: type(m).__name__)
def test_every_product_is_listed_with_its_share(plain):
    sites = nn.list_sites(nn.convert(plain), X)
    assert sum(x.share for x in sites) == pytest.approx(1)
    jaxpr = jax.make_jaxpr(plain.apply)(initialized(plain, X), X)
    assert sum(x.count for x in sites) == _count(jaxpr.jaxpr)


def _count(jaxpr, times=1):
    total = 0
    for eqn in jaxpr.eqns:
        total += times * (eqn.primitive.name == "dot_general")
        steps = times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        total += sum(
            _count(x, steps) for x in jax.extend.core.jaxprs_in_params(eqn.params)
        )
    return total


def layer_norm(x, g, b, epsilon=1e-5):
    mean = jnp.mean(x, -1, keepdims=True)
    var = jnp.mean((x - mean) ** 2, -1, keepdims=True)
    return (x - mean) / jnp.sqrt(var + epsilon) * g + b


def wide_norm(x, g, b):
    """As `LayerNorm(features)` is: the first of its options is epsilon."""
    return layer_norm(x, g, b, epsilon=24.0)


def rms_norm(x, g, b):
    del b
    return (
        x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 0.01) * (1 + g)
    )


FOLLOWS = {
    "relu": [lambda x: jnp.maximum(x, 0), lambda x: jnp.where(x > 0, x, 0)],
    "swish": [
        linen.swish,
        lambda x: x * linen.sigmoid(x),
        lambda x: x / (1 + jnp.exp(-x)),
    ],
    "gelu": [linen.gelu],
    "exact_gelu": [
        functools.partial(linen.gelu, approximate=False),
        lambda x: x * (1 + jax.scipy.special.erf(x * np.float32(0.5**0.5))) / 2,
    ],
    "tanh": [jnp.tanh],
    "sigmoid": [linen.sigmoid, lambda x: 1 / (1 + jnp.exp(-x))],
    "hard_swish": [linen.hard_swish],
}


def found(function, *vectors):
    x = jnp.ones((4, 24))
    closed = jax.make_jaxpr(function)(x, *vectors)
    origins = [None, *(Origin(("params", str(i))) for i, _ in enumerate(vectors))]
    program = read_program(closed.jaxpr, origins)
    value = program.inputs[0]
    return [x for x in following(value, 1) if x.is_alone and x.end.is_output]


@pytest.mark.parametrize("name", FOLLOWS)
def test_activations_are_known_by_what_they_compute(name):
    for function in FOLLOWS[name]:
        assert [(x.kind, x.name) for x in found(function)] == [("activation", name)]
    (bias,) = found(lambda x, b: x + b, jnp.ones(24))
    assert bias.kind == "bias"
    assert not found(lambda x, b: x + 2 * b + x, jnp.ones(24))


def flax_norm(layer, x, g, b):
    parameters = {"scale": g} | ({} if layer is linen.RMSNorm else {"bias": b})
    return layer(epsilon=0.02).apply({"params": parameters}, x)


@pytest.mark.parametrize(
    "function, name, epsilon",
    [
        (layer_norm, "layer", 1e-5),
        (wide_norm, "layer", 24),
        (rms_norm, "rms", 0.01),
        (functools.partial(flax_norm, linen.LayerNorm), "layer", 0.02),
        (functools.partial(flax_norm, linen.RMSNorm), "rms", 0.02),
    ],
)
def test_norms_are_known_by_what_they_compute(function, name, epsilon):
    (norm,) = found(function, jnp.ones(24), jnp.ones(24))
    assert (norm.kind, norm.name) == ("norm", name)
    assert norm.epsilon == pytest.approx(epsilon)
    assert norm.vectors[0] is not None
    other = lambda x, g, b: function(x, g, b) + jnp.mean(x, -1, keepdims=True)  # noqa: E731
    assert not found(other, jnp.ones(24), jnp.ones(24))


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda x: jnp.multiply(*jnp.split(x, 2, -1)), ("none", 0)),
        (lambda x: linen.glu(x), ("sigmoid", 1)),
        (lambda x: x[:, 12:] * jnp.tanh(x[:, :12]), ("tanh", 0)),
        (lambda x: x[:, :12] * linen.relu(x[:, 11:23]), None),
        (lambda x: x[:, 0::2] * x[:, 12:], None),
        (lambda x: jnp.multiply(*jnp.split(x, 2)), None),
        (lambda x: x[:, :12] * jnp.sin(x[:, 12:]), None),
        (lambda x: (y := linen.relu(x[:, :12])) * x[:, 12:] + y, None),
    ],
)
def test_gates_are_of_the_halves_of_the_columns(function, expected):
    gates = [(x.name, x.half) for x in found(function) if x.kind == "gate"]
    assert gates == ([] if expected is None else [expected])


# A converted model is a module.


class Tower(linen.Module):
    features: int = 32

    def setup(self):
        self.up = linen.Dense(64)
        self.down = linen.Dense(self.features)

    def __call__(self, x):
        return self.down(linen.relu(self.up(x)))

    def halfway(self, x):
        return self.up(x)


class Inline(linen.Module):
    recipe: str

    @linen.compact
    def __call__(self, x):
        user = nn.convert(Tower(name="user"), recipe=self.recipe)
        item = Tower(name="item")
        return linen.Dense(1, name="head")(user(x) * item(x))


class InSetup(linen.Module):
    recipe: str

    def setup(self):
        self.user = nn.convert(Tower(), recipe=self.recipe)
        self.item, self.head = Tower(), linen.Dense(1)

    def __call__(self, x):
        return self.head(self.user(x) * self.item(x))


@pytest.mark.parametrize("Towers", [Inline, InSetup])
def test_a_part_of_a_model_is_converted_in_place(Towers):
    sites = nn.list_sites(Towers("fp8_rowwise"), X)
    assert [site.path for site in sites] == ["user/up", "user/down"]
    assert all(site.is_fp8 for site in sites)
    exact = Towers("f32")
    variables = initialized(exact, X)
    assert {*variables["params"]} == {"user", "item", "head"}
    assert {*variables["params"]["user"]} == {"up", "down"}
    with nn.overriding({"user/up": "bf16"}):
        sites = listed(Towers("fp8_rowwise"), X)
    assert not sites["user/up"].is_fp8 and sites["user/down"].is_fp8
    delayed = Towers(DELAYED)
    variables = delayed.init(KEY, X)
    states = jax.jit(jax.grad(lambda v: loss(delayed, v, X)))(variables)[STATES]
    assert {*states} == {"user"} and {*states["user"]} == {"up", "down"}
    assert all(np.all(np.max(x, axis=-1) > 0) for x in jax.tree.leaves(states))


def test_a_converted_model_is_a_module():
    plain, model = Tower(), nn.convert(Tower(), recipe="f32")
    variables = initialized(plain, X)
    expected = plain.apply(variables, X)
    for y in (model.bind(variables)(X), linen.apply(lambda m: m(X), model)(variables)):
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    half = plain.apply(variables, X, method="halfway")
    for y in (
        model.apply(variables, X, method="halfway"),
        model.bind(variables).halfway(X),
        model.bind(variables).up(X),
        linen.apply(lambda m: m.halfway(X), model)(variables),
    ):
        np.testing.assert_allclose(y, half, rtol=1e-4, atol=1e-5)
    with pytest.raises(AttributeError, match="down"):
        _ = model.down  # there is none before `setup`
    assert model.features == 32 and model.clone(features=16).features == 16
    assert "kernel" in model.tabulate(KEY, X)
    assert hash(model) == hash(nn.convert(Tower(), recipe="f32"))


class Pretrained:
    """As `FlaxPreTrainedModel` is: a module and its parameters."""

    def __init__(self, module):
        self._module = module
        self.params = initialized(module, X)["params"]

    @property
    def module(self):
        return self._module

    def __call__(self, x, params=None):
        return self.module.apply({"params": params or self.params}, x)


def test_a_model_of_hugging_face_is_copied_with_its_module_converted():
    plain = Pretrained(Tower())
    model = nn.convert(plain, recipe="fp8_rowwise", only="up")
    assert isinstance(plain.module, Tower) and model.params is plain.params
    sites = listed(model.module, X)
    assert [sites[path].is_fp8 for path in ("up", "down")] == [True, False]
    np.testing.assert_allclose(model(X), plain(X), rtol=0.2, atol=0.2)
    with pytest.raises(ValueError, match="has no delayed scales"):
        nn.convert(plain, recipe=DELAYED)(X)


def test_wide_layers_run_as_a_group_by_default_with_their_head_apart():
    context = dict(device=stand_ins.HOPPER, scales_initialized=True)
    rows = jax.ShapeDtypeStruct((4096, 512), jnp.float32)
    with pytest.MonkeyPatch.context() as patch, nn.site_context(**context):
        patch.setattr(groups.triton, "why_not_installed", lambda: None)
        sites = listed(nn.convert(Wide(), recipe=DELAYED), rows)
    runs = {path: site.plan.choice.name for path, site in sites.items()}
    # Below a head dlhs is in high precision.
    assert runs == {
        "Dense_0": f"group {DELAYED}",
        "Dense_1": f"group {DELAYED}/bf16/{DELAYED}",
        "head": f"xla {DELAYED}",
    }


@pytest.mark.parametrize(("dtype", "name"), [("bfloat16", "bf16"), ("float32", "f32")])
def test_a_group_writes_gradients_of_weights_as_the_model_does(dtype, name):
    plan = tuple((f"Dense_{i}", Choice.parse("group bf16")) for i in range(2))
    model = nn.Planned(nn.convert(Wide(dtype)), plan)
    variables = initialized(model, X)
    assert listed(model, X)["Dense_0"].in_group
    gradient = jax.grad(functools.partial(loss, model))
    assert gradient(variables, X)["params"]["Dense_1"]["kernel"].dtype == jnp.float32
    # The compiler may keep more bits than it is asked for.
    text = str(jax.make_jaxpr(gradient)(variables, X))
    assert f"{name}[1024,256] = dot_general" in text


def function(parameters, x):
    for name in ("first", "second"):
        x = jax.nn.relu(x @ parameters[name]["kernel"] + parameters[name]["bias"])
    return jnp.sin(x) @ parameters["table"].T


def test_a_function_of_parameters_is_converted():
    layer = {"kernel": rounded(32, 32, seed=1), "bias": rounded(32)}
    parameters = {"first": layer, "second": layer, "table": rounded(48, 32)}
    exact = nn.convert(function, recipe="f32", skip="table")
    expected = function(parameters, X)
    np.testing.assert_allclose(exact(parameters, X), expected, rtol=1e-4, atol=1e-3)
    model = nn.convert(function, recipe=DELAYED)
    sites = listed(model, parameters, X)
    assert list(sites) == ["first", "second", "table"]
    assert len(sites["first"].group.layers) == 2
    variables = model.init(KEY, parameters, X)
    states = jax.grad(lambda v: jnp.sum(model(v, X) ** 2))(variables)[STATES]
    assert {*states} == {*parameters}
    assert all(np.all(np.max(x, axis=-1) > 0) for x in jax.tree.leaves(states))
    with pytest.raises(ValueError, match="there is nothing to convert"):
        nn.convert(lambda p, x: x + p["b"])({"b": X}, X)
