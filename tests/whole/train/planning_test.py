"""Runs follow their plan and keep it: resumed, demoted, without kernels."""

import dataclasses

import pytest

from loka_jax import nn
from loka_jax.dispatch.plan import DispatchPlan, save
from loka_jax.dispatch.policy import Decision
from loka_jax.ops.device import HOPPER
from loka_jax.site import Choice
from loka_jax.train import planning
from loka_jax.train.config import EmbeddingConfig
from tests.support import train as support

ROW = support.ROW


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    support.share_data(monkeypatch)


def test_kernels_that_do_not_compile_are_left_once(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    choice = Choice.parse("pallas bf16")
    config = dataclasses.replace(
        support.config(tmp_path / "run", epochs=1),
        plan=str(path),
        model=support.MODEL.clone(bottom_mlp=(64,)),
        embedding=EmbeddingConfig(dim=128),
    )
    save(path, DispatchPlan((("bottom_mlp/dense_1", Decision(choice, "why")),)))
    monkeypatch.setattr(planning, "local_device", lambda: HOPPER)  # but there is none
    with nn.site_context(device=HOPPER):
        code, said = support.train(config)
    assert code == 0 and said.count("runs in bfloat16 now") == 1
    assert "did not compile" in support.summary(tmp_path / "run")["changes"][0]
