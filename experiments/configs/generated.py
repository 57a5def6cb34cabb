"""Runs on generated click logs: nothing to download, the best possible NE is known."""

import dataclasses
from typing import Any

from experiments.configs.registry import register
from loka_jax.data import DataConfig
from loka_jax.models import Dcnv2, Dhen, DhenDlrm, Dlrm, Wukong
from loka_jax.optim import OptimConfig
from loka_jax.train.config import (
    Dcnv2Config,
    DhenConfig,
    DhenDlrmConfig,
    DlrmConfig,
    EmbeddingConfig,
    LoopConfig,
    WukongConfig,
)

# The recipe that adds the fewest kernels where XLA runs all sites.
FP8 = "fp8_tensorwise_delayed_bf16_drhs"

_DATA = DataConfig(examples=6_291_456)
_OPTIM = OptimConfig(lr=2e-3, rows_lr=0.3, warmup_steps=64, decay="linear")
_EMBEDDING = EmbeddingConfig(dim=16, init_stddev=0.05)
_LOOP = LoopConfig(batch_size=4096, eval_every=256)
_SMALL: dict[str, Any] = dict(
    data=_DATA, embedding=_EMBEDDING, optim=_OPTIM, loop=_LOOP
)
# Interactions of embeddings take a CPU several times as long as a DLRM does.
_HALF: dict[str, Any] = _SMALL | dict(data=DataConfig(examples=3_145_728))
# 26 fields and the dense ones make 32 embeddings.
_STACKED: dict[str, Any] = dict(
    bottom_mlp=(64,), dense_embeddings=6, top_mlp=(128,), recipe=FP8
)
_DHEN: dict[str, Any] = _STACKED | dict(
    dot=12, cross=12, linear=8, dot_mlp=(128,), cross_rank=64
)


@register
def fp8_dlrm() -> DlrmConfig:
    """A DLRM in FP8: about two minutes on two CPU cores; wider on a Hopper GPU."""
    model = Dlrm(bottom_mlp=(64,), top_mlp=(256, 128), recipe=FP8)
    return DlrmConfig(name="fp8_dlrm", model=model, **_SMALL)


@register
def fp8_dlrm_wide() -> DlrmConfig:
    """The DLRM that `fp8_dlrm` is on a Hopper GPU: a top MLP 4,096 wide in FP8."""
    small = fp8_dlrm()
    return dataclasses.replace(
        small,
        name="fp8_dlrm_wide",
        model=small.model.clone(top_mlp=(4096, 4096, 1024)),
        data=DataConfig(examples=50_331_648),
        optim=dataclasses.replace(_OPTIM, lr=5e-4, warmup_steps=128),
        loop=LoopConfig(batch_size=8192, eval_every=1024),
    )


@register
def fp8_dcnv2() -> Dcnv2Config:
    """A small DCN V2 in FP8."""
    model = Dcnv2(num_cross_layers=2, deep_mlp=(256, 128), recipe=FP8)
    return Dcnv2Config(name="fp8_dcnv2", model=model, **_SMALL)


@register
def fp8_wukong() -> WukongConfig:
    """A small Wukong in FP8: a few minutes on two CPU cores."""
    model = Wukong(k=8, fmb_mlp=(128,), **_STACKED)
    config = WukongConfig(name="fp8_wukong", model=model, **_HALF)
    # They leave two thirds of the gap that those above do (wukong_rates_cpu.json).
    optim = dataclasses.replace(_OPTIM, lr=6e-3, rows_lr=1.0)
    return dataclasses.replace(config, optim=optim)


@register
def fp8_dhen() -> DhenConfig:
    """A small DHEN in FP8: a few minutes on two CPU cores."""
    model = Dhen(**_DHEN)
    return DhenConfig(name="fp8_dhen", model=model, **_HALF)


@register
def fp8_dhen_dlrm() -> DhenDlrmConfig:
    """A small mix of DHEN, DLRM and DCN V2 in FP8."""
    model = DhenDlrm(num_cross_layers=2, **_DHEN)
    return DhenDlrmConfig(name="fp8_dhen_dlrm", model=model, **_HALF)
