"""The kernel of softmax attention on a GPU: all masks, every config, other queries."""

import jax
import jax.numpy as jnp
import pytest

from loka_jax import jagged
from loka_jax.jagged import FORWARD
from loka_jax.pallas import jagged_softmax as kernel
from loka_jax.xla import jagged_softmax as xla
from tests.support import sqnr_db
from tests.support.attention import CASES, Case, mask_of
from tests.support.softmax import SCALE
from tests.whole.pallas import jagged_softmax_test as interpreted

pytestmark = pytest.mark.gpu

SIZES = (64, 128, 256)
LARGE = Case((777, 0, 333, 1000, 1), 3, (3, 1, 5, 2, 0), (9, 1, 35, 4, 1), 300, 7)


def visibility_of(case):
    return jagged.visibility(jnp.asarray(case.offsets), case.num_rows, case.rule)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_those_of_the_equation(name, size):
    case = CASES[name]
    operands = interpreted.operands_of(case.num_rows, size)
    interpreted.check(visibility_of(case), mask_of(case), operands, None)


def test_queries_may_be_other_rows_than_keys():
    interpreted.test_queries_may_be_other_rows_than_keys(None)


@pytest.mark.parametrize("size", SIZES)
def test_every_config_and_the_gradients_are_near_xlas_in_float32(size):
    q, k, v, g = interpreted.operands_of(LARGE.num_rows, size)
    visible = visibility_of(LARGE)

    @jax.jit
    def exact(q, k, v, g):
        out, lse = xla.forward(q, k, v, visible, SCALE)
        delta = jnp.sum(g * out, -1)
        return out, lse, xla.backward(q, k, v, g, (lse, delta), visible, SCALE)

    wanted, lse, grads = exact(*(x.astype(jnp.float32) for x in (q, k, v, g)))
    for config in kernel.search_space(FORWARD, size):
        out, found = kernel.forward(q, k, v, visible, SCALE, config=config)
        assert sqnr_db(wanted, out) > 45, config
        assert jnp.max(jnp.abs(found - lse)[: LARGE.offsets[-1]]) < 1e-3, config
    delta = jnp.sum(g.astype(jnp.float32) * wanted, -1)
    for x, y in zip(
        grads, kernel.backward(q, k, v, g, (lse, delta), visible, SCALE), strict=True
    ):
        assert sqnr_db(x, y) > 45
