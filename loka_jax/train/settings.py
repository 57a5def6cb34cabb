"""Settings of a run on a table of one's own, by its rows, labels and values."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from loka_jax.data import DataConfig, open_data
from loka_jax.data.infer import infer_columns
from loka_jax.data.open import shards_of
from loka_jax.models import Dcnv2, Dhen, Dlrm, Mmoe, OwnModel, Wukong, own_model
from loka_jax.optim import OptimConfig
from loka_jax.train.config import (
    Config,
    Dcnv2Config,
    DhenConfig,
    DlrmConfig,
    EmbeddingConfig,
    LoopConfig,
    MmoeConfig,
    OwnConfig,
    WukongConfig,
)

_FEW_ROWS = 10_000  # of which a fifth validates: a tenth says too little
_STEPS = 200  # of an epoch, at least, where batches have more than 64 rows
_BATCHES = 64, 8192  # the smallest and the largest
_MANY_ROWS = 1_000_000  # of training, of which few epochs are enough
_HUGE_TABLES = 1_000_000  # rows, all of which L2 would update in each step
_L2 = 20.0  # of all rows together
_EVALUATIONS = 4  # an epoch


# The recipe that adds the fewest kernels where XLA runs all sites.
_OPTIONS = {
    "first_order": True,
    "dropout_rate": 0.3,
    "recipe": "fp8_tensorwise_delayed_bf16_drhs",
}
_STACKED = _OPTIONS | {
    "bottom_mlp": (64,),
    "dense_embeddings": 4,
    "num_layers": 1,
    "top_mlp": (128,),
}


def table_config(model: Any = "dlrm") -> Config:
    """Returns the configuration of a table of one's own, without what follows from it.

    Args:
        model: `dlrm`, `dcnv2`, `wukong`, `dhen` or `mmoe`; or one of a user's own, see
            `own_model`.

    Raises:
        ValueError: one sentence for what is none of these.
    """
    configs = {
        "dlrm": lambda **rest: DlrmConfig(
            model=Dlrm(bottom_mlp=(64,), top_mlp=(128,), interaction="cat", **_OPTIONS),
            **rest,
        ),
        "dcnv2": lambda **rest: Dcnv2Config(
            model=Dcnv2(num_cross_layers=2, deep_mlp=(128,), **_OPTIONS), **rest
        ),
        "wukong": lambda **rest: WukongConfig(
            model=Wukong(
                fm_embeddings=8, lcb_embeddings=8, k=8, fmb_mlp=(64,), **_STACKED
            ),
            **rest,
        ),
        "dhen": lambda **rest: DhenConfig(
            model=Dhen(
                dot=8, cross=8, linear=8, dot_mlp=(64,), cross_rank=32, **_STACKED
            ),
            **rest,
        ),
        "mmoe": lambda **rest: MmoeConfig(
            model=Mmoe(
                bottom_mlp=(64,), expert_mlp=(128,), tower_mlp=(64,), **_OPTIONS
            ),
            **rest,
        ),
    }
    if not isinstance(model, str) or ":" in model:
        own = own_model(model, recipe=_OPTIONS["recipe"])
        make: Any = functools.partial(OwnConfig, model=own)
        model = "own"
    elif model in configs:
        make = configs[model]
    else:
        raise ValueError(
            f"the model {model!r} must be one of {', '.join(configs)}, or module:Name "
            "of your own."
        )
    return make(
        name=f"table_{model}",
        data=DataConfig(kind="table"),
        embedding=EmbeddingConfig(dim=16, init_stddev=0.05),
    )


def settings_for(config: Config, say: Callable[[str], None]) -> Config:
    """Returns a configuration with the settings that its data ask for.

    Columns without an option are inferred, and crosses chosen, and said. Validation
    takes a fifth of few rows. Then by the training rows n and the rows R of all tables:

        batch    the power of two below n / 200, 64 to 8192
        tables   Adam with an L2 of 20 / n; row-wise AdaGrad where R is a million
        epochs   20 or, for a million rows, 4, each with four evaluations; ends when NE
                 has not improved for three

    Raises:
        ValueError: one sentence with the file, column or option, and the remedy.
    """
    data = config.data
    if shards_of(data) is None:
        inferred = infer_columns(data)
        data = inferred.config
        for line in inferred.notes:
            say(line)
    splits = open_data(data, seed=config.seed)
    is_few = splits.train.num_examples < _FEW_ROWS
    if is_few and data.valid is None and splits.folder is not None:
        data = dataclasses.replace(data, valid_fraction=0.2)
        splits = open_data(data, seed=config.seed)
    schema, n = splits.train.schema, splits.train.num_examples
    size = 2 ** int(math.log2(max(n / _STEPS, 1)))
    size = max(_BATCHES[0], min(size, _BATCHES[1]))
    steps = splits.train.num_batches(size)
    is_many, is_huge = n >= _MANY_ROWS, sum(schema.vocab_sizes) >= _HUGE_TABLES
    embedding = config.embedding
    if not embedding.crosses:
        from loka_jax.train.cross_choice import choose_crosses  # which needs SciPy

        crosses = choose_crosses(splits, say)
        embedding = dataclasses.replace(embedding, crosses=crosses)
    model = config.model
    if isinstance(model, Mmoe | OwnModel):
        model = model.clone(num_tasks=len(schema.labels))
    rows = {"rows": "rowwise_adagrad", "rows_lr": 0.01, "rows_l2": 0.0}
    if not is_huge:
        rows = {"rows": "adam", "rows_lr": 1e-3, "rows_l2": _L2 / n}
    return dataclasses.replace(
        config,
        model=model,
        data=data,
        embedding=embedding,
        optim=OptimConfig(
            lr=1e-3,
            clip_norm=10.0,
            plateau_patience=3 * _EVALUATIONS,
            plateau_factor=1.0,
            **rows,
        ),
        loop=LoopConfig(
            batch_size=size,
            epochs=4 if is_many else 20,
            eval_every=max(1, steps // _EVALUATIONS),
            log_every=max(10, steps // _EVALUATIONS),
        ),
    )
