import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from loka_jax.train.mesh import few_numbers
from loka_jax.train.mesh.devices import AXES, MeshConfig, mesh_of


@pytest.fixture(scope="module")
def mesh():
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    return mesh_of(MeshConfig(replicas=2, shards=4), 8, 1)


def numbers():
    """What each of eight devices has, along axis 0."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, (8, 5), np.uint32)
    bits[3] = 0x7FC00001, 0xFF800000, 1, 0x80000000, 0x7F7FFFFF  # NaN, -inf, ...
    ints = [0, 1, -1, 2**31 - 1, -(2**31), 65_535, 65_536, -65_536]
    return {
        "float": bits.view(np.float32),
        "int": np.asarray(ints, np.int32),
        "matrix": rng.normal(size=(8, 2, 3)).astype(np.float32),
    }


@pytest.mark.parametrize("way", ["gathered", "summed"])
def test_all_devices_get_the_bits_of_all(mesh, way):
    has = numbers()

    def each(part):
        part = jax.tree.map(lambda x: x[0], part)
        if way == "gathered":
            return few_numbers.gathered(part)
        total = jax.lax.psum(few_numbers.to_sum(part), AXES)
        return few_numbers.from_sum(total, part)

    found = jax.jit(
        jax.shard_map(each, mesh=mesh, in_specs=P(AXES), out_specs=P(), check_vma=False)
    )(has)
    for name, want in has.items():
        assert found[name].dtype == want.dtype
        for shard in found[name].addressable_shards:
            np.testing.assert_array_equal(
                np.asarray(shard.data).view(np.uint32), want.view(np.uint32)
            )
