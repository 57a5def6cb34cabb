"""Launches of the tails, recorded: what each operand, size and result is."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.fp8 import E4M3, E5M2
from loka_jax.normed import Epilogue, NormVectors
from loka_jax.tails import Forms, Outer, Scale, Scaled
from loka_jax.triton import cross_gradient, cross_tail, joined_cast, norm_tail
from loka_jax.triton.tail import TuningConfig
from tests.support.triton import launches

__all__ = ["launches"]

BF16 = jnp.bfloat16
SHAPE, PADDED = (70, 150), (80, 160)  # of two tiles of rows, and of two or three
PLAIN = Forms(shape=SHAPE)
ALL = Forms(fp8=E4M3, transposed=True, amax=True, shape=SHAPE, padded=True)
GRADIENT = dataclasses.replace(ALL, fp8=E5M2, bf16=False)


def ones(*shape, dtype=BF16):
    # By numpy: jax.numpy would compile a program for every shape.
    return jnp.asarray(np.ones(shape, dtype))


def vector(size=4):
    return ones(size, dtype=jnp.float32)


def product(shape=PADDED):
    """Returns a product of which two scales were not applied."""
    return Scaled(ones(*shape), (Scale(vector(), 1), Scale(vector(), 3)), unit=0.5)


def cast(shape=PADDED):
    """Returns an FP8 matrix."""
    return Scaled(ones(*shape, dtype=E4M3), (Scale(vector(), 2),))


def assert_scaled(launch, **matrices):
    """Asserts that a launch was given matrices by these names, None where absent."""
    for name, x in matrices.items():
        expected = {"scales": -1, "n": 0, "unit": 1.0}
        if x is not None:
            expected = {"scales": len(x.scales), "n": x.data.shape[1], "unit": x.unit}
            launch.assert_given(**{name: x.data})
            for scale, end in zip(x.scales, ("", "_2"), strict=False):
                expected |= {f"scale{end}": scale.vector, f"at{end}": scale.at}
        launch.assert_given(**{f"{name}_{key}": y for key, y in expected.items()})


def assert_written(launch, name, written, want, programs):
    """Asserts that a result has all forms that are wanted, and one element else."""
    (m, n), fp8 = want.written_shape(want.shape), want.fp8
    names = name, f"{name}_fp8", f"{name}_fp8_t", "amaxes"
    wanted = want.bf16, fp8 is not None, want.transposed, want.amax
    shapes = (m, n), (m, n), (n, m), (programs,)
    copies = written.fp8 or (None, None)
    if fp8 is not None:
        assert launch.given[names[1]].dtype == launch.given[names[2]].dtype == fp8
        copies = copies.data, copies.data_t
    results = written.bf16, *copies, written.amaxes
    for name, x, is_wanted, shape in zip(names, results, wanted, shapes, strict=True):
        launch.assert_given(**{name: shape if is_wanted else (1,)})
        assert x.shape == shape if is_wanted else x is None
    flags = dict(zip(("bf16", "fp8", "fp8_t", "amax"), wanted, strict=True))
    launch.assert_given(**{f"has_{name}": flag for name, flag in flags.items()})
    launch.assert_given(limit={None: 1.0, E4M3: 448.0, E5M2: 57344.0}[fp8])
    launch.assert_given(m=want.shape[0], n=want.shape[1], out_m=m, out_n=n)


def test_operands_of_a_cross_tail_lie_where_its_kernel_reads_them(launches):
    outer = Outer(vector(70), vector(150))
    first, second, x0 = product(), cast(), cast()
    bias, head, scale = vector(150), vector(150), Scale(vector(), 3)
    options = dict(want=ALL, y_scale_inv=scale, keep_s=True, has_row_sum=True)
    args = [outer, first, second], x0, bias, head
    # Three tiles of rows and two of columns.
    out = cross_tail.cross_tail(*args, **options, config=TuningConfig(32, 128, 4))
    bare = cross_tail.cross_tail([product(SHAPE)], product(SHAPE), want=PLAIN)
    launch, of_bare = launches
    assert_scaled(launch, z_0=first, z_1=second, z_2=None, x0=x0)
    launch.assert_given(outer_column=outer.column, outer_row=outer.row, bias=bias)
    launch.assert_given(head=head, y_scale_inv=scale.vector, y_at=3)
    launch.assert_given(block_m=32, block_n=128, s=PADDED)
    launch.assert_given(row_sums=(3, 150), dots=(2, 70))
    assert_written(launch, "y", out.y, ALL, programs=6)
    assert launch.grid == 6 and out.y.fp8.scale_inv is scale
    shapes = [x.shape for x in (out.s, out.row_sum, out.dots)]
    assert shapes == [PADDED, (150,), (70,)]
    # What it lacks is said to be absent.
    assert_scaled(of_bare, z_1=None, z_2=None)
    of_bare.assert_given(s=(1,), row_sums=(1,), dots=(1,))
    assert_written(of_bare, "y", bare.y, PLAIN, 1)
    assert bare.s is bare.row_sum is bare.dots is None
    for name in ("has_outer", "has_bias", "has_head", "has_s", "has_row_sum"):
        launch.assert_given(**{name: True})
        of_bare.assert_given(**{name: False})


def test_gradients_of_features_are_split_where_the_parts_end(launches):
    d_0, d_1, z_0, z_1 = product(), cast(), cast(), product()
    outer, bias = Outer(vector(70), vector(150)), 3 * vector(150)
    other, x0 = cast(), product()
    parts = [jax.ShapeDtypeStruct((70, n), BF16) for n in (13, 130)]
    gradients = [d_0, d_1, outer], [z_0, z_1], [None, bias], other, x0
    out = cross_gradient.cross_gradient(*gradients, parts=parts, shape=SHAPE)
    (launch,) = launches
    assert_scaled(launch, d_0=d_0, d_1=d_1, d_2=None, d_3=None, r=other, x0=x0)
    assert_scaled(launch, z_0=z_0, z_1=z_1, z_2=None)
    expected = np.stack([np.zeros(150), np.full(150, 3.0)])
    np.testing.assert_array_equal(launch.given["biases"], expected)
    launch.assert_given(outer_column=outer.column, outer_row=outer.row, has_outer=True)
    launch.assert_given(m=70, n=150, start=13, end=143, dhead=(3, 150))
    launch.assert_given(dfirst=(70, 13), dsecond=(70, 130))
    assert launch.grid == 9 and [x.shape for x in out.x0] == [x.shape for x in parts]
    assert out.head.shape == (150,)


def test_joined_features_are_followed_by_zeros(launches):
    first, second, scale = ones(70, 13), ones(70, 100), Scale(vector(), 1)
    out = joined_cast.joined_cast(first, second, want=ALL, scale_inv=scale)
    joined_cast.joined_cast(first, second, want=Forms())
    launch, without = launches
    launch.assert_given(first=first, second=second, start=13, end=113)
    launch.assert_given(scale_inv=scale.vector, scale_at=1)
    assert_written(launch, "y", out, ALL, launch.grid)
    without.assert_given(m=70, n=113, start=13, end=113)


@pytest.mark.parametrize(
    "norm, n, rstd, grid, xhat_scale",
    [
        ("none", 150, (1,), 4, 1.0),
        ("block", 600, (3, 70), 9, 16.0),
        ("layer", 150, (70,), 3, 16.0),
        ("rms", 1600, (70,), 3, 8.0),
    ],
)
def test_operands_of_a_norm_tail_and_its_gradient_lie_where_kernels_read_them(
    launches, norm, n, rstd, grid, xhat_scale
):
    of_rows, padded = norm in ("layer", "rms"), (80, n + -n % 16)
    want, gradient = (dataclasses.replace(x, shape=(70, n)) for x in (ALL, GRADIENT))
    z, d, r = product(padded), product(padded), ones(70, n)
    bias, gamma, beta = (i * vector(n) for i in (1, 2, 3))
    vectors = NormVectors(bias, *((gamma, beta) if of_rows else ()))
    scale, epilogue = Scale(vector(), 2), Epilogue(norm, "swish", 1e-3)
    options = dict(want=want, y_scale_inv=scale)
    out = norm_tail.norm_tail(z, r, vectors, epilogue=epilogue, **options)
    options = dict(want=gradient, dz_scale_inv=scale)
    residuals = out.residuals._replace(xhat=ones(*padded, dtype=E4M3))
    args = d, r, residuals, vectors
    back = norm_tail.norm_tail_backward(*args, epilogue=epilogue, **options)
    forward, backward = launches
    for launch, name, written, forms in (
        (forward, "", out.y, want),
        (backward, "_backward", back.dz, gradient),
    ):
        assert launch.kernel == f"{'row_' * of_rows}norm_tail{name}_kernel"
        for field, x in vectors._asdict().items():
            launch.assert_given(**{f"has_{field}": x is not None})
            launch.assert_given(**({} if x is None else {field: x}))
        launch.assert_given(r=r, norm=norm, activation="swish")
        tiles = launch.given["block_m"], launch.given["block_n"]
        m_tiles, n_tiles = (-(-x // y) for x, y in zip(padded, tiles, strict=True))
        assert launch.grid == m_tiles * (1 if of_rows else n_tiles)
        result = "dz" if name else "y"
        assert_written(launch, result, written, forms, m_tiles * n_tiles)
    assert_scaled(forward, z=z)
    assert_scaled(backward, d=d)
    forward.assert_given(r_n=n, y_scale_inv=scale.vector, y_at=2, epsilon=1e-3)
    forward.assert_given(xhat=padded, rstd=rstd, has_residuals=True)
    forward.assert_given(xhat_scale=xhat_scale)
    assert forward.grid == grid and (out.residuals.rstd is None) == (norm == "none")
    assert forward.given["xhat"].dtype == (BF16 if norm == "none" else E4M3)
    kept = residuals.xhat if norm == "none" else residuals.rstd
    backward.assert_given(xhat=residuals.xhat, xhat_n=padded[1], rstd=kept)
    backward.assert_given(dz_scale_inv=scale.vector, dz_at=2)
    for name, x in vectors._asdict().items():
        m_tiles = -(-70 // backward.given["block_m"])
        backward.assert_given(**{f"d{name}": (1,) if x is None else (m_tiles, n)})
        assert (getattr(back.vectors, name) is None) == (x is None)


@pytest.mark.parametrize(
    "xhat, norm, kept",
    [(None, "layer", None), (BF16, "layer", BF16), (E4M3, "none", BF16)],
)
def test_a_norm_tail_keeps_rows_as_it_is_asked_to(launches, xhat, norm, kept):
    epilogue = Epilogue(norm)
    out = norm_tail.norm_tail(product(SHAPE), epilogue=epilogue, want=PLAIN, xhat=xhat)
    launches[0].assert_given(has_residuals=kept is not None, xhat_scale=1.0)
    assert (out.residuals is None) == (kept is None)
    assert kept is None or out.residuals.xhat.dtype == kept


@pytest.mark.parametrize(
    "norm, n, activation, has_vectors, transposed, config",
    [
        ("none", 600, "relu", True, True, (64, 128, 4)),
        ("block", 600, "none", False, True, (32, 256, 8)),
        ("layer", 600, "relu", False, True, (32, 128, 8)),
        ("rms", 5, "none", True, True, (32, 16, 8)),
        ("rms", 600, "none", False, True, (32, 512, 8)),
        ("layer", 600, "none", False, False, (16, 1024, 8)),
    ],
)
def test_a_tile_holds_what_shares_a_statistic(
    launches, norm, n, activation, has_vectors, transposed, config
):
    z, vectors = Scaled(ones(64, n)), NormVectors(vector(n) if has_vectors else None)
    want = dataclasses.replace(ALL, transposed=transposed, shape=None)
    options = dict(epilogue=Epilogue(norm, activation), want=want)
    norm_tail.norm_tail(z, None, vectors, **options, y_scale_inv=Scale(vector()))
    launches[0].assert_given(block_m=config[0], block_n=config[1])
    assert launches[0].num_warps == config[2]


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
    z, vectors = product((16, 16)), NormVectors(gamma=vector(16))
    with pytest.raises(ValueError, match="'block' takes neither gamma nor beta"):
        norm_tail.norm_tail(z, None, vectors, epilogue=Epilogue("block"), want=Forms())
    why_not = functools.partial(norm_tail.why_not, 64, config=TuningConfig(64, 128, 4))
    assert why_not(512, norm="block").endswith("has tiles of 128 columns, not 256")
    assert why_not(512, norm="layer") is why_not(100, norm="block") is None
