"""Gradients of several uses of an array merge by the maximum."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import max_merge


@jax.custom_vjp
def use(table, contribution):
    """Returns 0; the gradient of the table is the contribution."""
    del table, contribution
    return jnp.zeros(())


use.defvjp(
    lambda table, contribution: (jnp.zeros(()), contribution),
    lambda contribution, g: (contribution, None),
)


def total(table, contributions):
    """Returns 0 from a use of the table for each contribution."""
    shared = max_merge.merged(table)
    return sum(use(max_merge.unmerged(shared), c) for c in contributions)


TABLE = np.float32([7.0, 8.0, 9.0])
CONTRIBUTIONS = np.float32([[1.0, -np.inf, 5.0], [3.0, -np.inf, 2.0], [2.0] * 3])


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_gradient_is_the_maximum_or_the_array_where_nothing_contributes(transform):
    gradient = transform(jax.grad(total))(TABLE, CONTRIBUTIONS)
    chex.assert_type(gradient, jnp.float32)
    np.testing.assert_array_equal(gradient, [3.0, 2.0, 5.0])
    gradient = transform(jax.grad(total))(TABLE, CONTRIBUTIONS[:2])
    np.testing.assert_array_equal(gradient, [3.0, 8.0, 5.0])


def test_no_arithmetic_adds_merged_arrays():
    with pytest.raises(TypeError, match="max_merged_float32"):
        jax.jit(lambda x: max_merge.merged(x) + max_merge.merged(x))(TABLE)
