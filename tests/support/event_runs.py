"""Runs of models of event logs, and that they learn the order of a history."""

import re

from loka_jax.data import DataConfig
from loka_jax.models import Hstu, InterFormer, OneTrans
from loka_jax.optim import OptimConfig
from loka_jax.train.config import (
    EmbeddingConfig,
    HstuConfig,
    InterFormerConfig,
    LoopConfig,
    OneTransConfig,
    RunOptions,
)
from tests.support.train import train

_CONFIGS = {
    Hstu: HstuConfig,
    InterFormer: InterFormerConfig,
    OneTrans: OneTransConfig,
}


def config_of(model, **options):
    """Returns the configuration of a run of a model."""
    return _CONFIGS[type(model)](model=model, **options)


def assert_order_is_learned(model, workdir, *, batch_size, **data):
    """Asserts that a run in FP8 has an NE that a bag of events cannot reach."""
    config = config_of(
        model,
        name="order",
        data=DataConfig(
            kind="events", eval_examples=4096, rows=(3, 5), signal=3.0, **data
        ),
        embedding=EmbeddingConfig(dim=16, init_stddev=0.1),
        optim=OptimConfig(lr=0.02, rows_lr=0.3, warmup_steps=16, decay="linear"),
        loop=LoopConfig(batch_size=batch_size),
        run=RunOptions(workdir=workdir),
    )
    code, said = train(config)
    best = float(re.findall(r"([0-9.]+) with a bag", said)[0])
    found = float(re.findall(r"test: .* NE ([0-9.]+)", said)[0])
    assert code == 0 and "sites in FP8" in said
    assert found < best - 0.05
