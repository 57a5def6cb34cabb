"""A model with a first-order part starts at a logistic regression of the rows.

Random tables lose to a regression on few rows, or on rare clicks: they learn the rows
by heart before they have learned what a regression knows. From there training can only
gain: the best evaluation is kept, and the start is one. The best of many evaluations on
few rows may be so by chance, so that it must be clearly better than the start.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loka_jax.models.ranking import FIRST_ORDER
from loka_jax.ops.tables import TableSpec
from loka_jax.train.baselines import logits_of
from loka_jax.train.build import Run
from loka_jax.train.evaluation import evaluate
from loka_jax.train.state import TrainState

_ERRORS = 3.0  # the best of some forty evaluations is two better by chance


def starts_at_regression(run: Run) -> bool:
    """Returns whether a run has the place for a regression, and rows to fit it to.

    Of tables of several dims, or over devices, it has none; nor are examples fitted
    that are generated without end.
    """
    has_part = getattr(run.config.model, "first_order", False)
    is_one = isinstance(run.placement.tables, TableSpec) and run.placement.size == 1
    return has_part and is_one and run.splits.folder is not None


def at_regression(run: Run, state: TrainState) -> TrainState:
    """Returns the state with the regression as its first-order part; donates it."""
    regressions = run.baselines.regressions
    weights = jnp.stack([jnp.asarray(x.ids) for x in regressions], axis=1)
    params: dict[str, Any] = dict(state.params)
    dense = [jnp.asarray(x.dense, jnp.float32) for x in regressions]
    if FIRST_ORDER in params:
        params[FIRST_ORDER] = {"kernel": jnp.stack(dense, axis=1)}
    for task, regression in enumerate(regressions):
        name = "head" if "head" in params else f"head_{task}"
        bias = jnp.full_like(params[name]["bias"], regression.bias)
        params[name] = {**params[name], "bias": bias}

    def planted(table: jax.Array, weights: jax.Array) -> jax.Array:
        return table.at[:, : weights.shape[1]].set(weights.astype(table.dtype))

    table = jax.jit(planted, donate_argnums=0)(state.table, weights)
    return dataclasses.replace(state, params=params, table=table)


def is_clearly_better(run: Run, state: TrainState) -> bool:
    """Returns whether a state's log loss on validation rows is below the regression's.

    That is, by more than three standard errors of the mean of the paired differences.
    """
    valid = run.splits.valid
    found = evaluate(run, state, valid)
    logits, n = np.zeros(found.logits.shape), valid.num_examples  # padding comes last
    logits[:n] = logits_of(run.baselines.regressions, valid).reshape(logits[:n].shape)
    minus = found.losses - found._replace(logits=logits).losses
    return bool(minus.mean() + _ERRORS * minus.std() / np.sqrt(len(minus)) < 0)
