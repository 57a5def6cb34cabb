"""Models at their published sizes, on generated click logs: for a GPU.

Each embedding of d values: a table's row holds e d of them, so that 26 fields and the
dense features' embeddings make n.
"""

from experiments.configs.generated import FP8
from experiments.configs.registry import register
from loka_jax.data import DataConfig
from loka_jax.models import Dcnv2, Dhen, Wukong
from loka_jax.optim import OptimConfig
from loka_jax.train.config import (
    Dcnv2Config,
    DhenConfig,
    EmbeddingConfig,
    LoopConfig,
    WukongConfig,
)

_DATA = DataConfig(examples=50_331_648)
# Wide cross layers can explode (Wukong, arXiv 2403.02545, section 5.2): gradients are
# clipped.
_OPTIM = OptimConfig(
    lr=1e-3, rows_lr=0.3, clip_norm=10.0, warmup_steps=256, decay="linear"
)
_STDDEV = 0.05
_TOP_MLP = (2048, 1024)


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
        embedding=EmbeddingConfig(dim=128, init_stddev=_STDDEV),
        optim=_OPTIM,
        loop=LoopConfig(batch_size=65536, eval_every=256),
    )


@register
def fp8_wukong_m() -> WukongConfig:
    """Wukong of 0.6 GFLOP an example in FP8: 103 M dense parameters, for a GPU."""
    model = Wukong(
        dense_embeddings=12,
        embeddings_per_field=2,  # n = 64
        num_layers=4,
        fm_embeddings=32,
        lcb_embeddings=32,
        k=32,
        fmb_mlp=(2048, 2048, 2048),
        top_mlp=_TOP_MLP,
        recipe=FP8,
    )
    return _wukong("fp8_wukong_m", model, dim=2 * 128, batch_size=16384)


@register
def fp8_wukong_l() -> WukongConfig:
    """Wukong of 4 GFLOP an example in FP8: 705 M dense parameters, for a GPU."""
    model = Wukong(
        dense_embeddings=18,
        embeddings_per_field=3,  # n = 96
        num_layers=8,
        fm_embeddings=48,
        lcb_embeddings=48,
        k=48,
        fmb_mlp=(4096, 4096, 4096),
        top_mlp=_TOP_MLP,
        recipe=FP8,
    )
    return _wukong("fp8_wukong_l", model, dim=3 * 160, batch_size=16384)


@register
def fp8_wukong_xl() -> WukongConfig:
    """Wukong of 20 GFLOP an example in FP8: 3.4 G dense parameters, for a GPU."""
    model = Wukong(
        dense_embeddings=10,
        embeddings_per_field=7,  # n = 192
        num_layers=8,
        fm_embeddings=96,
        lcb_embeddings=96,
        k=96,
        fmb_mlp=(8192, 8192, 8192),
        top_mlp=_TOP_MLP,
        recipe=FP8,
    )
    return _wukong("fp8_wukong_xl", model, dim=7 * 160, batch_size=4096)


def _wukong(name: str, model: Wukong, *, dim: int, batch_size: int) -> WukongConfig:
    return WukongConfig(
        name=name,
        model=model,
        data=_DATA,
        embedding=EmbeddingConfig(dim=dim, init_stddev=_STDDEV),
        optim=_OPTIM,
        loop=LoopConfig(batch_size=batch_size, eval_every=512),
    )


@register
def fp8_dhen_m() -> DhenConfig:
    """DHEN of 0.35 GFLOP an example in FP8: 56 M dense parameters, for a GPU."""
    return _dhen("fp8_dhen_m", dot_width=2048, cross_rank=512, dim=2 * 64)


@register
def fp8_dhen_l() -> DhenConfig:
    """DHEN of 2.2 GFLOP an example in FP8: 370 M dense parameters, for a GPU."""
    return _dhen("fp8_dhen_l", dot_width=4096, cross_rank=None, dim=2 * 128)


def _dhen(name: str, *, dot_width: int, cross_rank: int | None, dim: int) -> DhenConfig:
    return DhenConfig(
        name=name,
        model=Dhen(
            dense_embeddings=12,
            embeddings_per_field=2,  # n = 64
            num_layers=4,
            dot=24,
            cross=24,
            linear=16,
            dot_mlp=(dot_width,),
            cross_rank=cross_rank,
            top_mlp=_TOP_MLP,
            recipe=FP8,
        ),
        data=_DATA,
        embedding=EmbeddingConfig(dim=dim, init_stddev=_STDDEV),
        optim=_OPTIM,
        loop=LoopConfig(batch_size=16384, eval_every=512),
    )
