"""The costs of sites are those of the same weights on the same examples."""

import json

import pytest

from experiments import train
from experiments.bench import site_costs
from loka_jax.predict.trained import read_trained
from loka_jax.train.folder.source_run import open_run


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    options = ["--config", "fp8_mlperf_dcnv2_tiny", "--workdir", str(folder)]
    assert train.main([*options, "--recipe", "bf16", "--plan", "off"]) == 0
    return folder


def test_each_site_each_part_and_the_whole_have_a_cost(workdir, tmp_path):
    out = tmp_path / "out.json"
    site_costs.main(site_costs.Arguments(workdir=workdir, out=out))
    result = json.loads(out.read_text())
    trained = json.loads((workdir / "summary.json").read_text())
    # The run's own evaluation rounds the same weights and examples alike.
    assert result["bf16_ne"] == pytest.approx(trained["final_eval"]["ne"], abs=1e-6)
    costs = result["costs"]
    layers = [
        f"{part}/dense_{i}" for part in ("bottom_mlp", "deep_mlp") for i in (0, 1)
    ]
    crosses = [f"cross/{factor}_{i}" for i in (0, 1) for factor in "vu"]
    parts = ["bottom_mlp", "cross", "deep_mlp", "all sites"]
    assert set(costs) == {*layers, *crosses, *parts}
    assert costs["bottom_mlp/dense_0"] == 0  # 13 features run in bfloat16
    assert costs["bottom_mlp"] == costs["bottom_mlp/dense_1"]
    others = set(costs) - {"bottom_mlp/dense_0"}
    # Of 2,048 rounded logits whose errors are some hundredths.
    assert all(0 < abs(costs[name]) < 0.01 for name in others)


def test_parts_of_one_site_are_that_site(workdir):
    source = open_run(workdir, best=False)
    splits = site_costs._splits_of(source)
    trained = read_trained(source, splits.train.schema)
    cases = dict(site_costs.cases(trained, "fp8_rowwise"))
    assert len(cases["all sites"]) == 8
    assert len(cases["cross"]) == 4
    [(path, choice)] = cases["cross/u_1"]
    assert path == "cross/u_1"
    assert choice.name == "xla fp8_rowwise/bf16/bf16"
