"""Sums over devices in 8 bits: what is joined, rounded, summed and refused.

Devices are examples of `vmap` here; meshes are in tests/whole.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.ops.collectives import quantized_psum, sum_gradients

KEY = jax.random.key(0)


@pytest.fixture
def unmarked(monkeypatch):
    """Leaves out the mark of what does not vary, which `vmap` does not have."""
    gather = jax.lax.all_gather
    plain = lambda x, axis, tiled, to: gather(x, axis, tiled=tiled)  # noqa: E731
    monkeypatch.setattr(jax.lax, "all_gather", plain)


def over(function):
    """Returns a compiled function of arrays with an example for each device."""
    return jax.jit(jax.vmap(function, axis_name="d"))


@pytest.mark.parametrize("wire, error", [("f32", 1e-6), ("bf16", 2.0**-7)])
def test_gradients_are_sums_in_the_dtype_of_the_wire(wire, error):
    rng = np.random.default_rng(0)
    tree = {"w": rng.normal(size=(4, 3, 5)), "b": rng.normal(size=(4, 2))}
    tree = {"w": jnp.float32(tree["w"]), "b": tree["b"].astype(jnp.bfloat16)}
    out = over(lambda x: sum_gradients(x, "d", wire, KEY))(tree)
    for name, x in tree.items():
        exact = np.asarray(x, np.float64)
        assert out[name].dtype == x.dtype
        # At most four additions, each of what it rounds.
        bound = 4 * max(error, 2.0**-8 if name == "b" else 0) * np.abs(exact).sum(0)
        assert np.all(np.abs(np.asarray(out[name], np.float64) - exact.sum(0)) <= bound)


@pytest.mark.parametrize(
    "error, function",
    [
        ("must be one of", lambda y: quantized_psum(y[:0], "d", KEY, block=100)),
        ("int32 values", lambda y: quantized_psum(y.astype(jnp.int32), "d", KEY)),
        ("no derivative", jax.grad(lambda y: quantized_psum(y, "d", KEY).sum())),
        (
            "must be 'f32', 'bf16' or 'int8'",
            lambda y: sum_gradients(y, "d", "fp16", KEY),
        ),
    ],
)
def test_bad_operands_are_refused(error, function):
    with pytest.raises(ValueError, match=error):
        over(function)(np.ones((1, 4), np.float32))


@pytest.mark.parametrize("format, step", [("int8", 1 / 127), ("e4m3", 32 / 448)])
def test_the_sum_of_devices_in_8_bits_is_off_by_two_roundings(unmarked, format, step):
    # Some blocks are a thousand times as large as others.
    x = np.random.default_rng(0).normal(size=(4, 1000)).astype(np.float32)
    x[:, 500:] *= 1000
    summed = functools.partial(quantized_psum, axis_name="d", key=KEY, format=format)
    out = np.asarray(over(summed)(x))
    np.testing.assert_array_equal(out, np.broadcast_to(out[:1], out.shape))
    blocks = np.pad(x, ((0, 0), (0, 24))).reshape(4, -1, 128)
    amax = np.repeat(np.abs(blocks).max(-1).sum(0), 128)[:1000].astype(np.float64)
    errors = np.abs(out[0] - x.astype(np.float64).sum(0))
    # A rounding moves a value by at most a step of its block, the largest one.
    assert np.all(errors <= 2 * amax * step * 1.05) and errors.any()


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("format, step", [("int8", 1 / 127), ("e4m3", 2**-9 / 448)])
def test_a_small_gradient_beside_a_large_one_arrives(unmarked, format, step, devices):
    steps, large = 500, {"int8": 1e4, "e4m3": 1e6}[format]
    tree = {"a": np.ones((devices, 128), np.float32), "b": np.ones((devices, 0))}
    tree["a"][:, 0] = large
    tree = jax.tree.map(jnp.float32, tree)

    def total(key):
        one = functools.partial(quantized_psum, axis_name="d", key=key, format=format)
        return jax.vmap(one, axis_name="d")(tree)

    keys = jax.random.split(KEY, steps)
    out = jax.jit(jax.vmap(total))(keys)
    assert out["b"].shape == (steps, devices, 0)
    again = jax.jit(total)(keys[7])["a"]  # as a run that goes on takes a step again
    np.testing.assert_array_equal(out["a"][7], again)
    small = np.asarray(out["a"], np.float64)[:, 0, 1:]
    # A rounding of x by a step s has a variance of at most s x: of each device's
    # part, and with three or more of the sum, whose block has a step so much larger.
    roundings = devices + (devices > 2) * devices**2
    deviation = np.sqrt(roundings * step * large / steps)
    assert np.all(np.abs(small.mean(axis=0) - devices) < 5 * deviation)
    assert abs(small.mean() - devices) < 5 * deviation / np.sqrt(127) < devices / 4
