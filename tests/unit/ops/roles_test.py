"""One role of a site by itself, against the product that it is part of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import scaling
from loka_jax.ops import roles
from loka_jax.recipe import RECIPES, ROLES
from tests import support
from tests.support.stand_ins import xla_matmul

M, K, N = 48, 32, 64


def _operands():
    lhs = support.normal(M, K, dtype=jnp.bfloat16)
    rhs = support.normal(K, N, seed=1)
    g = support.normal(M, N, seed=2, dtype=jnp.bfloat16)
    return lhs, rhs, g


def _of(role, lhs, rhs, g):
    return {"fwd": (lhs, rhs), "dlhs": (g, rhs), "drhs": (lhs, g)}[role]


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_role_alone_is_that_of_the_site(name):
    recipe = RECIPES[name]
    state = scaling.init_delayed(recipe) if recipe.is_delayed else None
    lhs, rhs, g = _operands()
    lhs = lhs.astype(recipe.compute_dtype)
    out, pull = jax.vjp(lambda a, b: xla_matmul(recipe)(a, b, state), lhs, rhs)
    dlhs, drhs = pull(g.astype(out.dtype))
    for role, expected in zip(ROLES, (out, dlhs, drhs), strict=True):
        found = roles.product(role, *_of(role, lhs, rhs, g), recipe, state)
        assert found.dtype == (jnp.float32 if role == "drhs" else recipe.compute_dtype)
        np.testing.assert_allclose(
            found.astype(jnp.float32),
            expected.astype(jnp.float32),
            rtol=1e-2,
            atol=1e-2,
        )


@pytest.mark.parametrize("role", ROLES)
def test_exact_products(role):
    lhs, rhs, g = (x.astype(jnp.float32) for x in _operands())
    expected = {"fwd": lhs @ rhs, "dlhs": g @ rhs.T, "drhs": lhs.T @ g}[role]
    operands = _of(role, lhs, rhs, g)
    assert roles.sizes(role, *operands) == (M, K, N)
    found = roles.exact_product(role, *operands)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_rates_of_casts():
    lhs, rhs, g = _operands()
    zero = roles.cast_rates("fwd", lhs, rhs, RECIPES["bf16"])
    assert zero.underflow == zero.saturation == 0
    # One element far above all others: they are flushed, and it sits at the top.
    lhs = jnp.clip(lhs, -1.0, 1.0)  # far from the top
    rhs = (1e-8 * rhs).at[0, 0].set(448.0)
    found = roles.cast_rates("fwd", lhs, rhs, RECIPES["fp8_tensorwise"])
    np.testing.assert_allclose(found.underflow, 1 - 1 / rhs.size, rtol=1e-5)
    np.testing.assert_allclose(found.saturation, 1 / rhs.size, rtol=1e-5)
    by_row = roles.cast_rates("fwd", lhs, rhs, RECIPES["fp8_rowwise"])
    assert by_row.underflow < 2 / N  # of the weight's columns one is spoiled
