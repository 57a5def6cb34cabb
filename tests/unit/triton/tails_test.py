"""Launches of the tails, recorded: scales, forms, tiles, and what is refused.

That each operand lies where its kernel reads it shows in tests/whole, interpreted.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.fp8 import E4M3, E5M2
from loka_jax.normed import Epilogue, NormVectors
from loka_jax.tails import Forms, Scale, Scaled
from loka_jax.triton import cross_gradient, cross_tail, norm_tail
from loka_jax.triton.tail import TuningConfig
from tests.support.triton import launches

__all__ = ["launches"]

BF16 = jnp.bfloat16


def ones(*shape, dtype=BF16):
    # By numpy: jax.numpy would compile a program for every shape.
    return jnp.asarray(np.ones(shape, dtype))


def vector(size=4):
    return ones(size, dtype=jnp.float32)


def test_both_scales_of_a_product_are_given_and_what_lacks_is_absent(launches):
    first, second = Scale(vector(), 1), Scale(vector(), 3)
    z, want = Scaled(ones(80, 160), (first, second), unit=0.5), Forms(shape=(70, 150))
    out = cross_tail.cross_tail([z], z, want=want)
    (launch,) = launches
    launch.assert_given(z_0=z.data, z_0_scales=2, z_0_unit=0.5, z_0_n=160, m=70, n=150)
    launch.assert_given(z_0_scale=first.vector, z_0_at=1)
    launch.assert_given(z_0_scale_2=second.vector, z_0_at_2=3)
    launch.assert_given(z_1_scales=-1, z_1_n=0, z_2_scales=-1, y=(70, 150), y_fp8=(1,))
    for name in ("outer", "bias", "head", "s", "row_sum", "fp8", "fp8_t", "amax"):
        launch.assert_given(**{f"has_{name}": False})
    lacking = out.y.fp8, out.y.amaxes, out.s, out.row_sum, out.dots
    assert lacking == (None,) * 5 and out.y.bf16.shape == (70, 150)


@pytest.mark.parametrize(
    "norm, n, activation, has_vectors, transposed, config, grid",
    [
        ("none", 600, "relu", True, True, (64, 128, 4), 5),
        ("block", 600, "none", False, True, (32, 256, 8), 2 * 3),
        # A program has all tiles of its rows.
        ("layer", 600, "relu", False, True, (32, 128, 8), 2),
        ("rms", 5, "none", True, True, (32, 16, 8), 2),
        ("rms", 600, "none", False, True, (32, 512, 8), 2),
        ("layer", 600, "none", False, False, (16, 1024, 8), 4),
    ],
)
def test_a_tile_holds_what_shares_a_statistic(
    launches, norm, n, activation, has_vectors, transposed, config, grid
):
    z, vectors = Scaled(ones(64, n)), NormVectors(vector(n) if has_vectors else None)
    want = Forms(fp8=E4M3, transposed=transposed, amax=True, padded=True)
    options = dict(epilogue=Epilogue(norm, activation), want=want)
    norm_tail.norm_tail(z, None, vectors, **options, y_scale_inv=Scale(vector()))
    (launch,) = launches
    launch.assert_given(block_m=config[0], block_n=config[1])
    assert (launch.num_warps, launch.grid) == (config[2], grid)


@pytest.mark.parametrize(
    "m, n, dtype, count, reason",
    [
        (16, 16, jnp.float16, 1, "float16 is none of bfloat16"),
        (0, 16, BF16, 1, "m=0 is not positive"),
        (16, 0, E5M2, 1, "n=0 is not positive"),
        (16, 16, E5M2, 0, "0 (summands|layers) of 3"),
        (16, 16, BF16, 4, "4 (summands|layers) of 3"),
    ],
)
def test_what_is_not_served_is_refused(launches, m, n, dtype, count, reason):
    z = Scaled(ones(m, n, dtype=dtype))
    with pytest.raises(ValueError, match=reason):
        cross_tail.cross_tail([z] * count, z, want=Forms())
    with pytest.raises(ValueError, match=reason):
        gradients = [z] * (count + 1), [z] * count, [None] * count
        cross_gradient.cross_gradient(*gradients, parts=(), shape=(m, n))
    if count == 1:
        with pytest.raises(ValueError, match=f"norm_tail: {reason}"):
            norm_tail.norm_tail(z, epilogue=Epilogue("none"), want=Forms())
    assert not launches


@pytest.mark.usefixtures("launches")
def test_a_block_norm_takes_whole_blocks_and_no_vectors():
    z, vectors = Scaled(ones(16, 16)), NormVectors(gamma=vector(16))
    with pytest.raises(ValueError, match="'block' takes neither gamma nor beta"):
        norm_tail.norm_tail(z, None, vectors, epilogue=Epilogue("block"), want=Forms())
    why_not = functools.partial(norm_tail.why_not, 64, config=TuningConfig(64, 128, 4))
    assert why_not(512, norm="block").endswith("has tiles of 128 columns, not 256")
    assert why_not(512, norm="layer") is why_not(100, norm="block") is None
