"""One role of a site by itself: its product, its errors, and what its casts lose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.measure import site_errors
from loka_jax.probe.operands import operands_of
from loka_jax.recipe import RECIPES, ROLES
from tests import support
from tests.support import oracle, products

SIZES = 48, 32, 64

_errors = jax.jit(site_errors.errors)


def test_errors_are_those_of_the_definitions():
    ref = np.float32([[1.0, 2.0, 8.0], [0.0, 4.0, 1.0], [0.0, 0.0, 0.0]])
    x = np.float32([[1.1, 2.0, 8.0], [0.5, 3.0, 1.0], [0.0, 0.0, 0.0]])
    expected = {
        "relative_l2": (1.26 / 86) ** 0.5,
        "worst_row": (1.25 / 17) ** 0.5,
        "mere": (0.1 + 0.25) / 5,
    }
    assert _errors(ref, x) == pytest.approx(expected, rel=1e-5)
    assert not any(_errors(ref, ref).values())


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
            operands = operands_of(*pairs["fwd"], pairs["dlhs"][0])
            return [site_errors.exact(role, operands) for role in ROLES]
        return [site_errors.product(role, *pairs[role], recipe) for role in ROLES]

    found = run(pairs)
    expected = oracle.products(name, *operands), oracle.magnitudes(name, *operands)
    for each in zip(found, *expected, strict=True):
        products.assert_is_rounded(*each, terms=max(SIZES))
    dtypes = [recipe.compute_dtype, recipe.compute_dtype, jnp.float32]
    assert [x.dtype for x in found] == dtypes
    assert [site_errors._sizes(role, *pairs[role]) for role in ROLES] == [SIZES] * 3
