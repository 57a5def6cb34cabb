"""Settings of a run on a table of one's own, by its rows, labels and values."""

import dataclasses
import math
from collections.abc import Callable

from loka_jax.data import open_data
from loka_jax.data.infer import infer_columns
from loka_jax.data.open import shards_of
from loka_jax.models import Mmoe
from loka_jax.optim import OptimConfig
from loka_jax.train.config import Config, LoopConfig

_FEW_ROWS = 10_000  # of which a fifth validates: a tenth says too little
_STEPS = 200  # of an epoch, at least, where batches have more than 64 rows
_BATCHES = 64, 8192  # the smallest and the largest
_MANY_ROWS = 1_000_000  # of training, of which few epochs are enough
_HUGE_TABLES = 1_000_000  # rows, all of which L2 would update in each step
_L2 = 10.0  # of all rows together, as of a regression
_EVALUATIONS = 4  # an epoch


def settings_for(config: Config, say: Callable[[str], None]) -> Config:
    """Returns a configuration with the settings that its data ask for.

    Columns without an option are inferred, and said. Validation takes a fifth of few
    rows. Then by the training rows n and the rows R of all tables:

        batch    the power of two below n / 200, 64 to 8192
        rates    3e-4 for few rows, 1e-3 for a million
        tables   Adam with an L2 of 10 / n; row-wise AdaGrad where R is a million
        epochs   20 or, for a million rows, 4; ends when NE no longer improves, and is
                 evaluated four times an epoch

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
    model = config.model
    if isinstance(model, Mmoe):
        model = model.clone(num_tasks=len(schema.labels))
    rows = {"rows": "rowwise_adagrad", "rows_lr": 0.01, "rows_l2": 0.0}
    if not is_huge:
        rate = 1e-3 if is_many else 3e-4
        rows = {"rows": "adam", "rows_lr": rate, "rows_l2": _L2 / n}
    return dataclasses.replace(
        config,
        model=model,
        data=data,
        optim=OptimConfig(
            lr=1e-3 if is_many else 3e-4,
            clip_norm=10.0,
            plateau_patience=_EVALUATIONS,
            plateau_factor=0.5,
            **rows,
        ),
        loop=LoopConfig(
            batch_size=size,
            epochs=4 if is_many else 20,
            eval_every=max(1, steps // _EVALUATIONS),
            log_every=max(10, steps // _EVALUATIONS),
        ),
    )
