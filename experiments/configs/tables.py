"""Runs on the user's own click logs: `--data.path FILE_OR_FOLDER`."""

import dataclasses

from experiments.configs.generated import FP8
from experiments.configs.registry import register
from loka_jax.data import DataConfig
from loka_jax.models import Dcnv2, Dhen, Dlrm, Mmoe, Wukong
from loka_jax.optim import OptimConfig
from loka_jax.train.config import (
    Config,
    Dcnv2Config,
    DhenConfig,
    DlrmConfig,
    EmbeddingConfig,
    LoopConfig,
    MmoeConfig,
    WukongConfig,
)

# Frappe_x1 as in the BARS benchmark: Adam 1e-3 on everything, L2 on the whole tables,
# rates x 0.1 when the validation AUC stalls, at most two stalls, best state evaluated.
_FRAPPE_DATA = DataConfig(
    kind="table",
    label="label",
    categorical=(
        *("user", "item", "daytime", "weekday", "isweekend"),
        *("homework", "cost", "weather", "country", "city"),
    ),
)
_FRAPPE_LOOP = LoopConfig(batch_size=4096, epochs=100, log_every=10)
_FRAPPE_EMBEDDING = EmbeddingConfig(dim=10, init_stddev=1e-4)
# Wukong and DHEN: chosen by the validation AUC. Rates fall to 0, and the best
# state is evaluated. Products of embeddings of 1e-4 would vanish at first.
_FRAPPE_STACKED_EMBEDDING = EmbeddingConfig(dim=20, init_stddev=0.01)
_FRAPPE_STACKED_LOOP = LoopConfig(batch_size=1024, epochs=8, log_every=10)


def _frappe_optim(rows_l2: float) -> OptimConfig:
    return OptimConfig(
        lr=1e-3,
        rows="adam",
        rows_lr=1e-3,
        rows_l2=rows_l2,
        clip_norm=10.0,
        best_by="auc",
        plateau_patience=2,
    )


def _frappe_stacked_optim(rows_l2: float) -> OptimConfig:
    return dataclasses.replace(
        _frappe_optim(rows_l2), decay="linear", plateau_factor=1.0
    )


@register
def frappe_dlrm() -> DlrmConfig:
    """DLRM on Frappe_x1: BARS reports AUC 0.9840, log loss 0.1444 (one run)."""
    return DlrmConfig(
        name="frappe_dlrm",
        model=Dlrm(
            top_mlp=(400, 400, 400),
            interaction="cat",
            norm="batch",
            dropout_rate=0.4,
            recipe=FP8,
        ),
        data=_FRAPPE_DATA,
        embedding=_FRAPPE_EMBEDDING,
        optim=_frappe_optim(rows_l2=0.1),
        loop=_FRAPPE_LOOP,
    )


@register
def frappe_dcnv2() -> Dcnv2Config:
    """DCN V2 on Frappe_x1: BARS reports AUC 0.98382 +- 0.00043 over five runs."""
    return Dcnv2Config(
        name="frappe_dcnv2",
        model=Dcnv2(
            num_cross_layers=4,
            deep_mlp=(400, 400, 400),
            norm="batch",
            dropout_rate=0.4,
            recipe=FP8,
        ),
        data=_FRAPPE_DATA,
        embedding=_FRAPPE_EMBEDDING,
        optim=_frappe_optim(rows_l2=0.05),
        loop=_FRAPPE_LOOP,
    )


@register
def frappe_wukong() -> WukongConfig:
    """Wukong on Frappe_x1: its authors report AUC 0.9868 (one tuned run)."""
    return WukongConfig(
        name="frappe_wukong",
        model=Wukong(
            num_layers=1,
            fm_embeddings=8,
            lcb_embeddings=8,
            k=8,
            fmb_mlp=(128,),
            top_mlp=(256, 256),
            norm="batch",
            dropout_rate=0.4,
            recipe=FP8,
        ),
        data=_FRAPPE_DATA,
        embedding=_FRAPPE_STACKED_EMBEDDING,
        optim=_frappe_stacked_optim(rows_l2=0.2),
        loop=_FRAPPE_STACKED_LOOP,
    )


@register
def frappe_dhen() -> DhenConfig:
    """DHEN on Frappe_x1."""
    return DhenConfig(
        name="frappe_dhen",
        model=Dhen(
            num_layers=1,
            dot=8,
            cross=8,
            linear=8,
            dot_mlp=(128,),
            top_mlp=(256, 256),
            norm="batch",
            dropout_rate=0.4,
            recipe=FP8,
        ),
        data=_FRAPPE_DATA,
        embedding=_FRAPPE_STACKED_EMBEDDING,
        optim=_frappe_stacked_optim(rows_l2=0.3),
        loop=_FRAPPE_STACKED_LOOP,
    )


# For samples of some 10^4 rows of the Kaggle file, whose tables overfit quickly: chosen
# on a validation fifth of a training sample, then trained on nearly all of it.
# The whole file needs BARS' settings: --optim.rows-l2 0 --optim.rows rowwise_adagrad
# --loop.batch-size 4096 --loop.epochs 1 --top-mlp 400 400 400 --interaction dot.
_CRITEO_DATA = DataConfig(kind="criteo", min_count=2, valid_fraction=0.02)
_CRITEO_LOOP = LoopConfig(batch_size=128, epochs=9, log_every=10)
_CRITEO_EMBEDDING = EmbeddingConfig(dim=16, init_stddev=1e-4)
# Wukong and DHEN overfit from the seventh epoch on.
_CRITEO_STACKED_LOOP = dataclasses.replace(_CRITEO_LOOP, epochs=6)


@register
def criteo_dlrm() -> DlrmConfig:
    """DLRM on a sample of Criteo display ads, in the format of Kaggle 2014."""
    return DlrmConfig(
        name="criteo_dlrm",
        model=Dlrm(
            bottom_mlp=(128,),
            top_mlp=(128,),
            interaction="cat",
            activation="swish",
            dropout_rate=0.5,
            recipe=FP8,
        ),
        data=_CRITEO_DATA,
        embedding=_CRITEO_EMBEDDING,
        optim=OptimConfig(
            lr=8e-4, rows="adam", rows_lr=3e-3, rows_l2=0.01, decay="linear"
        ),
        loop=_CRITEO_LOOP,
    )


@register
def criteo_dcnv2() -> Dcnv2Config:
    """DCN V2 on a sample of Criteo display ads, in the format of Kaggle 2014."""
    return Dcnv2Config(
        name="criteo_dcnv2",
        model=Dcnv2(num_cross_layers=1, deep_mlp=(64, 64), recipe=FP8),
        data=_CRITEO_DATA,
        embedding=_CRITEO_EMBEDDING,
        optim=OptimConfig(
            lr=1.5e-3, rows="adam", rows_lr=6e-3, rows_l2=0.015, decay="linear"
        ),
        loop=_CRITEO_LOOP,
    )


@register
def criteo_wukong() -> WukongConfig:
    """Wukong on a sample of Criteo display ads, in the format of Kaggle 2014."""
    return WukongConfig(
        name="criteo_wukong",
        model=Wukong(
            bottom_mlp=(64,),
            dense_embeddings=6,
            num_layers=1,
            fm_embeddings=8,
            lcb_embeddings=8,
            k=8,
            fmb_mlp=(64,),
            top_mlp=(128,),
            norm="none",
            activation="swish",
            dropout_rate=0.5,
            layer_dropout_rate=0.4,
            recipe=FP8,
        ),
        data=_CRITEO_DATA,
        embedding=_CRITEO_EMBEDDING,
        optim=dataclasses.replace(criteo_dlrm().optim, lr=1.5e-3),
        loop=_CRITEO_STACKED_LOOP,
    )


@register
def criteo_dhen() -> DhenConfig:
    """DHEN on a sample of Criteo display ads, in the format of Kaggle 2014."""
    return DhenConfig(
        name="criteo_dhen",
        model=Dhen(
            bottom_mlp=(64,),
            dense_embeddings=6,
            num_layers=1,
            dot=8,
            cross=8,
            linear=8,
            dot_mlp=(64,),
            cross_rank=32,
            top_mlp=(128,),
            norm="none",
            activation="swish",
            dropout_rate=0.5,
            layer_dropout_rate=0.4,
            recipe=FP8,
        ),
        data=_CRITEO_DATA,
        embedding=_CRITEO_EMBEDDING,
        optim=criteo_dlrm().optim,
        loop=_CRITEO_STACKED_LOOP,
    )


@register
def csv_dlrm() -> DlrmConfig:
    """DLRM on any CSV or Parquet file.

    `--data.path FILE --data.label NAME --data.categorical A B C --data.dense X Y`
    """
    return DlrmConfig(
        name="csv_dlrm",
        model=Dlrm(bottom_mlp=(64,), top_mlp=(256, 128), recipe=FP8),
        data=DataConfig(kind="table"),
        optim=OptimConfig(
            lr=1e-3, rows="adam", rows_lr=1e-3, clip_norm=10.0, plateau_patience=2
        ),
        loop=LoopConfig(batch_size=1024, epochs=10, log_every=10),
    )


@register
def fp8_mmoe() -> MmoeConfig:
    """MMoE on several labels of any CSV or Parquet file.

    `--data.path FILE --data.labels click purchase --data.categorical A B C`, with
    `--num-tasks 3` for three labels; `--num-experts 1` makes it a shared bottom.
    """
    return MmoeConfig(
        name="fp8_mmoe",
        model=Mmoe(
            bottom_mlp=(64,), expert_mlp=(256, 128), tower_mlp=(64,), recipe=FP8
        ),
        data=DataConfig(kind="table"),
        optim=csv_dlrm().optim,
        loop=csv_dlrm().loop,
    )


def _tiny[C: Config](config: C, name: str, model) -> C:
    loop = LoopConfig(batch_size=128, max_steps=8, log_every=2)
    return dataclasses.replace(config, name=name, model=model, loop=loop)


@register
def frappe_dlrm_tiny() -> DlrmConfig:
    """`frappe_dlrm` for tests."""
    model = frappe_dlrm().model.clone(top_mlp=(32, 16))
    return _tiny(frappe_dlrm(), "frappe_dlrm_tiny", model)


@register
def criteo_dlrm_tiny() -> DlrmConfig:
    """`criteo_dlrm` for tests."""
    model = criteo_dlrm().model.clone(bottom_mlp=(32,), top_mlp=(32, 16))
    return _tiny(criteo_dlrm(), "criteo_dlrm_tiny", model)


@register
def frappe_dcnv2_tiny() -> Dcnv2Config:
    """`frappe_dcnv2` for tests."""
    model = frappe_dcnv2().model.clone(num_cross_layers=1, deep_mlp=(32, 16))
    return _tiny(frappe_dcnv2(), "frappe_dcnv2_tiny", model)


@register
def criteo_dcnv2_tiny() -> Dcnv2Config:
    """`criteo_dcnv2` for tests."""
    model = criteo_dcnv2().model.clone(deep_mlp=(32, 16))
    return _tiny(criteo_dcnv2(), "criteo_dcnv2_tiny", model)


@register
def frappe_wukong_tiny() -> WukongConfig:
    """`frappe_wukong` for tests."""
    model = frappe_wukong().model.clone(num_layers=1, fmb_mlp=(16,), top_mlp=(16,))
    return _tiny(frappe_wukong(), "frappe_wukong_tiny", model)


@register
def criteo_wukong_tiny() -> WukongConfig:
    """`criteo_wukong` for tests."""
    model = criteo_wukong().model.clone(fmb_mlp=(16,), top_mlp=(16,))
    return _tiny(criteo_wukong(), "criteo_wukong_tiny", model)


@register
def frappe_dhen_tiny() -> DhenConfig:
    """`frappe_dhen` for tests."""
    model = frappe_dhen().model.clone(num_layers=1, dot_mlp=(16,), top_mlp=(16,))
    return _tiny(frappe_dhen(), "frappe_dhen_tiny", model)


@register
def criteo_dhen_tiny() -> DhenConfig:
    """`criteo_dhen` for tests."""
    model = criteo_dhen().model.clone(dot_mlp=(16,), top_mlp=(16,))
    return _tiny(criteo_dhen(), "criteo_dhen_tiny", model)


@register
def csv_dlrm_tiny() -> DlrmConfig:
    """`csv_dlrm` for tests."""
    model = csv_dlrm().model.clone(bottom_mlp=(32,), top_mlp=(32, 16))
    return _tiny(csv_dlrm(), "csv_dlrm_tiny", model)


@register
def fp8_mmoe_tiny() -> MmoeConfig:
    """`fp8_mmoe` for tests."""
    model = fp8_mmoe().model.clone(
        bottom_mlp=(32,), num_experts=2, expert_mlp=(32, 16), tower_mlp=(16,)
    )
    return _tiny(fp8_mmoe(), "fp8_mmoe_tiny", model)
