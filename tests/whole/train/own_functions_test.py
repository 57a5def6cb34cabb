"""A user's own loss and metrics: found by name, tried before training, used."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.fitting import _kept
from loka_jax.optim import OptimConfig, Sgd
from loka_jax.train import tasks
from loka_jax.train.own_functions import check_functions, measured, metrics_of
from loka_jax.train.tables.update import RowUpdate
from tests.support import linear
from tests.support.linear import Linear, make_batch
from tests.support.own_functions import brier, focal

HERE = "tests.support.own_functions"


def test_a_step_descends_its_own_loss():
    state = linear.make_state(Linear(), linear.sgd(), Sgd())
    objective = tasks.objective_of(OptimConfig(loss=f"{HERE}:focal"))
    rows, batch = RowUpdate(Sgd(), lambda step: 0.5, 0.0), make_batch()
    batch.weights[-3:] = 0
    step = linear.step_of(Linear(), linear.sgd(), rows, objective=objective)
    after = step(state, batch)
    rows = state.table[batch.ids + linear.FIRST_ROWS].reshape(len(batch.ids), -1)
    inputs = jnp.concatenate([batch.dense, rows], axis=1)

    def loss(params):
        logits = (inputs @ params["kernel"] + params["bias"])[:, 0]
        losses = focal(logits, batch.labels, batch.weights)
        return jnp.sum(losses * batch.weights) / batch.weights.sum()

    gradients = jax.grad(loss)(state.params)
    for name, gradient in gradients.items():
        want = state.params[name] - 0.1 * gradient
        np.testing.assert_allclose(after.params[name], want, rtol=1e-5, atol=1e-6)


def test_metrics_see_probabilities_of_rows_that_count():
    logits, labels = np.float32([0, 2, -1, 9]), np.float32([1, 1, 0, 0])
    weights = np.float32([1, 2, 1, 0])
    functions = metrics_of((f"b={HERE}:brier",))
    found = measured(functions, logits, labels, weights)["metrics"]["b"]
    scores = 1 / (1 + np.exp(-logits[:3]))
    want = np.average((scores - labels[:3]) ** 2, weights=weights[:3])
    assert found == pytest.approx(want, rel=1e-6)
    assert measured({}, logits, labels, weights) == {}


@pytest.mark.parametrize(
    "loss, metrics, why",
    [
        (f"{HERE}:mean", (), r"own_functions:mean of .*\(4, 2\) gives \(\): let it"),
        (f"{HERE}:brier", (), "gives TracerArrayConversionError.*by operations of jax"),
        (f"{HERE}:focla", (), "^the loss '.*' is no function .did you mean 'focal'"),
        (None, ("brier",), "--metrics brier must be NAME=module:function"),
        (None, (f"b={HERE}:broken",), "the metric b fails on 4 rows .KeyError"),
        (None, (f"b={HERE}:nothing",), "the metric b .* is no function"),
    ],
    ids=str,
)
def test_what_does_not_work_is_refused_before_training(loss, metrics, why):
    with pytest.raises(ValueError, match=why) as error:
        check_functions(loss, metrics, 2)
    assert "\n" not in str(error.value)


def test_what_cannot_be_kept_is_refused():
    def local(logits, labels, weights):
        return logits

    for function in (lambda *x: x, local, functools.partial(focal), focal.__call__):
        with pytest.raises(
            ValueError, match="the loss could not be read again .* outside"
        ):
            _kept("the loss", function)
    assert _kept("the loss", brier) == f"{HERE}:brier"
