"""How long lists of ids must be, and that a batch that needs more gets more."""

import itertools

import jax
import numpy as np
import pytest

from loka_jax.data import Batch
from loka_jax.ops.tables import TableSpec
from loka_jax.train.mesh.devices import (
    MeshConfig,
    mesh_of,
    require_places,
    used_devices,
)
from loka_jax.train.mesh.routing import Ahead, Router, capacity_for, with_needs

TABLES = TableSpec(rows=(40_000, 50), dim=4)


def test_capacities_leave_room_and_come_from_a_ladder():
    for need in (0, 1, 15, 100, 20_000, 10**6):
        capacity = capacity_for(float(need), 2**31)
        assert need + 4 * np.sqrt(need) <= capacity <= 1.06 * need + 5 * need**0.5 + 32
        assert capacity % 16 == 0
    rungs = {capacity_for(float(need), 2**31) for need in range(20_000, 21_000)}
    assert len(rungs) <= 3
    assert capacity_for(1000.0, 900) == 900


def batch_of(distinct, size=256):
    ids = np.zeros((size, 2), np.int32)
    ids[:, 0] = np.arange(size) % distinct
    return Batch(
        dense=np.zeros((size, 1), np.float32),
        ids=ids,
        labels=np.zeros(size, np.float32),
        weights=np.ones(size, np.float32),
    )


@pytest.fixture(scope="module")
def mesh():
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    return mesh_of(MeshConfig(replicas=4, shards=2), 256, 1)


def test_lists_that_do_not_fit_are_routed_again(mesh):
    router = Router(mesh, TABLES)
    _, few = router(batch_of(4))
    assert router.climbs == 0
    before = router.capacity
    _, many = router(batch_of(256))
    assert router.climbs == 1
    assert int(few.need) <= before < int(many.need) <= router.capacity
    assert all(int(x) <= 0 for x in few.missing + many.missing)
    assert int(many.total_weight) == 256 and int(many.bad_ids) == 0
    router(batch_of(4))
    assert router.climbs == 1


def test_each_step_routes_the_batch_of_three_steps_later(mesh):
    router, made = Router(mesh, TABLES), []
    batches = [(i, batch_of(4 + i)) for i in range(6)]

    def source():
        for item in batches:
            made.append(item[0])
            yield item

    run_alone, alone = router._run, []
    router._run = lambda *args: alone.append(args) or run_alone(*args)
    for i, (position, batch) in enumerate(router.ahead(source())):
        assert position == i and batch is batches[i][1]
        assert made[-1] == min(i + 3, 5)
        alone.clear()
        placed, routed = router(batch)
        assert bool(alone) == (i < 3)  # later ones were routed by a step
        assert int(routed.need) == int(Router(mesh, TABLES)(batch)[1].need)
        (coming,) = router.next_to_route([batch], (placed,))
        np.testing.assert_array_equal(coming.ids, batches[i + 3 if i < 3 else i][1].ids)
        router.keep([batch], [routed], run_alone(router.capacity, coming))


def test_the_host_reads_its_own_memory(mesh):
    router = Router(mesh, TABLES)
    (routed,), needs = router._run(router.capacity, router.put(batch_of(4)))
    assert needs.sharding.memory_kind == "pinned_host"
    assert int(Ahead(routed, needs, 0).need()) == int(routed.need)


def test_a_step_writes_over_the_ways_of_the_batch_before(mesh):
    router = Router(mesh, TABLES)
    batches = [batch_of(4 + i) for i in range(2)]
    placed, routed = router.together(batches)
    made = with_needs([router._run(router.capacity, x)[0][0] for x in placed])
    assert not set(map(id, router.spent(placed))) & set(map(id, routed))  # new ones
    router.keep(batches, routed, made)
    assert router.spent(placed[:1])[0] is routed[0]
    assert router.spent(placed)[0] is routed[1]  # the other is made
    router.keep(batches[:1], routed[:1], made)
    router.capacity += 8
    assert router.spent(placed[:1])[0].capacity == router.capacity


def test_a_call_routes_the_batches_of_the_call_after_the_next(mesh):
    router = Router(mesh, TABLES, steps_per_call=2)
    batches = [batch_of(4 + i) for i in range(8)]
    run_alone, alone = router._run, []
    router._run = lambda *args: alone.append(args) or run_alone(*args)
    steps = router.ahead(enumerate(batches))
    for first in range(0, 8, 2):
        taken = [batch for _, batch in itertools.islice(steps, 2)]
        assert all(a is b for a, b in zip(taken, batches[first:], strict=False))
        alone.clear()
        placed, routed = router.together(taken)
        assert bool(alone) == (first < 4)
        for one, batch in zip(routed, taken, strict=True):
            assert int(one.need) == int(Router(mesh, TABLES)(batch)[1].need)
        coming = router.next_to_route(taken, placed)
        later = batches[first + 4 : first + 6] or taken
        for one, batch in zip(coming, later, strict=True):
            np.testing.assert_array_equal(one.ids, batch.ids)
        made = [run_alone(router.capacity, one)[0][0] for one in coming]
        router.keep(taken, routed, with_needs(made))


def test_batches_of_a_call_have_lists_of_the_same_length(mesh):
    router = Router(mesh, TABLES, steps_per_call=2)
    small, large = batch_of(4), batch_of(256)
    _, (first, second) = router.together([small, large])
    assert first.capacity == second.capacity == router.capacity >= int(second.need)


def test_what_was_routed_before_lists_grew_is_routed_again(mesh):
    router = Router(mesh, TABLES)
    first, *others = [batch_of(n) for n in (4, 5, 6, 256, 7)]
    steps = router.ahead((i, batch) for i, batch in enumerate([first, *others]))
    _, batch = next(steps)
    placed, routed = router.together([batch])
    small = router.capacity
    (coming,) = router.next_to_route([batch], placed)
    router.keep([batch], routed, router._run(small, coming))
    for _, batch in steps:
        placed, routed = router.together([batch])
        assert routed[0].capacity == router.capacity
        assert router.spent(placed)[0].capacity == router.capacity
        (coming,) = router.next_to_route([batch], placed)
        router.keep([batch], routed, router._run(small, coming))
    assert router.climbs == 1 and router.capacity > small


@pytest.mark.parametrize(
    "options, size, reason",
    [
        ({"replicas": 3, "shards": 4}, 96, "are 12 devices, and there are 8"),
        ({"replicas": 16}, 96, "are 16 devices, and there are 8"),
        ({"replicas": 2, "shards": 4}, 100, "100 must be a multiple of 8 devices"),
        (
            {"replicas": 3},
            96,
            "--mesh.replicas 3 does not divide 8 devices: use 1 or 2 or 4 or 8, or "
            "give --mesh.shards, too",
        ),
    ],
)
def test_meshes_that_do_not_fit_are_refused(mesh, options, size, reason):
    with pytest.raises(ValueError, match=reason):
        mesh_of(MeshConfig(**options), size, 1)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"replicas": 3, "shards": 2}, "Devices: 6 of 8, in 3 groups of 2."),
        ({"replicas": 4}, "Devices: 8 of 8, in 4 groups of 2."),
        ({"shards": 4}, "Devices: 4 of 8, in 1 group of 4."),
    ],
)
def test_meshes_say_how_many_devices_they_use(mesh, options, sentence):
    found = mesh_of(MeshConfig(**options), 96, 1)
    assert found is not None and used_devices(found) == sentence


def test_odd_meshes_are_refused(mesh):
    with pytest.raises(ValueError, match="--mesh.shards 3 must be a power of two"):
        MeshConfig(shards=3)
    with pytest.raises(ValueError, match="--mesh.replicas 0 must be at least 1"):
        MeshConfig(replicas=0)
    with pytest.raises(ValueError, match="multiple of 8 devices x 3"):
        mesh_of(MeshConfig(replicas=1, shards=8), 64, 3)
    rows = (2**31 - 1,) * 3
    with pytest.raises(ValueError, match="raise --mesh.shards"):
        require_places(TableSpec(rows=rows, dim=1), mesh)


def test_one_device_is_no_mesh():
    assert mesh_of(MeshConfig(), 64, 1) is None  # on a CPU
    assert mesh_of(MeshConfig(replicas=1, shards=1), 63, 1) is None
