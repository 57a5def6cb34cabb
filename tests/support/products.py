"""The three products of a site by XLA: how tests run them, and what they should be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from loka_jax import scaling
from loka_jax.recipe import Recipe, get_recipe
from tests import support
from tests.support import oracle
from tests.support.stand_ins import xla_matmul

SIZES = 144, 272, 160  # more than a tile of blockwise scales, not in whole tiles


def uneven(x):
    """Returns `x` with rows, and columns, of sizes from 1 to 1e-6."""
    sizes = [np.logspace(0, -6, n, dtype=np.float32) for n in x.shape]
    values = np.asarray(x, np.float32) * np.outer(*sizes)
    return jax.device_put(values.astype(x.dtype))


def operands(recipe, sizes=SIZES):
    """Returns uneven lhs, rhs and g; rhs is a float32 master weight."""
    m, k, n = sizes
    lhs = support.normal(m, k, dtype=recipe.compute_dtype)
    g = support.normal(m, n, seed=2, dtype=recipe.compute_dtype)
    return uneven(lhs), uneven(support.normal(k, n, seed=1) / k**0.5), uneven(g)


@functools.partial(support.jitted, static_argnames="recipe")
def three_products(lhs, rhs, g, state, *, recipe: Recipe):
    """Returns (out, dlhs, drhs) and the next state."""
    out, vjp = jax.vjp(xla_matmul(recipe), lhs, rhs, state)
    *gradients, state = vjp(g.astype(out.dtype))
    return (out, *gradients), state


def run(name, lhs, rhs, g, state=None):
    """Returns (out, dlhs, drhs) and the next state, by default after a first step."""
    recipe = get_recipe(name)
    if state is None and recipe.is_delayed:
        state = scaling.init_delayed(recipe)
    return three_products(lhs, rhs, g, state, recipe=recipe)


def assert_is_rounded(x, exact, magnitude, terms):
    """Asserts that x is a sum of products, rounded to its dtype.

    `magnitude` is the sum of the products' absolute values.
    """
    ulp = float(jnp.finfo(x.dtype).eps)
    error = np.abs(np.asarray(x, np.float64) - exact)
    bound = support.sum_error(terms, magnitude)
    assert np.all(error <= 0.51 * ulp * np.abs(exact) + bound)


def assert_exact(name, sizes):
    """Asserts that products are exact products of operands rounded as a recipe says."""
    # Under power-of-two scales all granularities round alike, until values underflow.
    recipe = get_recipe(name)
    lhs, rhs, g = operands(recipe, sizes)
    found, _ = run(name, lhs, rhs, g)
    exact = oracle.products(name, lhs, rhs, g)
    magnitudes = oracle.magnitudes(name, lhs, rhs, g)
    for each in zip(found, exact, magnitudes, strict=True):
        assert_is_rounded(*each, terms=max(sizes))
    dtypes = [x.dtype for x in found]
    assert dtypes == [recipe.compute_dtype, recipe.compute_dtype, jnp.float32]
