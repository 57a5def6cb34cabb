"""What `--config` names, on a Hopper GPU and elsewhere."""

from experiments import cli, configs
from experiments.cli import parse
from experiments.configs import get_config


def test_every_configuration_has_its_name_and_a_baseline():
    for name in configs.names():
        config = get_config(name)
        assert config.name == name
        assert config.model.recipe.startswith("fp8"), name
    for name in ("dlrm_wide", "dlrm", "mlperf_dcnv2"):
        fp8, bf16 = get_config(f"fp8_{name}"), get_config(f"bf16_{name}")
        assert bf16.model == fp8.model.clone(recipe="bf16")
        assert (bf16.data, bf16.optim, bf16.loop) == (fp8.data, fp8.optim, fp8.loop)


def test_a_hopper_gpu_trains_the_wide_one_and_is_told(monkeypatch, capsys):
    monkeypatch.setattr(cli, "_is_on_hopper", lambda: True)
    for name in ("fp8_dlrm", "bf16_dlrm"):
        config = parse(["--config", name, "--seed", "3"])
        assert (config.name, config.seed) == (f"{name}_wide", 3)
        assert f"--config {name}_small" in capsys.readouterr().err
    assert parse(["--config", "fp8_dlrm_small"]) == get_config("fp8_dlrm")
    monkeypatch.undo()
    assert parse(["--config", "fp8_dlrm"]) == get_config("fp8_dlrm")
    assert capsys.readouterr().err == ""
