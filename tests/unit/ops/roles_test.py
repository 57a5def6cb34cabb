"""One role of a site by itself: its product, sizes, and the damage of its casts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.ops import roles
from loka_jax.recipe import RECIPES, ROLES
from tests import support
from tests.support import oracle, products

M, K, N = SIZES = 48, 32, 64


def of_roles(lhs, rhs, g):
    """Returns the operands of each role."""
    return {"fwd": (lhs, rhs), "dlhs": (g, rhs), "drhs": (lhs, g)}


@pytest.mark.parametrize("name", ["f32", "fp8_rowwise_bf16_drhs"])
def test_a_role_alone_is_that_of_the_site(name):
    operands, recipe = products.operands(RECIPES[name], SIZES), RECIPES[name]
    pairs = of_roles(*operands)

    @support.jitted
    def run(pairs):
        if name == "f32":
            return [roles.exact_product(role, *pairs[role]) for role in ROLES]
        return [roles.product(role, *pairs[role], recipe) for role in ROLES]

    found = run(pairs)
    expected = oracle.products(name, *operands), oracle.magnitudes(name, *operands)
    for each in zip(found, *expected, strict=True):
        products.assert_is_rounded(*each, terms=max(SIZES))
    dtypes = [recipe.compute_dtype, recipe.compute_dtype, jnp.float32]
    assert [x.dtype for x in found] == dtypes
    assert [roles.sizes(role, *pairs[role]) for role in ROLES] == [SIZES] * 3


def test_rates_of_casts():
    lhs, rhs = support.normal(M, K), support.normal(K, N, seed=1)
    # One element far above all others: they are flushed, and it sits at the top.
    lhs = jnp.clip(lhs, -1.0, 1.0).at[0, :3].set(0)  # far from the top; zeros stay
    rhs = (1e-8 * rhs).at[0, 0].set(448.0)
    names = "bf16", "fp8_tensorwise", "fp8_rowwise"
    run = lambda *x: [roles.cast_rates("fwd", *x, RECIPES[name]) for name in names]  # noqa: E731
    zero, found, by_row = jax.jit(run)(lhs, rhs)
    assert zero.underflow == zero.saturation == 0
    np.testing.assert_allclose(found.underflow, 1 - 1 / rhs.size, rtol=1e-5)
    np.testing.assert_allclose(found.saturation, 1 / rhs.size, rtol=1e-5)
    assert by_row.underflow < 2 / N  # of the weight's columns one is spoiled
