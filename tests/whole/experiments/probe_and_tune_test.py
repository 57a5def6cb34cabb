"""`tune.py` from training to its table, and a run that follows it."""

import dataclasses

import jax

from experiments import tune
from experiments.cli import parse
from loka_jax.dispatch import table as tables
from loka_jax.dispatch import tuning
from loka_jax.dispatch.policy import Limits
from loka_jax.site import BF16, Choice
from loka_jax.train.build import build
from loka_jax.train.config import DispatchOptions
from tests.support import train as support
from tests.support.configs import tiny_config

ROW = "xla fp8_rowwise"
TINY = ["--config", tiny_config("fp8_dlrm"), "--loop.max-steps", "4"]
TINY += ["--bottom-mlp", "8", "--top-mlp", "16"]  # FP8 fits the last layer alone


def test_a_table_is_measured_and_followed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tuning, "candidates", lambda *_: [BF16, Choice.parse(ROW)])
    support.share_data(monkeypatch)
    path = tmp_path / "table.json"
    options = ["--tune.pairs", "2", "--tune.rows", "16", "--tune.workers", "1"]
    options += ["--tune.held-out-batches", "1"]
    workdir = ["--workdir", str(tmp_path / "probed")]
    assert tune.main([*TINY, *workdir, *options, "--table", str(path)]) == 0
    table = tables.read(path)
    assert len(table.sites) == 3
    own = build(parse(TINY)).source
    for entry in table.sites.values():
        assert BF16.name in entry.times["training"]
        assert all(source.startswith(f"{own} ") for source in entry.errors)
    effects = [source for entry in table.sites.values() for source in entry.effects]
    assert effects == [f"{own} top_mlp/dense_0"]
    assert ("There is no GPU with FP8" in capsys.readouterr().out) == (
        jax.default_backend() == "cpu"
    )
    config = parse([*TINY, "--plan", str(path)])
    loose = DispatchOptions(limits=Limits(speedup=0.01, healthy=9.0))
    plan = build(dataclasses.replace(config, dispatch=loose)).plan
    names = {choice.name for _, choice in plan.choices}
    assert names and names <= {BF16.name, ROW}
    assert all(decision.speedup for _, decision in plan.decisions)
