"""Benchmarks of kernels, run without a GPU: what they measure is XLA alone."""

import json

from experiments.bench import norm_tails


def test_norm_tails_are_timed_in_each_pass(tmp_path):
    out = tmp_path / "tails.json"
    norm_tails.main(norm_tails.Arguments(shapes=("64x512",), out=out))
    rows = json.loads(out.read_text())["rows"]
    passes = [(row["norm"], row["pass"]) for row in rows]
    assert len(passes) == len(set(passes)) == 9
    for row in rows:
        assert row["forms"]["xla"]["us"] > 0
        assert all("us" in x or "failed" in x for x in row["forms"].values())
