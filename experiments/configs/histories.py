"""Runs on event logs: what users did before an event, in order."""

import dataclasses
from typing import Any

from experiments.configs.generated import FP8
from experiments.configs.registry import register
from loka_jax.data import DataConfig
from loka_jax.models import Hstu, InterFormer, OneTrans
from loka_jax.optim import OptimConfig
from loka_jax.train.config import (
    Config,
    EmbeddingConfig,
    HstuConfig,
    InterFormerConfig,
    LoopConfig,
    OneTransConfig,
)


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
            rows=(9, 301),
            history=64,
            targets="all",
        ),
        embedding=EmbeddingConfig(dim=32, init_stddev=0.05),
        optim=OptimConfig(lr=4e-3, rows_lr=0.3, warmup_steps=64, decay="linear"),
        loop=LoopConfig(batch_size=64, eval_every=133),
    )


def _sized[C: Config](small: C, name: str, model: Any, batch_size: int = 64) -> C:
    """Returns a run of a size for a GPU, whose sequences are as long as they may be."""
    history = model.max_length - 2  # beside the sample and the event to predict
    return dataclasses.replace(
        small,
        name=name,
        model=model,
        data=dataclasses.replace(small.data, history=history, targets="last"),
        embedding=EmbeddingConfig(dim=model.dim, init_stddev=0.05),
        optim=OptimConfig(
            lr=1e-3, rows_lr=0.1, warmup_steps=1000, decay="linear", clip_norm=1.0
        ),
        loop=dataclasses.replace(small.loop, batch_size=batch_size),
    )


def _hstu(name: str, layers: int, dim: int, heads: int, length: int) -> HstuConfig:
    small = fp8_hstu()
    model = small.model.clone(
        dim=dim,
        num_layers=layers,
        num_heads=heads,
        qk_dim=dim // heads,
        v_dim=dim // heads,
        item_mlp=(dim,),
        head_mlp=(dim,),
        max_length=length,
        age_buckets=2048,
        input_dropout_rate=0.2,
        layer_dropout_rate=0.1,
    )
    return _sized(small, name, model)


@register
def fp8_hstu_s() -> HstuConfig:
    """HSTU S in FP8, for a GPU: 3 layers of 256, sequences of 512."""
    return _hstu("fp8_hstu_s", layers=3, dim=256, heads=4, length=512)


@register
def fp8_hstu_m() -> HstuConfig:
    """HSTU M in FP8, MLPerf's dense part: 3 layers of 512, sequences of 4,096."""
    return _hstu("fp8_hstu_m", layers=3, dim=512, heads=4, length=4096)


@register
def fp8_hstu_l() -> HstuConfig:
    """HSTU L in FP8: 8 layers of 1,024, sequences of 4,096."""
    return _hstu("fp8_hstu_l", layers=8, dim=1024, heads=4, length=4096)


@register
def fp8_onetrans() -> OneTransConfig:
    """A small OneTrans in FP8 on a generated event log: minutes on two CPU cores."""
    small = fp8_hstu()
    return OneTransConfig(
        name="fp8_onetrans",
        model=OneTrans(
            dim=32,
            num_layers=2,
            num_heads=2,
            num_tokens=2,
            ffn_factor=2,
            item_mlp=(),
            head_mlp=(64,),
            max_length=34,
            age_buckets=256,
            recipe=FP8,
        ),
        data=dataclasses.replace(
            small.data, examples=250_000, eval_examples=32_768, history=16
        ),
        embedding=small.embedding,
        optim=small.optim,
        loop=LoopConfig(batch_size=128, eval_every=131),
    )


@register
def fp8_interformer() -> InterFormerConfig:
    """A small InterFormer in FP8 on a generated event log: minutes on two CPU cores."""
    small = fp8_hstu()
    return InterFormerConfig(
        name="fp8_interformer",
        model=InterFormer(
            dim=32,
            num_layers=1,
            num_heads=2,
            num_embeddings=4,
            num_sums=2,
            num_cls=2,
            num_seeds=1,
            num_recent=2,
            item_mlp=(),
            dot_mlp=(64,),
            cross_rank=32,
            head_mlp=(64,),
            max_length=18,
            age_buckets=256,
            recipe=FP8,
        ),
        data=dataclasses.replace(
            small.data,
            examples=98_304,
            eval_examples=32_768,
            history=16,
            targets="last",
        ),
        embedding=small.embedding,
        optim=dataclasses.replace(small.optim, lr=6e-3),
        loop=LoopConfig(batch_size=256, eval_every=192),
    )


def _onetrans(name: str, batch_size: int, **sizes: Any) -> OneTransConfig:
    small = fp8_onetrans()
    dim = sizes["dim"]
    model = small.model.clone(
        ffn_factor=4, item_mlp=(dim,), head_mlp=(dim,), age_buckets=2048, **sizes
    )
    return _sized(small, name, model, batch_size)


@register
def fp8_onetrans_m() -> OneTransConfig:
    """OneTrans_S of its paper in FP8, for a GPU: 6 layers of 256, 1,190 events."""
    return _onetrans(
        "fp8_onetrans_m",
        batch_size=256,
        dim=256,
        num_layers=6,
        num_heads=4,
        num_tokens=12,
        max_length=1192,
        pyramid=(1184, 960, 704, 480, 256),
    )


@register
def fp8_onetrans_l() -> OneTransConfig:
    """OneTrans_L of its paper in FP8, for a GPU: 8 layers of 384, 1,500 events."""
    return _onetrans(
        "fp8_onetrans_l",
        batch_size=128,
        dim=384,
        num_layers=8,
        num_heads=3,
        num_tokens=16,
        max_length=1502,
        pyramid=(1500, 1280, 1088, 864, 640, 448, 224),
    )


def _interformer(name: str, **sizes: Any) -> InterFormerConfig:
    small = fp8_interformer()
    model = small.model.clone(
        num_cls=4,
        num_seeds=2,
        num_recent=2,
        item_mlp=(sizes["dim"],),
        cross_rank=512,
        head_mlp=(1024, 512, 256, 128),
        age_buckets=2048,
        **sizes,
    )
    return _sized(small, name, model, batch_size=4096)


@register
def fp8_interformer_m() -> InterFormerConfig:
    """InterFormer M in FP8, for a GPU: 2 layers of 128, 124 events."""
    return _interformer(
        "fp8_interformer_m",
        dim=128,
        num_layers=2,
        num_heads=1,
        num_embeddings=32,
        num_sums=4,
        dot_mlp=(1024,),
        max_length=126,
    )


@register
def fp8_interformer_l() -> InterFormerConfig:
    """InterFormer L in FP8, for a GPU: 3 layers of 256, 252 events."""
    return _interformer(
        "fp8_interformer_l",
        dim=256,
        num_layers=3,
        num_heads=2,
        num_embeddings=64,
        num_sums=8,
        dot_mlp=(2048,),
        max_length=254,
    )


def _assistments(
    name: str,
    categorical: tuple[str, ...],
    history: int,
    *,
    layers: int,
    dim: int,
    lr: float,
    rows_lr: float,
    epochs: int,
) -> HstuConfig:
    """Returns a run on answers of pupils: each is predicted by all before it."""
    small = fp8_hstu()
    return HstuConfig(
        name=name,
        model=small.model.clone(
            num_layers=layers,
            max_length=2 * history,
            age_unit=1.0,  # an age is a number of answers
            dropout_rate=0.1,
            input_dropout_rate=0.1,
        ),
        data=DataConfig(
            kind="table",
            label="correct",
            categorical=categorical,
            user="user",
            time="position",
            history=history,
            targets="all",
        ),
        embedding=dataclasses.replace(small.embedding, dim=dim),
        optim=OptimConfig(
            lr=lr,
            rows="adam",
            rows_lr=rows_lr,
            clip_norm=1.0,
            warmup_steps=64,
            decay="linear",
            best_by="auc",
            plateau_patience=10,
            plateau_factor=1.0,
        ),
        loop=LoopConfig(batch_size=64, epochs=epochs, log_every=16),
    )


@register
def assistments_2015() -> HstuConfig:
    """HSTU on ASSISTments 2015, short histories: AKT has AUC 0.7281, SAKT 0.7114."""
    return _assistments(
        "assistments_2015",
        ("skill",),
        history=64,
        layers=2,
        dim=64,
        lr=6e-3,
        rows_lr=2e-2,
        epochs=10,
    )


@register
def assistments_2017() -> HstuConfig:
    """HSTU on ASSISTments 2017, long histories: DKT has AUC 0.7263, AKT 0.7702.

    At these rates its loss, level after three epochs, falls again between the sixth and
    the tenth; at three times as high ones it does not.
    """
    return _assistments(
        "assistments_2017",
        ("item", "skill"),
        history=128,
        layers=4,
        dim=16,
        lr=2e-3,
        rows_lr=2e-3,
        epochs=20,
    )
