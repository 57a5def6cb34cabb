"""Sums over eight devices in 8 bits: error, equal bits, faults, what travels."""

import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from loka_jax.ops.collectives import quantized_psum, sum_gradients

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")

KEY = jax.random.key(0)


def mesh_of(**axes):
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    devices = jax.devices()[: math.prod(axes.values())]
    return jax.make_mesh((*axes.values(),), (*axes,), axis_types=auto, devices=devices)


def over(mesh, function=None, **options):
    """Returns a jitted sum (or function) of arrays [n, ...], a slice of each device."""
    spec = P(mesh.axis_names)
    how = dict(axis_name=mesh.axis_names, key=KEY)
    summed = functools.partial(quantized_psum, **how, **options)

    def one(x):
        out = (function or summed)(jax.tree.map(lambda y: y[0], x))
        return jax.tree.map(lambda y: y[None], out)

    return jax.jit(
        jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )


def values(devices, *shape):
    return np.random.default_rng(7).standard_normal((devices, *shape), np.float32)


@pytest.mark.parametrize(
    "format, axes, size",
    [
        ("int8", dict(d=2), 1),
        ("e4m3", dict(d=3), 127),
        ("e4m3", dict(d=2), 8 * 128 * 4),
        ("int8", dict(a=2, b=4), 40_001),
    ],
)
def test_all_devices_have_the_same_bits_whatever_the_size(format, axes, size):
    mesh = mesh_of(**axes)
    x = np.random.default_rng(7).standard_t(3, (mesh.size, size)).astype(np.float32)
    x[:, 130:500] = 0  # a whole block of zeros, which stay
    tree = {"x": x, "small": 3e-9 * x[:, :1], "narrow": jnp.bfloat16(x[:, :7])}
    found = over(mesh, format=format)(tree)
    chex.assert_trees_all_equal_shapes_and_dtypes(found, jax.tree.map(jnp.array, tree))
    for y in map(np.asarray, found.values()):
        np.testing.assert_array_equal(y, np.broadcast_to(y[:1], y.shape))
    small = np.asarray(tree["small"], np.float64).sum(0)
    np.testing.assert_allclose(found["small"][0], small, rtol=1, atol=1e-10)
    # A rounding moves a value by at most a step of its block: that of e4m3 is
    # 32 at its largest, 448. The sum is off by the n roundings and that of the sum.
    step = {"int8": 1 / 127, "e4m3": 32 / 448}[format]
    blocks = np.pad(x, ((0, 0), (0, -size % 128))).reshape(mesh.size, -1, 128)
    amax = np.repeat(np.abs(blocks).max(-1).sum(0), 128)[:size].astype(np.float64)
    errors = np.abs(found["x"][0] - x.astype(np.float64).sum(0))
    assert np.all(errors <= 2 * amax * step * 1.05)
    assert size == 1 or np.any(errors > 0)


@pytest.mark.parametrize(
    "format, devices, fault", [("int8", 2, np.nan), ("e4m3", 4, np.inf)]
)
def test_a_fault_of_one_device_is_seen_on_all(format, devices, fault):
    x = values(devices, 5000)
    x[1, 3000] = fault
    out = np.asarray(over(mesh_of(d=devices), format=format)(x))
    faulty = np.arange(5000) // 128 == 3000 // 128
    np.testing.assert_array_equal(np.isnan(out), np.broadcast_to(faulty, out.shape))


# `= u8[8,64]{1,0} all-gather(`, or a tuple of such types.
COLLECTIVE = re.compile(
    r"= (\([^()]*\)|\S+) (all-to-all|all-gather|all-reduce|reduce-scatter|"
    r"collective-permute)(?:-start)?\("
)


@pytest.mark.parametrize(
    "axes, expected, blocks",
    [
        # 79 blocks and one more make 8 parts of 12.
        (dict(replica=2, shard=4), ["all-gather", "all-to-all"], 8 * 12),
        # 2 parts of 40, of both devices.
        (dict(d=2), ["all-gather"], 4 * 40),
    ],
)
def test_few_collectives_of_bytes_travel(axes, expected, blocks):
    mesh = mesh_of(**axes)
    tree = {"a": values(mesh.size, 10_000), "b": jnp.bfloat16(values(mesh.size, 3))}
    hlo = over(mesh).lower(tree).compile().as_text()
    found = COLLECTIVE.findall(hlo)
    assert sorted(kind for _, kind in found) == expected
    for types, _ in found:
        arrays = re.findall(r"(\w+)\[([\d,]+)\]", types)
        assert {dtype for dtype, _ in arrays} == {"u8"}
        sizes = [math.prod(map(int, shape.split(","))) for _, shape in arrays]
        assert sum(sizes) == blocks * 132


def test_gradients_that_jax_has_summed_are_refused():
    mesh = mesh_of(a=2, b=4)

    def summed(marked, check_vma=True):
        def one(w, x):
            w = jax.lax.pcast(w, ("a", "b"), to="varying") if marked else w
            return quantized_psum(
                jax.grad(lambda w: jnp.sum(w * x))(w), ("a", "b"), KEY
            )

        specs = dict(in_specs=(P(), P(("a", "b"))), out_specs=P())
        run = jax.shard_map(one, mesh=mesh, check_vma=check_vma, **specs)
        return jax.jit(run)(jnp.ones((1, 3)), jnp.ones((8, 3)))

    with pytest.raises(ValueError, match="pcast.*check_vma=False"):
        summed(marked=False)
    for result in (summed(marked=True), summed(marked=False, check_vma=False)):
        np.testing.assert_allclose(result, 8, rtol=1e-6)


def test_gradients_travel_in_int8_as_asked():
    tree = {"w": values(4, 1 << 14), "b": values(4, 128)}
    mesh = mesh_of(d=4)
    out = over(mesh, lambda t: sum_gradients(t, ("d",), "int8", KEY))(tree)
    chex.assert_trees_all_equal(out, over(mesh)(tree))
