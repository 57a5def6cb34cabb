"""A wide part adds its weights to the logits, and the model does not see it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from loka_jax.ops.tables import TableSpec
from loka_jax.train.tables.stacks import Widened, project


class Tasks(linen.Module):
    tasks: int

    @linen.compact
    def __call__(self, dense, embeddings, *, train=False):
        x = linen.Dense(self.tasks)(embeddings.reshape(len(dense), -1))
        return x[:, 0] if self.tasks == 1 else x


@pytest.mark.parametrize("tasks", [1, 2])
def test_logits_are_the_models_and_the_weights(tasks):
    spec = TableSpec((5, 4, 9, 7), 3, pooling=("mean", "mean"), wide=2)
    model = project(Tasks(tasks), spec)
    assert isinstance(model, Widened)
    dense = jnp.zeros((6, 0))
    rows = jax.random.normal(jax.random.key(0), (6, 4, 3))
    variables = model.init(jax.random.key(1), dense, rows)
    own = Tasks(tasks).apply(variables, dense, rows[:, :2])
    weights = np.asarray(rows[:, 2:, :tasks].sum(axis=1)).reshape(own.shape)
    np.testing.assert_allclose(model.apply(variables, dense, rows), own + weights, 1e-6)
    found, _ = model.apply(variables, dense, rows, train=True, mutable=["batch_stats"])
    np.testing.assert_allclose(found, own + weights, 1e-6)
    assert project(Tasks(tasks), TableSpec((5, 4), 3)) == Tasks(tasks)
