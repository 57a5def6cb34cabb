"""Flax NNX models run as sites by `nn.convert`."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from loka_jax import nn
from loka_jax.dispatch.plan import make_plan
from tests import support

DELAYED = "fp8_tensorwise_delayed"
X = support.normal(32, 48)


@pytest.fixture(autouse=True)
def promoting():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Net(nnx.Module):
    """A layer of each kind."""

    def __init__(self, rngs):
        self.up = nnx.Linear(48, 32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 32, decode=False, rngs=rngs)
        self.einsum = nnx.Einsum("bk,kn->bn", (32, 16), (16,), rngs=rngs)
        self.head = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        h = nnx.relu(self.up(x))
        h = h + self.attention(h[None])[0]
        return self.head(nnx.relu(self.einsum(h)))[:, 0]


PATHS = ["up", *(f"attention/{p}" for p in ("query", "key", "value", "out")), "einsum"]


@pytest.fixture(scope="module")
def net():
    return Net(nnx.Rngs(0))


def test_layers_are_sites_at_their_own_paths(net):
    sites = nn.list_sites(nn.convert(net, recipe="fp8_rowwise"), X)
    assert [site.path for site in sites] == [*PATHS, "head"]
    assert [site.path for site in sites if site.is_fp8] == PATHS
    assert nn.list_sites(net, X) == ()  # the model itself stays


def test_in_float32_it_computes_what_the_model_does(net):
    np.testing.assert_allclose(
        nn.convert(net, recipe="f32")(X), net(X), rtol=1e-5, atol=1e-5
    )
    assert 15 < support.sqnr_db(net(X), nn.convert(net, recipe=DELAYED)(X)) < 45


def test_only_and_skip_choose_layers(net):
    model = nn.convert(net, only=("attention/*", "up"), skip="*/out")
    assert [s.path for s in nn.list_sites(model, X)] == PATHS[:4]
    with pytest.raises(ValueError, match="'top' matches no dense layer: there are"):
        nn.convert(net, skip="top")
    with pytest.raises(ValueError, match="there is nothing to convert"):
        nn.convert(nnx.LayerNorm(8, rngs=nnx.Rngs(0)))


def loss(model, x):
    return jnp.mean((model(x) - jnp.tanh(x[:, 0])) ** 2)


WRT = nnx.DiffState(0, nnx.Any(nnx.Param, nn.Fp8State))


@nnx.jit
def step(model, optimizer, x):
    value, gradients = nnx.value_and_grad(loss, argnums=WRT)(model, x)
    optimizer.update(model, nn.take_scaling(model, gradients))
    return value


def test_training_moves_parameters_and_overwrites_scales(net):
    losses = {}
    for arm, model in {
        "plain": nnx.clone(net),
        "fp8": nn.convert(net, recipe=DELAYED),
    }.items():
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        losses[arm] = [step(model, optimizer, X) for _ in range(15)]
    assert losses["plain"][-1] < 0.5 * losses["plain"][0]
    assert losses["fp8"][-1] < 0.5 * losses["fp8"][0]
    np.testing.assert_allclose(losses["fp8"][0], losses["plain"][0], rtol=0.15)
    states = jax.tree.leaves(nnx.state(model, nn.Fp8State))
    assert len(states) == len(PATHS)  # the head can never be in FP8
    amax = jnp.max(jnp.abs(X.astype(jnp.bfloat16))).astype(jnp.float32)
    assert any(bool(jnp.all(table[0, 1:16] == amax)) for table in states)


def test_a_shared_layer_keeps_its_loudest_use(net):
    model = nn.convert(net.up, recipe=DELAYED)

    def twice(model, x):
        return jnp.sum(model(x)) + jnp.sum(model(40 * x))

    gradients = nnx.grad(twice, argnums=WRT)(model, X)
    (table,) = jax.tree.leaves(nnx.state(gradients, nn.Fp8State))
    assert table[0, 1] == jnp.max(jnp.abs((40 * X).astype(jnp.bfloat16)))


class Block(nnx.Module):
    """A layer of each kind whose kernel can be stacked."""

    def __init__(self, kind, rngs):
        make = {
            "Linear": lambda: nnx.Linear(48, 48, rngs=rngs),
            "LinearGeneral": lambda: nnx.LinearGeneral(48, (3, 16), rngs=rngs),
            "Einsum": lambda: nnx.Einsum("bk,kn->bn", (48, 48), rngs=rngs),
        }
        self.layer = make[kind]()

    def __call__(self, x):
        return jnp.tanh(self.layer(x).reshape(x.shape))


class Stack(nnx.Module):
    """Blocks in a row, their parameters stacked."""

    def __init__(self, make):
        self.blocks = nnx.vmap(make)(nnx.Rngs(0).split(3))

    def __call__(self, x):
        return nnx.scan(
            lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )(x, self.blocks)


@pytest.mark.parametrize(
    "kind, shape",
    [
        ("Linear", "3, 48, 48"),
        ("LinearGeneral", "3, 48, 3, 16"),
        ("Einsum", "3, 48, 48"),
    ],
)
def test_a_stack_is_converted_in_its_constructor_where_scales_are_delayed(kind, shape):
    plain = Stack(lambda rngs: Block(kind, rngs))
    with pytest.raises(ValueError, match=f"'blocks/layer' .*{shape}.*nnx.vmap, or"):
        nn.convert(plain, recipe=DELAYED)
    model = Stack(lambda rngs: nn.convert(Block(kind, rngs), recipe=DELAYED))
    assert 15 < support.sqnr_db(plain(X), model(X)) < 45
    gradients = nnx.grad(lambda model: jnp.sum(model(X)), argnums=WRT)(model)
    nn.take_scaling(model, gradients)
    (table,) = jax.tree.leaves(nnx.state(model, nn.Fp8State))
    assert table.shape == (3, 3, 17) and jnp.all(table[:, :, 1] > 0)
    current = nn.convert(plain, recipe="fp8_rowwise")
    assert 15 < support.sqnr_db(plain(X), current(X)) < 45


def test_parameters_go_back_to_the_model(net):
    model = nn.convert(net, recipe=DELAYED)
    chex.assert_trees_all_equal(nnx.state(model, nnx.Param), nnx.state(net, nnx.Param))


def test_plans_and_probe(net):
    model = nn.convert(net, recipe="bf16")
    plan = make_plan(nn.list_sites(model, X), None, rules={"up": "fp8_rowwise"})
    with nn.overriding(dict(plan.choices)):
        assert [s.path for s in nn.list_sites(model, X) if s.is_fp8] == ["up"]
    with nn.overriding({"up": DELAYED}):
        with pytest.raises(ValueError, match="'up' has no delayed scales"):
            model(X)
    with nn.probing(nn.ProbeConfig()):
        with pytest.raises(ValueError, match="call it once before"):
            nnx.jit(lambda m, x: m(x))(model, X)
        model(X)
        wrt = nnx.DiffState(0, nn.ProbeStats)
        seen = nnx.grad(loss, argnums=wrt)(model, X)
    stats = nnx.state(model, nn.ProbeStats)
    merged = nn.merge_stats(stats, seen, nn.ProbeConfig())
    changed = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), stats, merged)
    assert any(jax.tree.leaves(changed))
    nnx.update(model, merged)


class Towers(nnx.Module):
    """Two towers, of which a step may use one, or stop the gradient of the other."""

    def __init__(self, rngs):
        self.a, self.b = (nnx.Linear(48, 32, rngs=rngs) for _ in range(2))

    def __call__(self, x, uses_b):
        if uses_b is None:
            return self.a(x)
        b = self.b(x)
        return self.a(x) + (b if uses_b else jax.lax.stop_gradient(b))


@pytest.mark.parametrize("uses_b", [None, False])
def test_the_state_of_a_site_without_a_gradient_stays_as_it_was(uses_b):
    model = nn.convert(Towers(nnx.Rngs(0)), recipe=DELAYED)

    @nnx.jit(static_argnames="uses_b")
    def step(model, uses_b):
        def loss(model):
            return jnp.mean(model(X, uses_b) ** 2)

        nn.take_scaling(model, nnx.grad(loss, argnums=WRT)(model))

    def states():
        return jax.tree.leaves(nnx.state(model, nn.Fp8State))

    step(model, True)
    before = states()
    step(model, uses_b)
    assert jnp.any(states()[0] != before[0])
    np.testing.assert_array_equal(states()[1], before[1])
    assert jnp.all(before[1][:, 0] > 0)
