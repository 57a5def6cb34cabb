"""Sites on meshes do what they do without one, also with Explicit axes."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import linen
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from loka_jax import nn
from loka_jax.nn import PROBE
from tests import support
from tests.support.nn import DELAYED, initialized


def gradients(model, variables, x):
    def loss(variables, x):
        return jnp.mean(model.apply(variables, x).astype(jnp.float32) ** 2)

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(variables, x)


CONVERTED = linen.Sequential([linen.Dense(32, use_bias=False), linen.relu])


@pytest.mark.parametrize(
    "model, columns",
    [
        (nn.Mlp((32, 16), recipe=DELAYED, norm="layer", use_bias=False), P()),
        (nn.Dense(32, recipe="fp8_rowwise", use_bias=False), P(None, "model")),
        (nn.Dense(32, recipe="fp8_blockwise", use_bias=False), P(None, "data")),
        (nn.convert(CONVERTED, recipe="fp8_tensorwise"), P()),
    ],
    ids=range(4),
)
def test_sites_compute_on_spread_rows_and_columns_what_they_do_on_one_device(
    model, columns
):
    x = support.normal(32, 64)
    mesh = jax.make_mesh((4, 2), ("data", "model"))  # Explicit by default
    with jax.numpy_dtype_promotion("standard"):
        variables = initialized(model, x)
        expected = gradients(model, variables, x)
        with jax.set_mesh(mesh):
            spread = jax.device_put(variables, NamedSharding(mesh, columns))
            rows = jax.device_put(x, NamedSharding(mesh, P("data")))
            found = gradients(model, spread, rows)
    assert jax.typeof(found[1]).sharding.spec == P("data", None)
    # Sums of bfloat16 products over rows, in another order.
    close = dict(rtol=2e-2, atol=2e-4)
    chex.assert_trees_all_close(*map(jax.device_get, (found, expected)), **close)


# Probe.

CONFIG = nn.ProbeConfig()


def statistics(variables, x, model):
    def loss(variables):
        return jnp.sum(model.apply(variables, x).astype(jnp.float32) ** 2)

    with nn.probing(CONFIG):
        return jax.grad(loss)(variables)[PROBE]


def test_rows_over_devices_are_one_batch():
    model, x = nn.NormDense(16, recipe="f32", norm="layer"), support.normal(64, 24)
    with nn.probing(CONFIG):
        variables = initialized(model, x)
    run = functools.partial(statistics, model=model.clone(axis_names=("data",)))
    mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,))
    specs = dict(in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    found = jax.jit(jax.shard_map(run, mesh=mesh, **specs))(variables, x)
    expected = jax.jit(functools.partial(statistics, model=model))(variables, x)
    chex.assert_trees_all_close(found, expected, rtol=2e-3, atol=2e-3)
