"""The benchmark of the exchange runs anywhere, and writes what it promises."""

import json

import jax
import pytest

from experiments.bench import exchange


@pytest.mark.slow
def test_exchanges_are_timed_and_checked(tmp_path):
    out = tmp_path / "out.json"
    exchange.main(
        exchange.Arguments(
            out=out,
            devices=(1, 2, 1024),
            dims=(12,),
            ids=300,
            rows=4096,
            repeat=2,
            calls=1,
            budget_s=500.0,
        )
    )
    result = json.loads(out.read_text())
    there = [n for n in (1, 2) if n <= jax.device_count()]
    assert [case["devices"] for case in result["cases"]] == there
    assert [1024, 12] in result["left_out"]
    # Of a row's largest value: half a step of the coarsest scale, a power of two.
    errors = {"f32": 0.0, "bf16": 2.0**-8, "e4m3": 2.0**-4, "int8": 1 / 127}
    for case in result["cases"]:
        assert 0 < case["longest_list"] <= case["capacity"]
        for name, form in case["forms"].items():
            assert form["error"] <= errors[name.split()[0]] and form["equal_bits"]
            parts = ("fetch", "give_back", "wire")
            assert all(form[part]["median_us"] > 0 for part in parts)
