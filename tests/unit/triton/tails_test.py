"""Launches of the tails, recorded: scales, forms, tiles, and what is refused.

That each operand lies where its kernel reads it shows in tests/whole, interpreted.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.fp8 import E4M3, E5M2
from loka_jax.normed import Epilogue, NormVectors
from loka_jax.tails import Forms, Scale, Scaled
from loka_jax.triton import tails
from tests.support.triton import launches

__all__ = ["launches"]

BF16 = jnp.bfloat16


def ones(*shape, dtype=BF16):
    # By numpy: jax.numpy would compile a program for every shape.
    return jax.device_put(np.ones(shape, dtype))


def vector(size=4):
    return ones(size, dtype=jnp.float32)


def test_what_is_given_is_read_and_what_lacks_is_absent(launches):
    scales = Scale(vector(), 1), Scale(vector(), 3)
    z, want = Scaled(ones(80, 160), scales, unit=0.5), Forms(shape=(70, 150))
    out = tails.cross_tail([z], z, want=want)
    (launch,) = launches
    given, types, of = launch.given.values()
    assert given.summands == (given.x0,) == (z,) and (of.m, of.n) == (70, 150)
    lacking = given.outer, given.bias, given.head, given.scale_inv, types.row_sums
    assert lacking == (None,) * 5 and types.dots is None
    assert types.y.bf16.shape == (70, 150) and types.y[1:] == (None,) * 4
    lacking = out.y.fp8, out.y.amaxes, out.row_sum, out.dots
    assert lacking == (None,) * 4 and out.y.bf16.shape == (70, 150)


@pytest.mark.parametrize(
    "norm, n, activation, has_vectors, transposed, config, grid",
    [
        ("none", 600, "relu", True, True, (64, 128, 4), 5),
        ("block", 600, "none", False, True, (32, 256, 8), 2 * 3),
        ("rms", 5, "none", True, True, (32, 16, 8), 2),
        ("layer", 600, "relu", False, True, (64, 64, 4), 10),
    ],
)
def test_a_tile_holds_what_shares_a_statistic(
    launches, norm, n, activation, has_vectors, transposed, config, grid
):
    z, vectors = Scaled(ones(64, n)), NormVectors(vector(n) if has_vectors else None)
    fp8 = dict(fp8=E4M3, scale_inv=Scale(vector()), transposed=transposed)
    want = Forms(**fp8, amax=True, padded=True)
    tails.norm_tail([z], vectors, epilogue=Epilogue(norm, activation), want=want)
    *before, launch = launches
    of = launch.given["of"]
    assert (of.block_m, of.block_n, launch.num_warps, launch.grid) == (*config, grid)
    assert [x.kernel for x in before] == ["norm_moments_kernel"] * (norm == "layer")


def test_statistics_of_whole_rows_are_read_by_the_tail(launches):
    z, epilogue = Scaled(ones(64, 600)), Epilogue("rms", "relu")
    _, residuals = tails.norm_tail([z], epilogue=epilogue, want=Forms())
    moments, tail = launches
    assert moments.grid == 8 and moments.given["of"].block_n == 256
    assert tail.given["given"].rate is residuals.rstd
    assert tail.given["out"].rstd is None
    launches.clear()
    tails.norm_tail_backward([z], residuals, epilogue=epilogue, want=Forms())
    projections, tail = launches
    assert projections.given["given"].along is None
    assert tail.given["given"].along.shape == (64,)


@pytest.mark.parametrize(
    "m, n, dtype, reason",
    [
        (16, 16, jnp.float16, "float16 is none of bfloat16"),
        (0, 16, BF16, "m=0 is not positive"),
        (16, 0, E5M2, "n=0 is not positive"),
    ],
)
def test_what_is_not_served_is_refused(launches, m, n, dtype, reason):
    z = Scaled(ones(m, n, dtype=dtype))
    with pytest.raises(ValueError, match=f"cross_tail: {reason}"):
        tails.cross_tail([z], z, want=Forms())
    with pytest.raises(ValueError, match=f"cross_gradient: {reason}"):
        tails.cross_gradient([[z], [z]], [z], [None], parts=(), shape=(m, n))
    with pytest.raises(ValueError, match=f"norm_tail: {reason}"):
        tails.norm_tail([z], epilogue=Epilogue("none"), want=Forms())
    assert not launches


@pytest.mark.usefixtures("launches")
def test_a_block_norm_takes_whole_blocks_and_no_vectors():
    z, vectors = Scaled(ones(16, 16)), NormVectors(gamma=vector(16))
    with pytest.raises(ValueError, match="'block' takes neither gamma nor beta"):
        tails.norm_tail([z], vectors, epilogue=Epilogue("block"), want=Forms())
    tile, z = tails.Tile(64, 128, 4), Scaled(ones(16, 512))
    with pytest.raises(ValueError, match="has 128 columns, a block 256"):
        tails.norm_tail([z], epilogue=Epilogue("block"), want=Forms(), tile=tile)
