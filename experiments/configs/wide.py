"""Models at their published sizes, on generated click logs: for a GPU."""

import dataclasses

from experiments.configs.generated import FP8
from experiments.configs.registry import register
from loka_jax.data import DataConfig
from loka_jax.models import Dcnv2
from loka_jax.optim import OptimConfig
from loka_jax.train.config import (
    Dcnv2Config,
    EmbeddingConfig,
    LoopConfig,
)

_DATA = DataConfig(examples=50_331_648)
# Wide cross layers can explode (Wukong, arXiv 2403.02545, section 5.2): gradients are
# clipped.
_OPTIM = OptimConfig(
    lr=1e-3, rows_lr=0.3, clip_norm=10.0, warmup_steps=256, decay="linear"
)


@register
def fp8_mlperf_dcnv2() -> Dcnv2Config:
    """DLRM-DCNv2 of the MLPerf benchmark in FP8: 16 M dense parameters, for a GPU."""
    return Dcnv2Config(
        name="fp8_mlperf_dcnv2",
        model=Dcnv2(
            bottom_mlp=(512, 256),
            num_cross_layers=3,
            cross_rank=512,
            deep_mlp=(1024, 1024, 512, 256),
            structure="stacked",
            recipe=FP8,
        ),
        data=_DATA,
        embedding=EmbeddingConfig(dim=128, init_stddev=0.05),
        optim=_OPTIM,
        loop=LoopConfig(batch_size=65536, eval_every=256),
    )


@register
def bf16_mlperf_dcnv2() -> Dcnv2Config:
    """The same DLRM-DCNv2 in bfloat16, the baseline of `fp8_mlperf_dcnv2`."""
    config = fp8_mlperf_dcnv2()
    model = config.model.clone(recipe="bf16")
    return dataclasses.replace(config, name="bf16_mlperf_dcnv2", model=model)
