"""FP8 products by Triton: what is served, which config is the default, the launch."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.fp8 import E4M3, E5M2, Fp8Array
from loka_jax.triton.matmul import TuningConfig, fp8_matmul, search_space, why_not
from tests.support.triton import launches

__all__ = ["launches"]

BF16 = jnp.bfloat16


def operand(rows, k, by=(1,), dtype=E4M3):
    """Returns an operand with a scale for each row, for all (None), or for tiles."""
    scales, tile = {None: ((), None), (1,): ((rows, 1), None)}.get(by, (None, by))
    if tile is not None:
        scales = math.ceil(rows / tile[0]), math.ceil(k / tile[1])
    data, factors = np.zeros((rows, k), dtype), np.ones(scales, np.float32)
    return Fp8Array(jnp.asarray(data), jnp.asarray(factors), tile)


@pytest.mark.parametrize(
    "sizes, one_sum, expected, count",
    [
        ((65536, 512, 512), True, TuningConfig(128, 256, 128, 8, 3), 14),
        ((65536, 512, 512), False, TuningConfig(128, 128, 128, 8, 4), 12),
        ((4096, 512, 256), False, TuningConfig(64, 64, 128, 4, 5), 12),
        ((132 * 64, 512, 64), False, TuningConfig(64, 64, 128, 4, 5), 8),
        ((131 * 64, 512, 64), False, TuningConfig(64, 32, 128, 4, 5), 8),
        ((128, 32, 1), False, TuningConfig(64, 16, 64, 4, 5), 1),
    ],
)
def test_the_default_keeps_the_multiprocessors_busy(sizes, one_sum, expected, count):
    space = search_space(*sizes, one_sum=one_sum)
    assert space[0] == expected and len(set(space)) == len(space) == count
    for config in space:
        assert why_not(*sizes, config=config, one_sum=one_sum) is None or sizes[1] % 16
        # Where sums of K blocks are added, a thread has both in registers.
        assert config.sums <= (128 if one_sum else 64)
    large = TuningConfig(256, 256, 128, 8, 3)
    sizes = sizes[0], 512, sizes[2]
    assert "not in the search space" in why_not(*sizes, config=large)


@pytest.mark.parametrize(
    "lhs_by, rhs_by, kernel, lhs_rows, rhs_rows",
    [
        (None, (1,), "fp8_matmul_kernel", 0, 1),
        ((1,), None, "fp8_matmul_kernel", 1, 0),
        ((1, 128), (64, 128), "fp8_block_matmul_kernel", 1, 64),
        ((128, 128), (1, 128), "fp8_block_matmul_kernel", 128, 1),
    ],
)
def test_a_launch_says_which_rows_share_a_scale(
    launches, lhs_by, rhs_by, kernel, lhs_rows, rhs_rows
):
    lhs, rhs = operand(200, 272, lhs_by), operand(130, 272, rhs_by, E5M2)
    config = TuningConfig(64, 32, 128, 4, 5)
    out = fp8_matmul(lhs, rhs, out_dtype=BF16, fast_accumulation=True, config=config)
    (launch,) = launches
    assert launch.kernel == kernel and launch.grid == 4 * 5
    launch.assert_given(lhs=lhs.data, rhs=rhs.data, lhs_rows=lhs_rows)
    launch.assert_given(rhs_rows=rhs_rows, m=200, k=272, n=130, block_m=64, block_n=32)
    assert out.shape == (200, 130) and out.dtype == BF16


def test_fast_accumulation_of_untiled_operands_has_larger_blocks(launches):
    plain, tiled = (
        [operand(rows, 128, by) for rows in (132 * 128, 256)] for by in (None, (1, 128))
    )
    for operands, is_fast in ((plain, False), (plain, True), (tiled, True)):
        rest = dict(out_dtype=jnp.float32, fast_accumulation=is_fast)
        fp8_matmul(*operands, **rest)
    fast = [launch.given.get("fast_accumulation") for launch in launches]
    assert fast == [False, True, None]
    for launch, block_n in zip(launches, (128, 256, 128), strict=True):
        launch.assert_given(block_m=128, block_n=block_n, block_k=128)
        assert launch.num_warps == 8 and launch.grid == 132 * 256 // block_n


def test_operands_that_are_not_served_are_refused():
    lhs, rhs, wide = operand(32, 48), operand(16, 48), TuningConfig(256, 256, 128, 8, 3)
    by_column = Fp8Array(lhs.data, jnp.asarray(np.ones((1, 48), np.float32)))
    for *operands, config, match in (
        (operand(32, 40), operand(16, 40), None, "k=40 is not a multiple of 16"),
        (operand(0, 48), rhs, None, "m=0 is not positive"),
        (lhs, operand(16, 64), None, "differ in k"),
        (lhs, operand(16, 48, (1, 128)), None, "tile both operands or none"),
        (lhs, rhs, wide, "not in the search space"),
        (by_column, rhs, None, r"must have shape \[\] or \(32, 1\)"),
        (*(operand(x, 128, (1, 64)) for x in (32, 16)), None, "tiles must be 128"),
    ):
        with pytest.raises(ValueError, match=match):
            fp8_matmul(*operands, out_dtype=jnp.float32, config=config)
    assert why_not(100, 48, 7) is None and why_not(1, 16, 1) is None
