"""One call plans a model of one's own by its live errors, and sets its scales."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

from loka_jax import nn
from loka_jax.dispatch import adopt as adopt_lib
from loka_jax.dispatch.adopt import adopt
from loka_jax.dispatch.local import Local
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.table import Table
from loka_jax.measure.timing import Timing
from loka_jax.scaling import DelayedScaling
from loka_jax.site import BF16
from tests.support.dispatch import HEADER, EverySite
from tests.support.nn import rounded

pytestmark = pytest.mark.usefixtures("as_users_do")

DELAYED = "xla fp8_tensorwise_delayed"
FAST = {BF16.name: 2.0, DELAYED: 1.0}


class Ranker(linen.Module):
    @linen.compact
    def __call__(self, x, train=False):
        x = linen.relu(linen.LayerNorm()(linen.Dense(32)(x)))
        x = linen.Dropout(0.5, deterministic=not train)(x)
        return linen.Dense(1, name="head")(linen.Dense(16)(x))[:, 0]


def loss(model, variables, batch):
    x, y = batch
    rngs = {"dropout": jax.random.key(3)}
    z = model.apply(variables, x, train=True, rngs=rngs)
    return jnp.mean((z - y) ** 2), z  # further results are nobody's concern


BATCHES = [(x, x[:, 0]) for x in (rounded(64, 32, seed=i) for i in range(3))]


@pytest.fixture(scope="module")
def ranker():
    model = nn.convert(Ranker(), skip="head")
    return model, model.init(jax.random.key(0), BATCHES[0][0])


@pytest.fixture
def gpu(monkeypatch):
    """Stands in for a GPU; `times` are those of any site, `steps` of whole steps."""
    stand_in = dict(times=FAST, steps={"bf16": 300.0, "plan": 200.0})

    def local_performance():
        table = Table(HEADER, EverySite(stand_in["times"]))
        return Local(PerformanceModel.of(table))

    def time_chains(chains, **options):
        for chain in chains.values():
            jax.block_until_ready(chain(1))
        return {x: Timing.of([stand_in["steps"][x]]) for x in chains}

    monkeypatch.setattr(adopt_lib, "local_performance", local_performance)
    monkeypatch.setattr(adopt_lib, "time_chains", time_chains)
    return stand_in


def choices(adopted):
    return {path: choice.name for path, choice in adopted.plan.choices}


def test_a_model_leaves_in_fp8_with_its_scales_set(ranker, gpu):
    said = []
    adopted = adopt(*ranker, loss, BATCHES, say=said.append)
    # What a head reads has no FP8 in its dlhs, and no candidate without was timed.
    assert choices(adopted) == {"Dense_0": DELAYED, "Dense_1": BF16.name}
    (table,) = jax.tree.leaves(adopted.variables[nn.OVERWRITE_WITH_GRADIENT])
    assert np.all(DelayedScaling(table).factors > 0)
    assert said[0].startswith("Looking for FP8 at 2 sites, for 180 seconds at most")
    assert said[-1].splitlines()[-1] == adopted.sentence
    assert adopted.sentence.startswith("1 of 3 sites run in FP8")
    assert "50% faster" in adopted.sentence
    assert all(len(line) <= 100 for line in said[-1].splitlines()[:-2])

    # It trains, by any optimizer of all variables, and runs no guard of first steps.
    model, variables = adopted.model, adopted.variables
    sites = nn.sites_of(functools.partial(loss, model), variables, BATCHES[0])
    recipes = {site.path: site.plan.choice.recipe for site in sites}
    assert recipes["Dense_0"].scales_initialized
    optimizer = nn.overwriting(optax.sgd(0.1))
    state = optimizer.init(variables)
    gradients = jax.jit(jax.grad(functools.partial(loss, model), has_aux=True))
    updates, _ = optimizer.update(gradients(variables, BATCHES[0])[0], state, variables)
    after = optax.apply_updates(variables, updates)
    assert np.isfinite(loss(model, after, BATCHES[0])[0])
