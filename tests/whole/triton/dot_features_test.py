"""`dot_features` by Triton against XLA's, interpreted and on a GPU."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from loka_jax.ops import interaction
from loka_jax.triton import dot_features as triton
from loka_jax.triton.dot_features import why_not
from tests import support
from tests.support.triton import (
    compiled,
    interpreted,
    num_kernels,
    on_gpu,
    spilled_bytes,
)

__all__ = ["interpreted", "on_gpu"]

has_bottom = pytest.mark.parametrize("has_bottom", [True, False])


@pytest.fixture(params=["interpreted", pytest.param("on_gpu", marks=pytest.mark.gpu)])
def anywhere(request):
    """Runs a test interpreted and on a GPU."""
    request.getfixturevalue(request.param)


def _shapes(batch, fields, dim, has_bottom):
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    return shape((batch, dim)) if has_bottom else None, shape((batch, fields, dim))


def _width(fields, dim, has_bottom, multiple=None):
    n = fields + has_bottom
    return interaction.padded(dim * has_bottom + n * (n - 1) // 2, multiple)


def _assert_same(ours, theirs):
    """Asserts that two sums of the same products were rounded to the same or beside."""
    if theirs is None:
        assert ours is None
        return
    assert ours.dtype == theirs.dtype == jnp.bfloat16
    ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
    size = np.abs(theirs).max()
    error = np.abs(ours - theirs)
    # One step of bfloat16; where values cancel, of the largest value's sum in float32.
    np.testing.assert_array_less(error, 2**-7 * np.abs(theirs) + 1e-5 * size)
    assert np.mean(error == 0) > 0.97


def _check(batch, fields, dim, has_bottom, multiple=None):
    parts = _shapes(batch, fields, dim, has_bottom)
    args = [
        x and support.normal(*x.shape, seed=i, dtype=x.dtype)
        for i, x in enumerate(parts)
    ]
    width = _width(fields, dim, has_bottom, multiple)
    expected = functools.partial(
        interaction.dot_features, multiple=multiple, implementation="xla"
    )
    out, vjp = jax.vjp(expected, *args)
    ours = triton.dot_features(*args, width=width)
    assert ours.shape == out.shape
    _assert_same(ours, out)
    g = support.normal(batch, width, seed=2, dtype=jnp.bfloat16)
    for ours, theirs in zip(
        triton.dot_features_backward(*args, g), vjp(g), strict=True
    ):
        _assert_same(ours, theirs)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(
    "sizes, has_bottom",
    [
        ((9, 2, 16), False),
        ((17, 26, 16), True),
        ((3, 7, 5), True),
        ((3, 7, 5), False),
        ((2, 40, 24), False),
        ((2, 3, 128), True),
    ],
)
def test_features_and_gradients_are_those_of_xla(sizes, has_bottom):
    _check(*sizes, has_bottom)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("has_bottom, multiple", [(True, 1), (False, 128), (True, 128)])
def test_zeros_follow(has_bottom, multiple):
    _check(3, 5, 16, has_bottom, multiple)


@pytest.mark.usefixtures("anywhere")
def test_nan_stays_in_its_example():
    args = support.normal(9, 4, 16, dtype=jnp.bfloat16).at[3, 1].set(jnp.nan)
    out = triton.dot_features(None, args, width=16)
    faulty = np.isnan(np.asarray(out, np.float32))
    assert faulty[3].sum() == 3 and not np.delete(faulty, 3, 0).any()


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    "fields, dim, has_bottom",
    [
        (2, 16, True),
        (15, 32, True),
        (26, 16, True),
        (26, 128, False),
        (31, 64, True),
        (32, 256, False),
        (63, 16, True),
        (63, 256, True),
    ],
)
def test_many_programs(fields, dim, has_bottom):
    _check(1003, fields, dim, has_bottom)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
def test_the_operation_runs_the_kernels():
    args = _shapes(100, 26, 16, True)
    text = jax.jit(interaction.dot_features).lower(*args).as_text()
    assert "triton_kernel_call" in text


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
def test_launches_repeat_bit_by_bit():
    bottom = support.normal(10_001, 16, dtype=jnp.bfloat16)
    embeddings = support.normal(10_001, 26, 16, seed=1, dtype=jnp.bfloat16)
    g = support.normal(10_001, _width(26, 16, True), seed=2, dtype=jnp.bfloat16)
    f = jax.jit(_operation)
    first = f(bottom, embeddings, g)
    for _ in range(100):
        jax.tree.map(np.testing.assert_array_equal, first, f(bottom, embeddings, g))


SIZES = [(26, 16, True), (8, 24, False), (63, 256, True)]
SLOW_SIZES = itertools.product([8, 26, 63], [16, 24, 64, 256], [True, False])


@pytest.mark.parametrize(
    "fields, dim, has_bottom",
    SIZES
    + [pytest.param(*s, marks=pytest.mark.slow) for s in SLOW_SIZES if s not in SIZES],
)
def test_programs_for_hopper_do_not_spill(fields, dim, has_bottom):
    sizes = fields, dim, has_bottom
    args = _shapes(65536, *sizes)
    width = _width(*sizes)
    g = jax.ShapeDtypeStruct((65536, width), jnp.bfloat16)
    forward = functools.partial(triton.dot_features, width=width)
    backward = functools.partial(triton.dot_features_backward)  # traced anew
    for program in (compiled(forward, *args), compiled(backward, *args, g)):
        assert spilled_bytes(program.ptxas_report()) == 0
        assert "mma" in program.ptx
        assert "ld.global.v4" in program.ptx  # 16 bytes of a vector a load


def _operation(bottom, embeddings, g):
    run = functools.partial(interaction.dot_features, implementation="triton")
    out, vjp = jax.vjp(run, bottom, embeddings)
    return out, vjp(g)


@has_bottom
def test_the_operation_and_its_gradient_are_a_kernel_each(has_bottom):
    args = _shapes(8, 3, 16, has_bottom)
    g = jax.ShapeDtypeStruct((8, _width(3, 16, has_bottom)), jnp.bfloat16)
    assert num_kernels(_operation, *args, g) == 2


@has_bottom
def test_the_operation_lowers_under_vmap_and_shard_map(has_bottom):
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    args = _shapes(8, 3, 16, has_bottom)
    g = jax.ShapeDtypeStruct((8, _width(3, 16, has_bottom)), jnp.bfloat16)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((8,), ("data",), axis_types=auto)
    rows = dict(in_specs=P("data"), out_specs=P("data"))
    assert num_kernels(jax.shard_map(_operation, mesh=mesh, **rows), *args, g) == 2
    batched = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((5, *x.shape), x.dtype), (*args, g)
    )
    assert num_kernels(jax.vmap(_operation), *batched) == 2


@pytest.mark.parametrize(
    "sizes, dtype, reason",
    [
        ((4, 27, 16), jnp.bfloat16, None),
        ((4, 64, 256), jnp.bfloat16, None),
        ((4, 65, 16), jnp.bfloat16, "n=65 is more than 64"),
        ((4, 27, 257), jnp.bfloat16, "D=257 is more than 256"),
        ((4, 1, 16), jnp.bfloat16, "n=1: there are no pairs"),
        ((0, 27, 16), jnp.bfloat16, "B=0, D=16: there is nothing to multiply"),
        ((4, 27, 16), jnp.float32, "float32 is not bfloat16"),
    ],
)
def test_refused_operands_have_a_reason(sizes, dtype, reason):
    assert why_not(*sizes, dtype) == reason
    if reason is not None:
        with pytest.raises(ValueError, match=reason):
            triton.dot_features(None, jnp.zeros(sizes, dtype), width=4096)
