"""Rows that are taken once, and their gradients, against indexing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.ops.distinct_rows import distinct_rows
from tests.support import normal


@pytest.mark.parametrize("columns", [(3,), (), (2, 3)])
@pytest.mark.parametrize(
    ("count", "rows"), [(5, [3, -1, 0, 4]), (5, [-1, -1]), (5, []), (0, [-1]), (1, [0])]
)
def test_rows_and_gradients_are_those_of_indexing(count, rows, columns):
    x = normal(count, *columns) if count else jnp.zeros((0, *columns))
    rows = jnp.array(rows, jnp.int32)
    shape = len(rows), *columns
    weights = normal(*shape, seed=1) if len(rows) else jnp.zeros(shape)
    out, pull = jax.vjp(lambda x: distinct_rows(x, rows), x)
    expected, gradient = np.zeros(shape), np.zeros(x.shape)
    for place, row in enumerate(rows):
        if row >= 0:
            expected[place], gradient[row] = x[row], weights[place]
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(pull(weights)[0], gradient)


def test_no_gradient_is_scattered():
    """Scatters of gradients are what this is for: of places alone they are fast."""

    def loss(x, rows):
        return jnp.sum(distinct_rows(x, rows) ** 2)

    text = str(jax.make_jaxpr(jax.grad(loss))(normal(6, 4), jnp.arange(3)))
    assert "scatter-add" not in text and "scatter" in text
