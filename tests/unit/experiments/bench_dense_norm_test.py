"""The benchmarks of dense layers with norms run, and judge by the right numbers."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from experiments.bench import dense_norm, tower
from experiments.bench import dense_norm_forms as forms
from loka_jax.site import SiteSpec
from tests.support.stand_ins import ROOFLINE

TINY = dense_norm.Arguments(m=(1024,), shapes=("64x64",))


@pytest.mark.slow
def test_dense_norm_measures_xla_anywhere(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(dense_norm, "MAX_SETS", 2)
    out = tmp_path / "out.json"
    dense_norm.main(dataclasses.replace(TINY, out=out))
    result = json.loads(out.read_text())
    assert result["versions"]["platform"] and result["benchmark"] == "dense_norm"
    (row,) = result["rows"]
    for name in (*forms.XLA_BF16, *forms.XLA_FP8, *forms.XLA_BACKWARD):
        assert row["forms"][name]["us"] > 0, name
    assert "1024 x 64 x 64" in capsys.readouterr().out


def test_dense_norm_begins_no_shape_over_its_budget():
    result = dense_norm.main(dataclasses.replace(TINY, budget_s=0.0))
    assert result["rows"] == []
    assert result["stopped_before"] == "1024 x 64 x 64, layer, swish"


# LayerNorm in Flax mixes dtypes, which the tests' settings forbid.
@pytest.mark.slow
def test_tower_measures_and_trains_anywhere(tmp_path, capsys):
    out = tmp_path / "out.json"
    arms = (tower.FLAX, "xla fp8_tensorwise_delayed_bf16_drhs")
    sizes = {"inputs": 32, "features": (16,), "batch_size": 64}
    with jax.numpy_dtype_promotion("standard"):
        tower.main(tower.Arguments(out=out, arms=arms, calls=2, steps=4, **sizes))
    result = json.loads(out.read_text())
    for record in result["arms"].values():
        assert record["inference"]["wall"]["median_us"] > 0
        assert record["step"]["vs_flax_bf16"] > 0
    first = [record["first"] for record in result["losses"].values()]
    assert first == pytest.approx([first[0]] * 2, abs=0.02)
    assert "floor of inference" in capsys.readouterr().out


def test_tower_begins_with_the_arm_it_compares_to():
    with pytest.raises(ValueError, match="put 'flax bf16' first"):
        tower.Arguments(arms=("pallas bf16",))
    with pytest.raises(ValueError, match="'fp9'"):
        tower.Arguments(arms=(tower.FLAX, "xla fp9"))


def test_losses_are_equal_within_the_noise_of_bf16():
    noise = np.random.default_rng(0).normal(0.5, 0.01, 200)
    losses = {tower.FLAX: noise, "near": noise + 0.005, "far": noise + 0.02}
    compared = tower.compare_losses(losses)
    assert compared["near"]["is_equal"] and not compared["far"]["is_equal"]
    assert compared["far"]["difference"] == pytest.approx(0.02)


def test_inference_floor_is_that_of_each_layer():
    arguments = tower.Arguments(inputs=512, features=(512, 256), batch_size=1 << 16)
    layers = [2 * 512**2 * 65536 / 1e9, (65536 * 768 + 512 * 256) / 4e6]
    layers[1] = max(layers[1], 2 * 512 * 256 * 65536 / 1e9)
    expected = sum(layers) + 65536 * 260 / 4e6
    assert tower.inference_floor_us(arguments, ROOFLINE) == pytest.approx(expected)


def test_floor_is_the_longer_of_traffic_and_arithmetic():
    assert ROOFLINE.floor_us(8e6, 1e9, "fp8") == 2.0
    assert ROOFLINE.floor_us(8e6, 2e9, "bf16") == 4.0


@pytest.mark.parametrize("name", ["xla_fp8_to_fp8", "xla_bwd_of_xhat"])
def test_a_wrong_result_is_seen(name):
    spec = SiteSpec(m=64, k=64, n=128, norm="layer", activation="swish")
    every = forms.forward_forms(spec) + forms.backward_forms(spec)
    (form,) = (form for form in every if form.name == name)
    form = form._replace(least_db=28.0)
    (arguments,) = forms.make_operands(spec, 1).arguments(form.reads)
    outputs = jax.jit(form.run)(*arguments)
    right = dense_norm.check(form, arguments, outputs)
    assert right["sqnr_db"] and "wrong" not in right
    first = next(iter(right["sqnr_db"]))
    outputs[first] = outputs[first][::-1]
    assert dense_norm.check(form, arguments, outputs)["wrong"].startswith(first)


def test_ratios_are_to_the_best_of_xlas_forms():
    times_us = {
        "xla_bf16": 30.0,
        "xla_bf16_f32_gemm": 28.0,
        "xla_fp8_to_fp8": 20.0,
        "fp8_to_fp8_tensor": 7.0,
        "bf16_twin": 14.0,
        "xla_bwd_of_z": 50.0,
        "bwd_bf16_of_fp8": 25.0,
    }
    records = {name: {"us": time_us} for name, time_us in times_us.items()}
    dense_norm.compare(records)
    assert records["fp8_to_fp8_tensor"]["vs_xla"] == 4.0
    assert records["fp8_to_fp8_tensor"]["vs_best_xla"] == pytest.approx(20 / 7)
    assert records["bf16_twin"]["vs_best_xla"] == 2.0
    assert records["bwd_bf16_of_fp8"]["vs_xla"] == 2.0
