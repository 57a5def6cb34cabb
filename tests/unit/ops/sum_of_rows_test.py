"""Sums of rows, whose gradients are added in an order of their own on a GPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.nn import sum_of_rows

SIZES = 3, 50, 17  # rows: of which the first are few
DIM, COUNT = 8, 200


def _operands(dtype):
    rng = np.random.default_rng(0)
    tables = tuple(jnp.asarray(rng.normal(size=(n, DIM)), jnp.float32) for n in SIZES)
    # Some lie behind the last row, and many on one.
    indices = tuple(
        jnp.asarray(np.minimum(rng.geometric(0.1, COUNT) - 1, n + 2), jnp.int32)
        for n in SIZES
    )
    return tables, indices, jnp.asarray(rng.normal(size=(COUNT, DIM)), dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("is_in_order", [False, True])
def test_a_row_is_added_and_its_gradients_are(monkeypatch, dtype, is_in_order):
    if is_in_order:  # as on a GPU
        monkeypatch.setattr(
            jax.lax, "platform_dependent", lambda *x, cpu, default: default(*x)
        )
    tables, indices, dy = _operands(dtype)
    y, pull = jax.vjp(lambda *tables: sum_of_rows(tables, indices, dtype), *tables)
    places = [np.minimum(i, n - 1) for i, n in zip(indices, SIZES, strict=True)]
    rows = [np.asarray(t, np.float64)[i] for t, i in zip(tables, places, strict=True)]
    exact = np.sum(rows, axis=0)
    np.testing.assert_allclose(
        np.asarray(y, np.float64), exact, atol=2e-6 if dtype == jnp.float32 else 0.03
    )
    assert y.dtype == dtype
    for gradient, place, count in zip(pull(dy), places, SIZES, strict=True):
        sums = np.zeros((count, DIM))
        np.add.at(sums, place, np.asarray(dy, np.float64))
        np.testing.assert_allclose(gradient, sums, atol=2e-4)  # of up to 200 terms


@pytest.mark.parametrize(("count", "dim"), [(0, DIM), (COUNT, 0)])
def test_of_nothing_there_is_nothing(count, dim):
    tables, index = (jnp.ones((50, dim)),), (jnp.zeros(count, jnp.int32),)
    y, pull = jax.vjp(lambda x: sum_of_rows(x, index, jnp.float32), tables)
    ((gradient,),) = pull(y)
    assert y.shape == (count, dim) and gradient.shape == (50, dim)
    assert not np.any(gradient)


def test_rows_in_bfloat16_have_their_gradients_in_it():
    table, index = jnp.ones((50, DIM), jnp.bfloat16), jnp.arange(50)
    y, pull = jax.vjp(lambda x: sum_of_rows((x,), (index,), x.dtype), table)
    (gradient,) = pull(3 * y)
    assert y.dtype == gradient.dtype == jnp.bfloat16
    assert np.all(y == 1) and np.all(gradient == 3)


def test_no_gradient_is_added_by_atomics_on_a_gpu():
    tables, indices, dy = _operands(jnp.bfloat16)

    def gradients(tables, dy):
        return jax.vjp(lambda x: sum_of_rows(x, indices, dy.dtype), tables)[1](dy)

    program = jax.jit(gradients).trace(tables, dy).lower(lowering_platforms=("cuda",))
    assert "sort" in program.as_text()
    adds = r"stablehlo.scatter.*?\n(?:.*\n)*?.*stablehlo.return"
    assert not any("stablehlo.add" in x for x in re.findall(adds, program.as_text()))
