"""Runs on event logs: what users did before an event, in order."""

import dataclasses

from experiments.configs.generated import FP8
from experiments.configs.registry import register
from loka_jax.data import DataConfig
from loka_jax.models import Hstu
from loka_jax.optim import OptimConfig
from loka_jax.train.config import EmbeddingConfig, HstuConfig, LoopConfig


@register
def fp8_hstu() -> HstuConfig:
    """A small HSTU in FP8 on a generated event log: two minutes on two CPU cores."""
    return HstuConfig(
        name="fp8_hstu",
        model=Hstu(
            dim=64,
            num_layers=2,
            num_heads=2,
            qk_dim=32,
            v_dim=32,
            item_mlp=(64,),
            head_mlp=(64,),
            max_length=136,
            age_buckets=256,
            recipe=FP8,
        ),
        data=DataConfig(
            kind="events",
            examples=1_000_000,
            eval_examples=65_536,
            rows=(9, 1001),
            history=64,
            targets="all",
        ),
        embedding=EmbeddingConfig(dim=32, init_stddev=0.05),
        optim=OptimConfig(lr=2e-3, rows_lr=0.3, warmup_steps=64, decay="linear"),
        loop=LoopConfig(batch_size=128),
    )
