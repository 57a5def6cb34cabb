"""The Triton kernels on a GPU: many programs, every config, repeated launches."""

import functools

import jax
import jax.numpy as jnp
import pytest

from loka_jax.ops import interaction
from loka_jax.optim.rows import Adam, Sgd
from loka_jax.triton.matmul import fp8_matmul, search_space
from tests import support
from tests.support.pallas import assert_launches_repeat
from tests.support.triton import on_gpu, skip_without_triton
from tests.whole.triton import matmul_test, row_update_test, rows_test

__all__ = ["on_gpu"]

skip_without_triton()

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_gpu")]

ADAGRAD = row_update_test.ADAGRAD
ROWS, TILES = matmul_test.ROWS, matmul_test.TILES


def test_many_programs_give_what_few_do():
    for formats, granularities in matmul_test.FORMATS_AND_GRANULARITIES:
        sizes, out_dtype = (1000, 208, 48), jnp.bfloat16
        matmul_test.check(sizes, formats, granularities, out_dtype=out_dtype)
    for sizes in ((2, 16, True), (26, 128, False), (32, 256, False), (63, 256, True)):
        rows_test.check_dot_features(1003, *sizes)


@pytest.mark.parametrize(
    "kind, dim",
    [(kind, 16) for kind in row_update_test.KINDS[:4]]
    + [("bad", 1), ("zipf", 10), ("zipf", 512)],
)
def test_row_updates_of_many_programs(kind, dim):
    row_update_test.check_sums(kind, 50_003, dim)
    row_update_test.check_sums(kind, 50_003, dim, jnp.bfloat16)
    row_update_test.check_update(ADAGRAD, kind, 5003, dim)
    row_update_test.check_update(Sgd(), kind, 5003, dim)


@pytest.mark.parametrize(
    "granularities, one_sum", [(ROWS, False), (ROWS, True), (TILES, False)]
)
def test_all_configs_of_a_product_agree(granularities, one_sum):
    sizes, formats = (1000, 528, 600), matmul_test.FORMATS[0]
    lhs, rhs = matmul_test.operands_of(*sizes, formats, granularities)
    rest = dict(out_dtype=jnp.float32, fast_accumulation=one_sum)
    limit = matmul_test.limit_of(jnp.float32, one_sum)
    for config in search_space(*sizes, one_sum=one_sum):
        out = fp8_matmul(lhs, rhs, config=config, **rest)
        assert matmul_test.error_of(out, lhs, rhs) < limit, config


def test_launches_repeat_bit_by_bit():
    product = functools.partial(fp8_matmul, out_dtype=jnp.float32)
    assert_launches_repeat(product, *matmul_test.operands_of(1000, 528, 600))
    args = support.normal(9999, 16), support.normal(9999, 26, 16, seed=1)
    args = [x.astype(jnp.bfloat16) for x in args]
    width = rows_test.width_of(26, 16, True, None, "i > j")
    g = support.normal(9999, width, seed=2, dtype=jnp.bfloat16)

    def both(bottom, embeddings, g):
        out, vjp = jax.vjp(interaction.dot_features, bottom, embeddings)
        return out, vjp(g)

    assert "triton_kernel_call" in jax.jit(both).lower(*args, g).as_text()
    assert_launches_repeat(both, *args, g)


@pytest.mark.parametrize(
    "optimizer, dim", [(ADAGRAD, 16), (ADAGRAD, 128), (Sgd(), 10), (Adam(), 16)]
)
def test_updates_repeat_bit_by_bit(optimizer, dim):
    *operands, _, rate = row_update_test.problem_of(optimizer, "one long", 200_001, dim)

    def update(*operands):
        return row_update_test.update(*operands, optimizer, rate)

    assert_launches_repeat(update, *operands)
