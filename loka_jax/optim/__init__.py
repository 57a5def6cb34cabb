"""Optimizers: optax's for dense parameters, our own for embedding rows."""

from loka_jax.optim.config import (
    OptimConfig,
    make_dense_optimizer,
    make_row_optimizer,
    make_schedule,
)
from loka_jax.optim.plateau import Plateau
from loka_jax.optim.rows import (
    Adam,
    LaggedRowwiseAdagrad,
    RowwiseAdagrad,
    Sgd,
    whole_table_update,
)

__all__ = [
    "Adam",
    "LaggedRowwiseAdagrad",
    "OptimConfig",
    "Plateau",
    "RowwiseAdagrad",
    "Sgd",
    "make_dense_optimizer",
    "make_row_optimizer",
    "make_schedule",
    "whole_table_update",
]
