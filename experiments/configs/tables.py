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
from loka_jax.train.settings import table_config

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
_FRAPPE_OPTIM = OptimConfig(
    lr=1e-3,
    rows="adam",
    rows_lr=1e-3,
    clip_norm=10.0,
    best_by="auc",
    plateau_patience=2,
)


def _frappe[C: Config](config: C, rows_l2: float) -> C:
    """Returns a run of a model on Frappe_x1, with this L2 on its tables."""
    return dataclasses.replace(
        config,
        data=_FRAPPE_DATA,
        embedding=EmbeddingConfig(dim=10, init_stddev=1e-4),
        optim=dataclasses.replace(_FRAPPE_OPTIM, rows_l2=rows_l2),
        loop=LoopConfig(batch_size=4096, epochs=100, log_every=10),
    )


def _frappe_stacked[C: Config](config: C, rows_l2: float) -> C:
    """Returns the same of a Wukong or DHEN: chosen by the validation AUC.

    Rates fall to 0, and the best state is evaluated. Products of embeddings of 1e-4
    would vanish at first.
    """
    config = _frappe(config, rows_l2)
    optim = dataclasses.replace(config.optim, decay="linear", plateau_factor=1.0)
    return dataclasses.replace(
        config,
        embedding=EmbeddingConfig(dim=20, init_stddev=0.01),
        optim=optim,
        loop=LoopConfig(batch_size=1024, epochs=8, log_every=10),
    )


@register
def frappe_dlrm() -> DlrmConfig:
    """DLRM on Frappe_x1: BARS reports AUC 0.9840, log loss 0.1444 (one run)."""
    model = Dlrm(
        top_mlp=(400, 400, 400),
        interaction="cat",
        norm="batch",
        dropout_rate=0.4,
        recipe=FP8,
    )
    return _frappe(DlrmConfig(name="frappe_dlrm", model=model), rows_l2=0.1)


@register
def frappe_dcnv2() -> Dcnv2Config:
    """DCN V2 on Frappe_x1: BARS reports AUC 0.98382 +- 0.00043 over five runs."""
    model = Dcnv2(
        num_cross_layers=4,
        deep_mlp=(400, 400, 400),
        norm="batch",
        dropout_rate=0.4,
        recipe=FP8,
    )
    return _frappe(Dcnv2Config(name="frappe_dcnv2", model=model), rows_l2=0.05)


@register
def frappe_wukong() -> WukongConfig:
    """Wukong on Frappe_x1: its authors report AUC 0.9868 (one tuned run)."""
    model = Wukong(
        num_layers=1,
        fm_embeddings=8,
        lcb_embeddings=8,
        k=8,
        fmb_mlp=(128,),
        top_mlp=(256, 256),
        norm="batch",
        dropout_rate=0.4,
        recipe=FP8,
    )
    config = WukongConfig(name="frappe_wukong", model=model)
    return _frappe_stacked(config, rows_l2=0.2)


@register
def frappe_dhen() -> DhenConfig:
    """DHEN on Frappe_x1."""
    model = Dhen(
        num_layers=1,
        dot=8,
        cross=8,
        linear=8,
        dot_mlp=(128,),
        top_mlp=(256, 256),
        norm="batch",
        dropout_rate=0.4,
        recipe=FP8,
    )
    return _frappe_stacked(DhenConfig(name="frappe_dhen", model=model), rows_l2=0.3)


def _criteo[C: Config](config: C, epochs: int, **rates: float) -> C:
    """Returns a run on Criteo display ads, with rates of the weights and the tables.

    For samples of some 10^4 rows of the Kaggle file, whose tables overfit quickly:
    chosen on a validation fifth of a training sample, then trained on nearly all of it.
    The whole file needs BARS' settings: --optim.rows-l2 0 --optim.rows rowwise_adagrad
    --loop.batch-size 4096 --loop.epochs 1 --top-mlp 400 400 400 --interaction dot.
    """
    optim = OptimConfig(rows="adam", rows_lr=3e-3, rows_l2=0.01, decay="linear")
    return dataclasses.replace(
        config,
        data=DataConfig(kind="criteo", min_count=2, valid_fraction=0.02),
        embedding=EmbeddingConfig(dim=16, init_stddev=1e-4),
        optim=dataclasses.replace(optim, **rates),
        loop=LoopConfig(batch_size=128, epochs=epochs, log_every=10),
    )


@register
def criteo_dlrm() -> DlrmConfig:
    """DLRM on a sample of Criteo display ads, in the format of Kaggle 2014."""
    model = Dlrm(
        bottom_mlp=(128,),
        top_mlp=(128,),
        interaction="cat",
        activation="swish",
        dropout_rate=0.5,
        recipe=FP8,
    )
    return _criteo(DlrmConfig(name="criteo_dlrm", model=model), epochs=9, lr=8e-4)


@register
def criteo_dcnv2() -> Dcnv2Config:
    """DCN V2 on a sample of Criteo display ads, in the format of Kaggle 2014."""
    model = Dcnv2(num_cross_layers=1, deep_mlp=(64, 64), recipe=FP8)
    config = Dcnv2Config(name="criteo_dcnv2", model=model)
    return _criteo(config, epochs=9, lr=1.5e-3, rows_lr=6e-3, rows_l2=0.015)


# Wukong and DHEN overfit from the seventh epoch on.


@register
def criteo_wukong() -> WukongConfig:
    """Wukong on a sample of Criteo display ads, in the format of Kaggle 2014."""
    model = Wukong(
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
    )
    config = WukongConfig(name="criteo_wukong", model=model)
    return _criteo(config, epochs=6, lr=1.5e-3)


@register
def criteo_dhen() -> DhenConfig:
    """DHEN on a sample of Criteo display ads, in the format of Kaggle 2014."""
    model = Dhen(
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
    )
    return _criteo(DhenConfig(name="criteo_dhen", model=model), epochs=6, lr=8e-4)


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


# `--config table --model NAME`; `loka_jax.train.settings` chooses the rest by the data.


@register
def table_dlrm() -> Config:
    """DLRM on a table of your own, columns and settings by the data."""
    return table_config("dlrm")


@register
def table_dcnv2() -> Config:
    """DCN V2 on a table of your own, columns and settings by the data."""
    return table_config("dcnv2")


@register
def table_wukong() -> Config:
    """Wukong on a table of your own, columns and settings by the data."""
    return table_config("wukong")


@register
def table_dhen() -> Config:
    """DHEN on a table of your own, columns and settings by the data."""
    return table_config("dhen")


@register
def table_mmoe() -> Config:
    """MMoE on a table of your own, a task for each of `--data.labels`."""
    return table_config("mmoe")
