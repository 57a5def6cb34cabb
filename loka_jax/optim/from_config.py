"""Builds optimizers and schedules from the options."""

import optax

from loka_jax.ops.embedding import RowOptimizer
from loka_jax.optim.clip import clip_by_global_norm
from loka_jax.optim.config import OptimConfig
from loka_jax.optim.rows import Adam, LaggedRowwiseAdagrad, RowwiseAdagrad, Sgd


def make_schedule(lr: float, config: OptimConfig, total_steps: int) -> optax.Schedule:
    """Returns the learning rate schedule: a warm-up, then a constant or a decay.

    Args:
        lr: the rate after the warm-up.
        config: warm-up and decay.
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
        config: its options.
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
