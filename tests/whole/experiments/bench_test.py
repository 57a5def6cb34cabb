"""A benchmark of a recorded run."""

import json

import pytest

from experiments.bench import site_costs


def test_sites_parts_and_the_whole_have_a_cost(recorded, tmp_path):
    run, out = recorded("bf16"), tmp_path / "out.json"
    site_costs.main(site_costs.Arguments(workdir=run.workdir, out=out))
    result = json.loads(out.read_text())
    trained = json.loads((run.workdir / "summary.json").read_text())
    # The run's own evaluation rounds the same weights and examples alike.
    assert result["bf16_ne"] == pytest.approx(trained["final_eval"]["ne"], abs=1e-6)
    costs = result["costs"]
    others = {"bottom_mlp", "bottom_mlp/dense_1", "top_mlp/dense_0", "all sites"}
    assert costs.keys() == {"bottom_mlp/dense_0", *others}
    assert costs["bottom_mlp/dense_0"] == 0  # 1 feature runs in bfloat16
    assert costs["bottom_mlp"] == costs["bottom_mlp/dense_1"]
    # Of 75 rounded logits whose errors are some hundredths.
    assert all(0 < abs(costs[name]) < 0.05 for name in others)
