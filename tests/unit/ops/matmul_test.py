"""The site product by itself: values, gradients, state, sharded rows."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import scaling
from loka_jax.recipe import get_recipe
from tests import support
from tests.support import oracle, products
from tests.support.stand_ins import xla_matmul

DELAYED = "fp8_tensorwise_delayed"


@pytest.mark.parametrize(
    "name, sizes",
    [
        ("bf16", products.SIZES),
        ("fp8_rowwise_bf16_drhs", products.SIZES),
        ("fp8_blockwise", (127, 271, 257)),
        ("mxfp8", (127, 271, 257)),
        ("fp8_rowwise", (127, 271, 257)),
        (DELAYED, products.SIZES),
        (f"{DELAYED}_bf16_drhs", (127, 271, 257)),
        (DELAYED, (0, 32, 16)),
    ],
)
def test_products_are_exact_products_of_the_rounded_operands(name, sizes):
    products.assert_exact(name, sizes)


def test_a_nan_is_seen_and_never_enters_the_history():
    lhs, rhs, g = products.operands(get_recipe(DELAYED))
    before = products.run(DELAYED, lhs, rhs, g)[1]
    bad = lhs.at[3, 5].set(jnp.nan)
    (out, _, _), after = products.run(DELAYED, bad, rhs, g, before)
    assert jnp.all(jnp.isnan(out[3])) and jnp.all(jnp.isfinite(out[4:]))
    np.testing.assert_array_equal(after.history[0], before.history[0])
    assert after.factors[0] == before.factors[0]
    chex.assert_tree_all_finite(after)
    assert after.history[1, 1] > 0  # that of rhs moved on


def test_over_devices_scales_are_those_of_all_rows():
    """Devices are examples of `vmap` here; meshes are in tests/whole."""
    recipe = get_recipe(DELAYED)
    # The devices' amaxes differ by orders of magnitude.
    of_rows = functools.partial(support.uneven_rows, 64, decades=3)
    lhs, g = (of_rows(n, seed=n).astype(jnp.bfloat16) for n in (32, 48))
    rhs = support.normal(32, 48, seed=1)
    state = scaling.init_delayed(recipe)
    product = xla_matmul(recipe, ("data",))

    @functools.partial(jax.vmap, axis_name="data")
    def step(lhs, g):
        out, vjp = jax.vjp(product, lhs, rhs, state)
        return out, *vjp(g)

    parts = (x.reshape(4, 16, -1) for x in (lhs, g))
    out, dlhs, drhs, states = support.jitted(step)(*parts)
    exact = oracle.products(DELAYED, lhs, rhs, g)
    magnitudes = oracle.magnitudes(DELAYED, lhs, rhs, g)
    found = out.reshape(64, -1), dlhs.reshape(64, -1), jnp.sum(drhs, axis=0)
    for each in zip(found, exact, magnitudes, strict=True):
        products.assert_is_rounded(*each, terms=64)
    amaxes = [jnp.max(jnp.abs(x)).astype(jnp.float32) for x in (lhs, rhs, g)]
    expected = scaling.update_delayed(state, jnp.stack(amaxes), recipe)
    for table in states.table:
        np.testing.assert_array_equal(table, expected.table)
