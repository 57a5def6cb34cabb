"""The options of all optimizers and schedules: `--optim.lr 3e-4`; what they build."""

from dataclasses import dataclass
from typing import Literal

import optax

from loka_jax.ops.embedding import RowOptimizer
from loka_jax.optim.clip import clip_by_global_norm
from loka_jax.optim.rows import Adam, LaggedRowwiseAdagrad, RowwiseAdagrad, Sgd


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """How parameters and embedding rows are updated.

    Attributes:
        dense: optimizer of the dense parameters.
        lr: its learning rate.
        clip_norm: largest global norm of the dense gradients; None for no limit.
        rows: optimizer of the embedding rows.
        rows_lr: its learning rate.
        rows_l2: weight l of `l / 2 ||table||^2` in the loss. If positive, every row is
            updated every step, at a cost that grows with the tables.
        rows_c: c of `rowwise_adagrad`, which divides its sums of squares by c in each
            step; None for the number of groups that update their rows alone
            (`--mesh.sync weights`), and 1 without.
        rows_lagged: `rowwise_adagrad` divides by the sums of squares before the step,
            or by the square of a gradient that is larger.
        warmup_steps: steps over which both rates grow linearly from 0.
        decay: both rates after the warm-up: constant, or falling to 0 at the last step.
        best_by: measure of an evaluation by which it is the best so far, or a stall.
            AUC ignores how far off the predictions are: while it still grows, the log
            loss may be long past its best.
        loss: "module:function" of a loss of your own, see
            `loka_jax.train.own_functions`; None for the log loss. With one, its log
            loss does not tell that a run diverges.
        tweo: weight of TWEO's term in the loss, which keeps outputs of the model's
            blocks small: the mean of `(|A| / 3)^4`, see `loka_jax.nn.block_outputs`;
            the paper's is 0.01. 0 for none.
        task_weights: weights of the tasks' losses in their sum, in the order of
            `--data.labels`; 1 for each if empty.
        best_task: the task whose measure that is; None for the mean over all tasks.
        plateau_factor: factor on both rates whenever that measure stalls.
        plateau_patience: stalls in a row after which training stops, and the best
            state is taken; None turns off the factor, early stopping and the best
            state.
    """

    dense: Literal["adam", "adagrad", "sgd"] = "adam"
    lr: float = 1e-3
    clip_norm: float | None = None
    rows: Literal["rowwise_adagrad", "adam", "sgd"] = "rowwise_adagrad"
    rows_lr: float = 0.05
    rows_l2: float = 0.0
    rows_c: float | None = None
    rows_lagged: bool = False
    warmup_steps: int = 0
    decay: Literal["constant", "cosine", "linear"] = "constant"
    best_by: Literal["ne", "logloss", "auc"] = "ne"
    loss: str | None = None
    tweo: float = 0.0
    task_weights: tuple[float, ...] = ()
    best_task: str | None = None
    plateau_factor: float = 0.1
    plateau_patience: int | None = None

    def __post_init__(self):
        """Checks ranges, written so that NaN fails."""
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(
                    f"--optim.{name.replace('_', '-')} {value} must lie between "
                    f"{low} and {high}."
                )
        for weight in self.task_weights:
            if not 0 < weight <= 1e6:
                raise ValueError(
                    f"--optim.task-weights {weight} must be above 0 and at most 1e6."
                )
        has_c = self.rows_c not in (None, 1)
        if self.rows != "rowwise_adagrad" and (has_c or self.rows_lagged):
            option = "--optim.rows-lagged" if self.rows_lagged else "--optim.rows-c"
            raise ValueError(
                f"{option} needs --optim.rows rowwise_adagrad, not {self.rows}."
            )


_RANGES = (
    ("lr", 1e-12, 1e3),
    ("clip_norm", 1e-12, 1e12),
    ("rows_lr", 1e-12, 1e3),
    ("rows_l2", 0.0, 1e3),
    ("rows_c", 1e-3, 1e6),
    ("tweo", 0.0, 1e3),
    ("warmup_steps", 0, 2**31 - 1),
    ("plateau_factor", 1e-6, 1.0),
    ("plateau_patience", 1, 10_000),
)


def make_schedule(lr: float, config: OptimConfig, total_steps: int) -> optax.Schedule:
    """Returns the learning rate schedule: a warm-up, then a constant or a decay.

    Args:
        lr: the rate after the warm-up.
        total_steps: the step at which a decay reaches 0. A run shorter than its
            warm-up ends while the rate still rises.
    """
    warmup = config.warmup_steps
    remaining = max(total_steps - warmup, 1)
    after = {
        "constant": optax.constant_schedule(lr),
        "cosine": optax.cosine_decay_schedule(lr, remaining),
        "linear": optax.linear_schedule(lr, 0.0, remaining),
    }[config.decay]
    if not warmup:
        return after
    # The rate of the first step is lr / warmup, not 0.
    rise = optax.linear_schedule(lr / warmup, lr, max(warmup - 1, 1))
    return optax.join_schedules([rise, after], [warmup])


def make_dense_optimizer(
    config: OptimConfig, total_steps: int
) -> optax.GradientTransformation:
    """Returns the optimizer of the dense parameters, including its schedule.

    Updates are proportional to the learning rate, so that the training step can apply
    a plateau's factor to them without a new compilation.
    """
    lr = make_schedule(config.lr, config, total_steps)
    optimizer = {
        "adam": optax.adam(lr),
        "adagrad": optax.adagrad(lr, initial_accumulator_value=0.0, eps=1e-8),
        "sgd": optax.sgd(lr),
    }[config.dense]
    if config.clip_norm is None:
        return optimizer
    return optax.chain(clip_by_global_norm(config.clip_norm), optimizer)


def make_row_optimizer(config: OptimConfig, groups: int = 1) -> RowOptimizer:
    """Returns the optimizer of the embedding rows.

    Args:
        groups: M, the groups of devices that update their rows alone. A row that one of
            them has gets sums of squares M times as large, for which c = M makes up.
    """
    if config.rows == "sgd":
        return Sgd()
    if config.rows == "adam":
        return Adam()
    c = float(groups) if config.rows_c is None else config.rows_c
    if config.rows_lagged:
        return LaggedRowwiseAdagrad(c=c)
    return RowwiseAdagrad(c=c)
