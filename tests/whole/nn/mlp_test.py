"""One operation over devices."""

import chex
import jax
import jax.numpy as jnp
import pytest

from loka_jax.models import Dcnv2
from loka_jax.nn import interaction
from loka_jax.nn.context import site_context
from tests import support
from tests.support.nn import DELAYED, initialized, record_calls, table_of


def test_gradients_of_one_operation_over_two_devices_are_those_of_one(monkeypatch):
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    options = dict(recipe=DELAYED, implementation="group")
    model = Dcnv2(num_cross_layers=2, deep_mlp=(32, 16), **options)
    # 13 + 35 features, and zeros.
    features = support.normal(64, 13), support.normal(64, 7, 5, seed=1)
    table = table_of([2.0**-5, 2.0**-9, 2.0**-5])  # nothing is clipped or flushed
    variables = initialized(model, *features, table=table)
    calls = record_calls(monkeypatch, (interaction, "run_group"))

    def run(variables, *features):
        def loss(variables, *features):
            # Far from the logits: the gradient of the bias is no small difference.
            return jnp.sum((model.apply(variables, *features) - 9) ** 2)

        gradients, *others = jax.grad(loss, argnums=(0, 1, 2))(variables, *features)
        return gradients["params"], *others

    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.P("data")
    specs = dict(in_specs=(jax.P(), rows, rows), out_specs=(jax.P(), rows, rows))
    spread = jax.jit(jax.shard_map(run, mesh=mesh, **specs))
    with site_context(scales_initialized=True):
        ours, theirs = (f(variables, *features) for f in (spread, jax.jit(run)))
    assert len(calls) == 2
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-2)
