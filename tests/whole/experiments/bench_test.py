"""A benchmark of a recorded run, and programs that processes lower."""

import json

import pytest

from experiments import restamp
from experiments.bench import site_costs
from loka_jax.dispatch.header import header_here
from loka_jax.dispatch.table import Entry, Table
from loka_jax.site import SiteSpec


def test_processes_lower_the_programs_that_this_one_does():
    site = SiteSpec(64, 32, 32, "none", "relu", True)
    times = {"training": {"xla bf16": 2.0, "xla fp8_rowwise": 3.0}}
    table = Table(header_here(), {site: Entry(times)})
    expected = {site: restamp.site_programs(site, table.sites[site].passes())}
    assert restamp.programs_of([table, table], 1) == [expected] * 2


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
