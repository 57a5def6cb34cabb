"""Sums over devices in 8 bits: what is joined, rounded, summed and refused.

Devices are examples of `vmap` here; meshes are in tests/whole.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.ops.collectives import quantized_psum, sum_gradients


def over(function):
    """Returns a compiled function of arrays with an example for each device."""
    return jax.jit(jax.vmap(function, axis_name="d"))


@pytest.mark.parametrize("wire, error", [("f32", 1e-6), ("bf16", 2.0**-7)])
def test_gradients_are_sums_in_the_dtype_of_the_wire(wire, error):
    rng = np.random.default_rng(0)
    tree = {"w": rng.normal(size=(4, 3, 5)), "b": rng.normal(size=(4, 2))}
    tree = {"w": jnp.float32(tree["w"]), "b": tree["b"].astype(jnp.bfloat16)}
    out = over(lambda x: sum_gradients(x, "d", wire))(tree)
    for name, x in tree.items():
        exact = np.asarray(x, np.float64)
        assert out[name].dtype == x.dtype
        # At most four additions, each of what it rounds.
        bound = 4 * max(error, 2.0**-8 if name == "b" else 0) * np.abs(exact).sum(0)
        assert np.all(np.abs(np.asarray(out[name], np.float64) - exact.sum(0)) <= bound)


@pytest.mark.parametrize(
    "error, function",
    [
        ("must be one of", lambda y: quantized_psum(y[:0], "d", block=100)),
        ("int32 values", lambda y: quantized_psum(y.astype(jnp.int32), "d")),
        ("no derivative", jax.grad(lambda y: quantized_psum(y, "d").sum())),
        ("must be 'f32', 'bf16' or 'int8'", lambda y: sum_gradients(y, "d", "fp16")),
    ],
)
def test_bad_operands_are_refused(error, function):
    with pytest.raises(ValueError, match=error):
        over(function)(np.ones((1, 4), np.float32))


@pytest.mark.parametrize("format, half_step", [("int8", 0.5 / 127), ("e4m3", 16 / 448)])
def test_the_sum_of_devices_in_8_bits_is_off_by_two_roundings(
    monkeypatch, format, half_step
):
    # Under `vmap` there is no mark of what does not vary.
    gather = jax.lax.all_gather
    unmarked = lambda x, axis, tiled, to: gather(x, axis, tiled=tiled)  # noqa: E731
    monkeypatch.setattr(jax.lax, "all_gather", unmarked)
    # Some blocks are a thousand times as large as others.
    x = np.random.default_rng(0).normal(size=(4, 1000)).astype(np.float32)
    x[:, 500:] *= 1000
    summed = functools.partial(quantized_psum, axis_name="d", format=format)
    out = np.asarray(over(summed)(x))
    np.testing.assert_array_equal(out, np.broadcast_to(out[:1], out.shape))
    blocks = np.pad(x, ((0, 0), (0, 24))).reshape(4, -1, 128)
    amax = np.repeat(np.abs(blocks).max(-1).sum(0), 128)[:1000].astype(np.float64)
    errors = np.abs(out[0] - x.astype(np.float64).sum(0))
    # A rounding moves a value by at most half a step of its block, the largest one.
    assert np.all(errors <= 2 * amax * half_step * 1.05) and errors.any()
