"""Parameters and FLOP of the wide configurations, by shapes alone."""

import math

import jax
import pytest

from experiments import configs
from loka_jax import nn
from loka_jax.data.planted_events import schema_of_events
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.train.model import model_of

ROWS = 16
# By configuration: training GFLOP an example (3 x forward), and million dense
# parameters, from the sizes' dimensions (docs/models.md).
SIZES = {
    "mlperf_dcnv2": (0.095, 16),
    "wukong_m": (0.64, 103),
    "wukong_l": (4.3, 705),
    "wukong_xl": (20.5, 3400),
    "dhen_m": (0.35, 56),
    "dhen_l": (2.2, 370),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_size_has_the_cost_and_parameters_that_it_promises(name):
    config = configs.get_config(f"fp8_{name}")
    embeddings = ROWS, len(config.data.rows), config.embedding.dim
    inputs = [jax.ShapeDtypeStruct(s, "float32") for s in ((ROWS, 13), embeddings)]
    gflop, millions = SIZES[name]
    sites = nn.list_sites(config.model, *inputs)
    flop = sum(6 * s.spec.m * s.spec.k * s.spec.n * (s.batch or 1) for s in sites)
    assert flop / ROWS / 1e9 == pytest.approx(gflop, rel=0.1)
    variables = jax.eval_shape(config.model.init, jax.random.key(0), *inputs)
    count = sum(math.prod(p.shape) for p in jax.tree.leaves(variables["params"]))
    assert count / 1e6 == pytest.approx(millions, rel=0.1)
    refused = [s.path for s in sites if s.has_choice and not s.is_fp8]
    # By a rule of `nn.Mlp`, not by its size.
    small = ["deep_mlp/dense_3"] if name == "mlperf_dcnv2" else []
    assert refused == ["bottom_mlp/dense_0", *small, "head"]


# Likewise on histories (docs/models.md).
OF_HISTORIES = {
    "interformer_m": (0.37, 28),
    "interformer_l": (3.5, 204),
    "onetrans_m": (31, 64),
    "onetrans_l": (106, 248),
}


@pytest.mark.parametrize("name", OF_HISTORIES)
def test_a_size_on_histories_has_the_cost_and_parameters_that_docs_say(name):
    config = configs.get_config(f"fp8_{name}")
    model = model_of(config, schema_of_events(config.data))
    gflop, millions = OF_HISTORIES[name]
    sites = model.list_sites(DispatchPlan(), ROWS)
    flop = sum(3 * site.flops for site in sites)
    assert flop / ROWS / 1e9 == pytest.approx(gflop, rel=0.02)
    key = jax.random.key(0)
    variables = jax.eval_shape(config.model.init, key, *model.inputs(ROWS))
    count = sum(math.prod(p.shape) for p in jax.tree.leaves(variables["params"]))
    assert count / 1e6 == pytest.approx(millions, rel=0.02)
    refused = {x.path.split("/")[-1] for x in sites if x.has_choice and not x.is_fp8}
    assert refused <= {"head", "pffn"}  # a weight of n_sum columns
