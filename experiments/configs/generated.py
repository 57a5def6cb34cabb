"""Runs on generated click logs: nothing to download, the best possible NE is known."""

import dataclasses

from experiments.configs.registry import register
from loka_jax.data import DataConfig
from loka_jax.models import Dcnv2, Dlrm
from loka_jax.optim import OptimConfig
from loka_jax.train.config import (
    Dcnv2Config,
    DlrmConfig,
    EmbeddingConfig,
    LoopConfig,
)

# The recipe that adds the fewest kernels where XLA runs all sites.
FP8 = "fp8_tensorwise_delayed_bf16_drhs"

_DATA = DataConfig(examples=6_291_456)
_OPTIM = OptimConfig(lr=2e-3, rows_lr=0.3, warmup_steps=64, decay="linear")
_EMBEDDING = EmbeddingConfig(dim=16, init_stddev=0.05)
_LOOP = LoopConfig(batch_size=4096, eval_every=256)


@register
def fp8_dlrm() -> DlrmConfig:
    """A small DLRM in FP8: about two minutes on two CPU cores."""
    return DlrmConfig(
        name="fp8_dlrm",
        model=Dlrm(bottom_mlp=(64,), top_mlp=(256, 128), recipe=FP8),
        data=_DATA,
        embedding=_EMBEDDING,
        optim=_OPTIM,
        loop=_LOOP,
    )


@register
def bf16_dlrm() -> DlrmConfig:
    """The same DLRM in bfloat16, the baseline of `fp8_dlrm`."""
    return dataclasses.replace(
        fp8_dlrm(), name="bf16_dlrm", model=fp8_dlrm().model.clone(recipe="bf16")
    )


@register
def fp8_dcnv2() -> Dcnv2Config:
    """A small DCN V2 in FP8."""
    return Dcnv2Config(
        name="fp8_dcnv2",
        model=Dcnv2(num_cross_layers=2, deep_mlp=(256, 128), recipe=FP8),
        data=_DATA,
        embedding=_EMBEDDING,
        optim=_OPTIM,
        loop=_LOOP,
    )


_TINY_DATA = DataConfig(
    examples=2048,
    eval_examples=512,
    rows=(50, 20, 10, 5, 4, 3, 30, 40, 8, 9, 10, 11, 12),
)
_TINY_OPTIM = dataclasses.replace(_OPTIM, warmup_steps=0)
_TINY_LOOP = LoopConfig(batch_size=128, eval_every=8, log_every=2)


@register
def fp8_dlrm_tiny() -> DlrmConfig:
    """`fp8_dlrm` for tests: seconds on a CPU."""
    return DlrmConfig(
        name="fp8_dlrm_tiny",
        model=Dlrm(bottom_mlp=(32,), top_mlp=(32, 16), recipe=FP8),
        data=_TINY_DATA,
        optim=_TINY_OPTIM,
        loop=_TINY_LOOP,
    )


@register
def bf16_dlrm_tiny() -> DlrmConfig:
    """`bf16_dlrm` for tests."""
    return dataclasses.replace(
        fp8_dlrm_tiny(),
        name="bf16_dlrm_tiny",
        model=fp8_dlrm_tiny().model.clone(recipe="bf16"),
    )


@register
def fp8_dcnv2_tiny() -> Dcnv2Config:
    """`fp8_dcnv2` for tests."""
    return Dcnv2Config(
        name="fp8_dcnv2_tiny",
        model=Dcnv2(num_cross_layers=1, deep_mlp=(32, 16), recipe=FP8),
        data=_TINY_DATA,
        optim=_TINY_OPTIM,
        loop=_TINY_LOOP,
    )


@register
def fp8_mlperf_dcnv2_tiny() -> Dcnv2Config:
    """`fp8_mlperf_dcnv2` for tests: its parts in small."""
    return Dcnv2Config(
        name="fp8_mlperf_dcnv2_tiny",
        model=Dcnv2(
            bottom_mlp=(32,),
            num_cross_layers=2,
            cross_rank=32,
            deep_mlp=(32, 16),
            structure="stacked",
            recipe=FP8,
        ),
        data=_TINY_DATA,
        optim=_TINY_OPTIM,
        loop=_TINY_LOOP,
    )
