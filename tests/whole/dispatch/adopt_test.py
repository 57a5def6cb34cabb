"""A model adopts FP8 over a mesh, and again while it is trained."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

from loka_jax import nn
from loka_jax.dispatch.adopt import adopt
from loka_jax.scaling import DelayedScaling
from loka_jax.site import BF16
from tests.support.adopting import DELAYED, Gpu, stood_in

pytestmark = pytest.mark.usefixtures("as_users_do")
ROWS, DEVICES = 256, 8


class Ranker(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.relu(linen.LayerNorm()(linen.Dense(64)(x)))
        return linen.Dense(1, name="head")(linen.Dense(32)(x))[:, 0]


MODEL = nn.convert(Ranker(), skip="head")
X = jax.random.normal(jax.random.key(1), (3, ROWS, 48))
BATCHES = [(x, jnp.tanh(x[:, 0])) for x in X]


def loss(model, variables, batch):
    x, y = batch
    return jnp.mean((model.apply(variables, x) - y) ** 2)


def adopted(variables, loss, batches):
    with stood_in(Gpu()):
        found = adopt(MODEL, variables, loss, batches, say=lambda text: None)
    assert dict(found.plan.choices)["Dense_0"].name == DELAYED
    (table,) = jax.tree.leaves(found.variables[nn.OVERWRITE_WITH_GRADIENT])
    assert np.all(DelayedScaling(table).factors > 0)
    return found


@pytest.mark.parametrize("is_mapped", [False, True], ids=["sharded", "shard_map"])
def test_over_a_mesh_sites_are_planned_for_the_rows_of_a_device(is_mapped):
    mesh, spread = jax.make_mesh((DEVICES,), ("data",)), PartitionSpec("data")

    def mapped(model, variables, batch):
        def run(variables, *batch):
            return jax.lax.pmean(loss(model, variables, batch), "data")

        specs = dict(in_specs=(PartitionSpec(), spread, spread))
        run = jax.shard_map(run, mesh=mesh, out_specs=PartitionSpec(), **specs)
        return run(variables, *batch)

    placed = jax.device_put(BATCHES, NamedSharding(mesh, spread))
    variables = jax.jit(MODEL.init)(jax.random.key(0), X[0])
    variables = jax.device_put(variables, NamedSharding(mesh, PartitionSpec()))
    found = adopted(variables, mapped if is_mapped else loss, placed)
    assert found.identity.sites["Dense_0"].startswith(f"{ROWS // DEVICES} x 48 x 64")


def test_it_is_asked_again_while_a_train_state_is_trained():
    found = adopted(jax.jit(MODEL.init)(jax.random.key(0), X[0]), loss, BATCHES)
    state = TrainState.create(
        apply_fn=found.model.apply, params=found.variables, tx=optax.adam(1e-2)
    )

    @jax.jit
    def steps(state, batches):
        def step(state, batch):
            value, gradients = jax.value_and_grad(
                lambda variables: jnp.mean(
                    (state.apply_fn(variables, batch[0]) - batch[1]) ** 2
                )
            )(state.params)
            return state.apply_gradients(grads=gradients), value

        return jax.lax.scan(step, state, batches)

    stacked = jax.tree.map(lambda *x: jnp.stack(x * 20), *BATCHES)
    state, losses = steps(state, stacked)
    assert losses[-1] < 0.3 * losses[0]
    again = adopted(state.params, loss, BATCHES)
    assert again.plan.choices == found.plan.choices
    # The optimizer's state goes on, and so do the parameters.
    state = state.replace(params=again.variables, apply_fn=again.model.apply)
    assert steps(state, stacked)[1][0] < 0.5 * losses[0]


class Layer(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        return x + linen.relu(linen.Dense(48)(linen.LayerNorm()(x))), None


class Deep(linen.Module):
    @linen.compact
    def __call__(self, x):
        how = dict(variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = linen.scan(Layer, **how)()(x, None)
        return linen.Dense(1, name="head")(linen.LayerNorm()(x))[:, 0]


def test_a_site_of_layers_in_a_scan_is_judged_by_the_worst_of_them():
    model = nn.convert(Deep(), skip="head")
    variables = jax.jit(model.init)(jax.random.key(0), X[0])
    # A head reads the layers, so that dlhs is no product for FP8.
    name = f"{DELAYED}/bf16/fp8_tensorwise_delayed"
    with stood_in(Gpu({BF16.name: 2.0, name: 1.0})):
        found = adopt(model, variables, loss, BATCHES, say=lambda text: None)
    ((_, decision),) = found.plan.decisions
    assert decision.choice.name == name, decision
    (tables,) = jax.tree.leaves(found.variables[nn.OVERWRITE_WITH_GRADIENT])
    assert len(tables) == 3 and np.all(DelayedScaling(tables).factors > 0)
