"""The benchmark of single calls runs anywhere, and writes what it promises."""

import json

import pytest

from experiments.bench import latency


@pytest.mark.slow
def test_each_arm_has_percentiles_of_its_dense_part_and_the_whole(tmp_path):
    out = tmp_path / "out.json"
    arms = ("xla bf16", "ours fp8")
    latency.main(
        latency.Arguments(
            out=out, models=("tiny",), batches=(16,), arms=arms, budget_s=500.0
        )
    )
    rows = json.loads(out.read_text())["models"]["tiny"]
    found = {(row["kind"], row["batch"], row["arm"]) for row in rows}
    assert found == {(kind, 16, arm) for kind in ("dense", "whole") for arm in arms}
    for row in rows:
        assert 0 < row["p50_us"] <= row["p99_us"] and row["calls"] >= 200
        has_fp8 = any("e4m3" in text for text in row.get("sites", {}).values())
        assert has_fp8 == (row["arm"] == "ours fp8")
    spent = latency.Arguments(models=("tiny",), batches=(16,), arms=arms, budget_s=0.0)
    assert not latency.main(spent)["models"]["tiny"]


def test_a_failure_of_pytorch_ends_its_rows_alone():
    def fail():
        raise RuntimeError("no cache")

    case = latency.Case("dense", 16, "torch bf16", fail, {})
    assert latency._timed_or_failed(case, None) == {"failed": "no cache"}
    with pytest.raises(RuntimeError, match="no cache"):
        latency._timed_or_failed(case._replace(arm="ours fp8"), None)
