"""Sites on meshes with Explicit axes do what they do without a mesh."""

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import linen
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from loka_jax import nn
from tests import support

DELAYED = "fp8_tensorwise_delayed"


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("data", "model"))  # Explicit by default


def gradients(model, variables, x):
    def loss(variables, x):
        return jnp.mean(model.apply(variables, x).astype(jnp.float32) ** 2)

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(variables, x)


def assert_alike_on(model, mesh, x, *, params=None):
    variables = jax.jit(model.init)(jax.random.key(0), x)
    expected = gradients(model, variables, x)
    with jax.set_mesh(mesh):
        spread = jax.device_put(variables, NamedSharding(mesh, params or P()))
        rows = NamedSharding(mesh, P("data"))
        got = gradients(model, spread, jax.device_put(x, rows))
    # Sums of bfloat16 products over rows, in another order.
    close = dict(rtol=2e-2, atol=2e-4)
    chex.assert_trees_all_close(*map(jax.device_get, (got, expected)), **close)
    return got


@pytest.mark.parametrize("recipe", ["bf16", "fp8_blockwise", DELAYED])
def test_a_chain_of_sites_with_spread_rows(mesh, recipe):
    model = nn.Mlp((32, 16), recipe=recipe, norm="layer", use_bias=False)
    got = assert_alike_on(model, mesh, support.normal(32, 64))
    assert jax.typeof(got[1]).sharding.spec == P("data", None)


def test_rows_of_several_dims(mesh):
    assert_alike_on(
        nn.Dense(32, recipe=DELAYED, use_bias=False), mesh, support.normal(8, 4, 64)
    )


def test_a_kernel_with_spread_columns_keeps_them_spread(mesh):
    model = nn.Dense(32, recipe="fp8_rowwise", use_bias=False)
    assert_alike_on(model, mesh, support.normal(32, 64), params=P(None, "model"))
    with jax.set_mesh(mesh):
        x = jax.device_put(support.normal(32, 64), NamedSharding(mesh, P("data")))
        kernel = jax.device_put(
            jnp.ones((64, 32)), NamedSharding(mesh, P(None, "model"))
        )
        y = jax.jit(model.apply)({"params": {"kernel": kernel}}, x)
    assert jax.typeof(y).sharding.spec == P("data", "model")


def test_a_kernel_spread_as_rows_are(mesh):
    model = nn.Dense(32, recipe="bf16", use_bias=False)
    assert_alike_on(model, mesh, support.normal(32, 64), params=P(None, "data"))


def test_converted_models(mesh):
    with jax.numpy_dtype_promotion("standard"):
        layers = [linen.Dense(32, use_bias=False), linen.relu]
        model = nn.convert(linen.Sequential(layers), recipe="fp8_tensorwise")
        assert_alike_on(model, mesh, support.normal(32, 64))


def test_probe_on_spread_rows(mesh):
    model, x = nn.Dense(32, recipe="bf16", use_bias=False), support.normal(32, 64)
    with nn.probing(nn.ProbeConfig()), jax.set_mesh(mesh):
        variables = jax.jit(model.init)(jax.random.key(0), x)
        rows = jax.device_put(x, NamedSharding(mesh, P("data")))
        got, _ = gradients(model, variables, rows)
    expected, _ = gradients(model, {"params": variables["params"]}, x)
    close = dict(rtol=2e-2, atol=2e-4)  # as in `assert_alike_on`
    chex.assert_trees_all_close(
        *map(jax.device_get, (got["params"], expected["params"])), **close
    )


def test_init_outside_of_the_mesh_needs_no_axis():
    layer = nn.Dense(32, recipe=DELAYED, axis_names=("data",))
    x = support.normal(32, 64)
    plain = nn.Dense(32, recipe=DELAYED).init(jax.random.key(0), x)
    chex.assert_trees_all_equal(layer.init(jax.random.key(0), x), plain)
    with pytest.raises(NameError, match="data"):
        layer.apply(plain, x)


@pytest.mark.parametrize("norm", ["none", "layer", "batch"])
def test_an_mlp_keeps_leading_dims(norm):
    model, x = (
        nn.Mlp((32, 16), recipe="fp8_rowwise", norm=norm),
        support.normal(2, 16, 64),
    )
    variables = jax.jit(model.init)(jax.random.key(0), x)
    y = model.apply(variables, x)
    rows = model.apply(variables, x.reshape(32, 64))
    chex.assert_trees_all_equal(y, rows.reshape(2, 16, 16))
