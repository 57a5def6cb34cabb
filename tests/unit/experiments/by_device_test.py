"""What `--config fp8_dlrm` is on a Hopper GPU and elsewhere."""

import pytest

from experiments import by_device
from experiments.cli import parse
from experiments.configs import get_config


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(by_device, "_is_on_hopper", lambda: True)


@pytest.mark.parametrize("name", ["fp8_dlrm", "bf16_dlrm"])
def test_a_hopper_gpu_trains_the_wide_one_and_is_told(on_hopper, capsys, name):
    config = parse(["--config", name, "--seed", "3"])
    assert config.name == f"{name}_wide"
    assert config.seed == 3
    assert f"--config {name}_small" in capsys.readouterr().err


def test_the_small_one_can_be_had_there(on_hopper, capsys):
    assert parse(["--config", "fp8_dlrm_small"]) == get_config("fp8_dlrm")
    assert get_config("bf16_dlrm_small") == get_config("bf16_dlrm")
    assert capsys.readouterr().err == ""


def test_elsewhere_it_is_the_small_one(capsys):
    assert parse(["--config", "fp8_dlrm"]) == get_config("fp8_dlrm")
    assert capsys.readouterr().err == ""


def test_the_baseline_differs_in_precision_alone():
    fp8, bf16 = get_config("fp8_dlrm_wide"), get_config("bf16_dlrm_wide")
    assert bf16.model == fp8.model.clone(recipe="bf16")
    assert (bf16.data, bf16.optim, bf16.loop) == (fp8.data, fp8.optim, fp8.loop)
