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
from tests import support

FORMATS = ["int8", "e4m3"]
formats = pytest.mark.parametrize("format", FORMATS)


@pytest.fixture(scope="module", autouse=True)
def _eight_devices():
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")


def mesh_of(**axes):
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    devices = jax.devices()[: math.prod(axes.values())]
    return jax.make_mesh((*axes.values(),), (*axes,), axis_types=auto, devices=devices)


def over(mesh, function):
    """Returns a jitted function of arrays [n, ...], a slice for each device.

    Each device's result is a slice of the result.
    """
    spec = P(mesh.axis_names)

    def one(x):
        out = function(jax.tree.map(lambda y: y[0], x))
        return jax.tree.map(lambda y: y[None], out)

    return jax.jit(
        jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )


def values(devices, *shape, kind="normal"):
    rng = np.random.default_rng(7)
    if kind == "student":
        return rng.standard_t(3, (devices, *shape)).astype(np.float32)
    return rng.standard_normal((devices, *shape), np.float32)


def expected_amax(draws, block):
    """Returns E[amax] / sigma of a block, from blocks of values drawn alike."""
    blocks = draws.reshape(-1, block)
    return np.mean(np.max(np.abs(blocks), axis=1)) / np.std(draws)


@pytest.mark.parametrize("devices, block", [(4, 32), (4, 128), (4, 256), (2, 128)])
def test_int8_has_the_noise_of_the_model(devices, block):
    """Each of the n devices' roundings has variance (amax / 127)^2 / 12.

    So has that of the sum, whose amax is sqrt(n) times as large, unless two devices
    add up what they unpack: in all r n (k sigma / 127)^2 / 12 after r roundings, for a
    signal of n sigma^2. E[amax^2] is above E[amax]^2 by the variance of amax, 4 % for
    blocks of 32 normal values, less for larger: 0.2 dB; 0.1 dB more for a sample of
    2^17.
    """
    size, roundings = 1 << 17, 1 if devices == 2 else 2
    x = values(devices, size)
    run = over(
        mesh_of(d=devices),
        functools.partial(quantized_psum, axis_name="d", block=block),
    )
    out = np.asarray(run(x))
    exact = np.sum(x.astype(np.float64), axis=0)
    k = expected_amax(values(1, 1 << 20), block)
    model = 10 * np.log10(12 * 127**2 / (roundings * k**2))
    measured = support.sqnr_db(exact, out[0])
    assert abs(measured - model) < 0.3
    assert block != 128 or measured >= 40


@pytest.mark.parametrize("block", [32, 256])
def test_e4m3_has_the_noise_of_a_cast_twice(block):
    # A cast of normal values has 31.5 dB; two of them half of that.
    x = values(4, 1 << 15)
    quantized = functools.partial(
        quantized_psum, axis_name="d", format="e4m3", block=block
    )
    out = over(mesh_of(d=4), quantized)(x)
    exact = np.sum(x.astype(np.float64), axis=0)
    floor = support.FLOOR_DB["cast_e4m3"] - 10 * np.log10(2)
    assert support.sqnr_db(exact, np.asarray(out[0])) >= floor


@formats
@pytest.mark.parametrize("devices", [2, 3, 8])
@pytest.mark.parametrize("size", [1, 127, 1000, 8 * 128 * 4, 40_001])
def test_all_devices_have_the_same_bits_whatever_the_size(format, devices, size):
    x = values(devices, size, kind="student")
    quantized = functools.partial(quantized_psum, axis_name="d", format=format)
    out = np.asarray(over(mesh_of(d=devices), quantized)(x))
    chex.assert_shape(out, (devices, size))
    np.testing.assert_array_equal(out, np.broadcast_to(out[:1], out.shape))
    # A rounding moves a value by at most half a step of its block: that of e4m3 is
    # 32 at its largest, 448. The sum is off by the n roundings and that of the sum.
    step = {"int8": 1 / 127, "e4m3": 32 / 448}[format]
    blocks = np.pad(x, ((0, 0), (0, -size % 128))).reshape(devices, -1, 128)
    amax = np.repeat(np.abs(blocks).max(-1).sum(0), 128)[:size].astype(np.float64)
    errors = np.abs(out[0] - x.astype(np.float64).sum(0))
    assert np.all(errors <= 2 * amax * step / 2 * 1.05)
    assert np.any(errors > 0)


def test_the_order_of_the_devices_is_that_of_the_sum():
    """Values that are exact in 8 bits sum as float32 sums from the first device on."""
    x = np.zeros((8, 128), np.float32)
    x[:, 0] = [2.0**24, 1, 1, 1, 1, 1, 1, -(2.0**24)]
    x[:, 0] *= 127
    out = np.asarray(over(mesh_of(d=8), lambda y: quantized_psum(y, "d"))(x))
    in_order = functools.reduce(lambda a, b: np.float32(a + b), x[:, 0])
    assert in_order != x[:, 0].astype(np.float64).sum()
    np.testing.assert_array_equal(out[:, 0], in_order)


@formats
def test_a_tree_over_two_axes_keeps_shapes_dtypes_and_small_leaves(format):
    tree = {
        "kernel": values(8, 30, 41),
        "bias": 1e-6 * values(8, 5),
        "scale": np.full((8,), 3e-9, np.float32),
        "narrow": jnp.asarray(values(8, 7), jnp.bfloat16),
    }
    quantized = functools.partial(quantized_psum, axis_name=("a", "b"), format=format)
    out = over(mesh_of(a=2, b=4), quantized)(tree)
    chex.assert_trees_all_equal_shapes_and_dtypes(out, jax.tree.map(jnp.asarray, tree))
    for name, x in tree.items():
        exact = np.asarray(x, np.float64).sum(0)
        ratio = support.sqnr_db(exact, np.asarray(out[name][0], np.float64))
        assert ratio > (20 if format == "e4m3" else 30), name
    flat = [np.asarray(y) for y in jax.tree.leaves(out)]
    for y in flat:
        np.testing.assert_array_equal(y, np.broadcast_to(y[:1], y.shape))


@formats
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_a_fault_of_one_device_is_seen_on_all(format, devices, fault):
    x = values(devices, 5000)
    x[1, 3000] = fault
    quantized = functools.partial(quantized_psum, axis_name="d", format=format)
    out = np.asarray(over(mesh_of(d=devices), quantized)(x))
    faulty = np.arange(5000) // 128 == 3000 // 128
    np.testing.assert_array_equal(np.isnan(out), np.broadcast_to(faulty, out.shape))


def test_zeros_stay_zero_and_one_device_keeps_its_bits():
    zeros = np.zeros((4, 300), np.float32)
    quantized = functools.partial(quantized_psum, axis_name="d")
    np.testing.assert_array_equal(over(mesh_of(d=4), quantized)(zeros), zeros)
    x = values(1, 300)
    np.testing.assert_array_equal(over(mesh_of(d=1), quantized)(x), x)


@pytest.mark.parametrize("devices", [1, 2])
def test_arrays_without_values_have_a_sum_without_values(devices):
    tree = {"a": np.zeros((devices, 0), np.float32), "b": {}}
    quantized = functools.partial(quantized_psum, axis_name="d")
    out = over(mesh_of(d=devices), quantized)(tree)
    chex.assert_trees_all_equal_shapes_and_dtypes(out, jax.tree.map(jnp.asarray, tree))


# `= u8[8,64]{1,0} all-gather(`, or a tuple of such types.
COLLECTIVE = re.compile(
    r"= (\([^()]*\)|\S+) (all-to-all|all-gather|all-reduce|reduce-scatter|"
    r"collective-permute)(?:-start)?\("
)


@formats
def test_two_collectives_of_bytes_travel(format):
    mesh = mesh_of(replica=2, shard=4)
    quantized = functools.partial(
        quantized_psum, axis_name=("replica", "shard"), format=format
    )
    tree = {"a": values(8, 10_000), "b": jnp.asarray(values(8, 3), jnp.bfloat16)}
    hlo = over(mesh, quantized).lower(tree).compile().as_text()
    found = {kind: types for types, kind in COLLECTIVE.findall(hlo)}
    assert len(COLLECTIVE.findall(hlo)) == 2
    assert set(found) == {"all-gather", "all-to-all"}
    for types in found.values():
        arrays = re.findall(r"(\w+)\[([\d,]+)\]", types)
        assert {dtype for dtype, _ in arrays} == {"u8"}
        # 132 bytes a block; 79 blocks and one more make 8 parts of 12.
        sizes = [math.prod(map(int, shape.split(","))) for _, shape in arrays]
        assert sum(sizes) == 8 * 12 * 132


def test_two_devices_need_one_collective():
    quantized = functools.partial(quantized_psum, axis_name="d")
    hlo = over(mesh_of(d=2), quantized).lower(values(2, 10_000)).compile().as_text()
    ((types, kind),) = COLLECTIVE.findall(hlo)
    assert kind == "all-gather"
    ((dtype, shape),) = re.findall(r"(\w+)\[([\d,]+)\]", types)
    # 79 blocks make 2 parts of 40, of both devices.
    assert dtype == "u8" and math.prod(map(int, shape.split(","))) == 4 * 40 * 132


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_result_needs_no_mark_of_varying(devices):
    mesh = mesh_of(d=devices)
    x = values(devices, 1000)
    both = [
        jax.jit(
            jax.shard_map(
                lambda y: quantized_psum(y[0], "d"),
                mesh=mesh,
                in_specs=P("d"),
                out_specs=P(),
                check_vma=check,
            )
        )(x)
        for check in (True, False)
    ]
    np.testing.assert_array_equal(*both)


@pytest.mark.parametrize("devices", [1, 2])
def test_bad_operands_are_refused(devices):
    mesh = mesh_of(d=devices)
    x = np.ones((devices, 4), np.float32)
    for error, function in (
        ("must be one of", lambda y: quantized_psum(y, "d", block=100)),
        ("must be one of", lambda y: quantized_psum(y[:0], "d", block=100)),
        ("int32 values", lambda y: quantized_psum(y.astype(jnp.int32), "d")),
        ("no derivative", jax.grad(lambda y: quantized_psum(y, "d").sum())),
    ):
        with pytest.raises(ValueError, match=error):
            over(mesh, function)(x)


def summed_gradients(mesh, marked, check_vma=True):
    """Returns the gradients of replicated parameters, summed over all devices."""

    def one(w, x):
        if marked:
            w = jax.lax.pcast(w, mesh.axis_names, to="varying")
        return quantized_psum(jax.grad(lambda w: jnp.sum(w * x))(w), mesh.axis_names)

    axes = P(mesh.axis_names)
    run = jax.shard_map(
        one, mesh=mesh, in_specs=(P(), axes), out_specs=P(), check_vma=check_vma
    )
    return jax.jit(run)(jnp.ones((1, 3)), jnp.ones((mesh.size, 3)))


@pytest.mark.parametrize("axes", [{"d": 8}, {"a": 2, "b": 4}])
def test_gradients_that_jax_has_summed_are_refused(axes):
    mesh = mesh_of(**axes)
    with pytest.raises(ValueError, match="pcast.*check_vma=False"):
        summed_gradients(mesh, marked=False)
    for options in ({"marked": True}, {"marked": False, "check_vma": False}):
        np.testing.assert_allclose(summed_gradients(mesh, **options), 8, rtol=1e-6)


def test_an_array_must_vary_over_all_axes_of_several_devices():
    one = jax.shard_map(
        lambda x: quantized_psum(x[0], ("a", "b")),
        mesh=mesh_of(a=2, b=4),
        in_specs=P("a"),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match=r"devices of \['b'\]"):
        jax.jit(one)(jnp.ones((2, 3)))


def test_one_device_sums_what_does_not_vary():
    np.testing.assert_array_equal(summed_gradients(mesh_of(d=1), marked=False), 1)


@pytest.mark.parametrize("wire, floor", [("f32", 130), ("bf16", 45), ("int8", 40)])
def test_gradients_travel_as_asked(wire, floor):
    tree = {"w": values(4, 1 << 14), "b": values(4, 128)}
    out = over(mesh_of(d=4), lambda t: sum_gradients(t, ("d",), wire))(tree)
    chex.assert_trees_all_equal_shapes_and_dtypes(out, jax.tree.map(jnp.asarray, tree))
    exact = tree["w"].astype(np.float64).sum(0)
    assert support.sqnr_db(exact, np.asarray(out["w"][0])) >= floor
