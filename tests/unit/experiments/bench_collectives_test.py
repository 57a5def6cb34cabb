"""The benchmark of sums over devices runs anywhere, and writes what it promises."""

import json

import jax
import pytest

from experiments.bench import collectives
from loka_jax.dispatch import gradient_wire


@pytest.mark.slow
def test_sums_are_timed_checked_and_added_to_the_table(tmp_path):
    out, table = tmp_path / "out.json", tmp_path / "table.json"
    collectives.main(
        collectives.Arguments(
            out=out,
            table=table,
            mib=(0.01,),
            local_mib=(0.01,),
            repeat=2,
            budget_s=500.0,
        )
    )
    result = json.loads(out.read_text())
    (row,) = result["rows"]
    assert set(row["forms"]) == {"f32", "bf16", "int8 xla b128", "e4m3 xla b128"}
    for name, form in row["forms"].items():
        assert form["median_us"] > 0 and form["equal_bits"], name
        assert form["wire"] == (["u8"] if "xla" in name else ["f32"])
    assert row["forms"]["int8 xla b128"]["sqnr_db"] > 38
    (local,) = result["local"]
    assert {"copy", "pack int8 xla", "unpack e4m3 xla"} < set(local["kernels"])
    (host,) = gradient_wire.read(table)
    assert host.device == jax.devices()[0].device_kind
    assert host.devices == jax.device_count()
    assert set(host.us) == {"f32", "bf16", "int8 xla"}


def test_dtypes_are_read_from_compiled_programs():
    hlo = """
  %a = ((bf16[8]{0}), bf16[8]{0}) all-reduce-start(%x), channel_id=1
  %b = bf16[8]{0} all-reduce-done(%a)
  ROOT %c = u8[2,4]{1,0} all-to-all(%y), dimensions={0}
  %d = f32[8]{0} add(%e, %f)
"""
    assert collectives.wire_types(hlo) == ["bf16", "u8"]
