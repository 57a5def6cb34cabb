"""Parameters and FLOP of the wide configurations, by shapes alone."""

import math

import jax
import pytest

from experiments import configs
from experiments.bench import models, size_curve
from loka_jax import nn

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


def shapes_of(config):
    fields, dim = len(config.data.rows), config.embedding.dim
    shapes = (ROWS, 13), (ROWS, fields, dim)
    return [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]


@pytest.mark.parametrize("name", SIZES)
def test_a_size_has_the_cost_and_parameters_that_it_promises(name):
    config = configs.get_config(f"fp8_{name}")
    inputs, (gflop, millions) = shapes_of(config), SIZES[name]
    sites = nn.list_sites(config.model, *inputs)
    flop = sum(6 * s.spec.m * s.spec.k * s.spec.n * (s.batch or 1) for s in sites)
    assert flop / ROWS / 1e9 == pytest.approx(gflop, rel=0.1)
    variables = jax.eval_shape(config.model.init, jax.random.key(0), *inputs)
    count = sum(math.prod(p.shape) for p in jax.tree.leaves(variables["params"]))
    assert count / 1e6 == pytest.approx(millions, rel=0.1)


@pytest.mark.parametrize("name", SIZES)
def test_sites_of_the_mlps_have_sizes_that_fp8_takes(name):
    config = configs.get_config(f"fp8_{name}")
    sites = nn.list_sites(config.model, *shapes_of(config))
    refused = [s.path for s in sites if s.has_choice and not s.is_fp8]
    # By a rule of `nn.Mlp`, not by its size.
    small = ["deep_mlp/dense_3"] if name == "mlperf_dcnv2" else []
    assert refused == ["bottom_mlp/dense_0", *small, "head"]


def test_the_benchmark_has_every_size_with_and_without_mods():
    assert set(models.WIDE) == set(SIZES)
    wukong, shapes = models.wide("wukong_m")
    assert (wukong.bias, wukong.norm, wukong.activation) == (
        *(False, "block", "hard_swish"),
    )
    assert shapes(8) == ((8, 13), (8, 26, 256))
    assert models.wide("wukong_m all")[0] == wukong
    plain, _ = models.wide("wukong_m plain")
    model = configs.get_config("fp8_wukong_m").model
    assert plain == model.clone(recipe="bf16", activation="swish")
    block, _ = models.wide("wukong_m block")
    assert block == plain.clone(norm="block")
    dcnv2, _ = models.wide("dcnv2 plain")
    small = configs.get_config("fp8_dcnv2").model
    assert dcnv2 == small.clone(recipe="bf16", activation="swish")
    mlperf, _ = models.wide("mlperf_dcnv2")
    assert mlperf == configs.get_config("bf16_mlperf_dcnv2").model


def test_the_curve_has_wukong_s_and_m():
    small, medium = size_curve.costs("wukong S"), size_curve.costs("wukong M")
    assert small["gflop"] == pytest.approx(0.03, rel=0.2)
    assert small["parameters"] / 1e6 == pytest.approx(5, rel=0.1)
    assert (medium["gflop"], medium["parameters"] / 1e6) == pytest.approx(
        SIZES["wukong_m"], rel=0.1
    )
