"""What a mesh takes, against numbers by hand."""

import dataclasses

import pytest

from loka_jax.train.planner.mesh_plan import (
    Mesh,
    Rates,
    estimate,
    fastest,
    meshes,
    require_fit,
)
from loka_jax.train.planner.workload import Stack, Workload

# Sent: 1.05 x 1,000 = 1,050 ids.
STACK = Stack(rows=10_001, dim=10, row_bytes=44, lookups=4_000, distinct=1e3)
SIZES = dict(gradient_bytes=8_000, state_bytes=32_000, activation_bytes=5_000)
STEP = Workload(name="some", batch=100, stacks=(STACK,), dense_us=7.0, **SIZES)
# A gigabyte a second is a thousand bytes a microsecond.
RATES = Rates(
    link_gb_s=1.0,
    network_gb_s=0.5,
    collective_us=2.0,
    launch_us=1.0,
    call_us=1.0,
    host_us=3.0,
    peer_us=0.25,
    sorted_ids_us=100.0,
    gather_gb_s=2.0,
    update_gb_s=4.0,
    gpus_per_host=4,
    memory_gb=1.0,
    memory_share=0.5,
)


def rounded(parts):
    return {name: round(x, 6) for name, x in parts.items() if x}


def test_one_gpu_looks_up_sorts_and_updates():
    one = estimate(STEP, Mesh(1, 1), RATES)
    # Of rows: 2 x 4,000 x 10 x 2 and 4 x 4,000 x 10 and 16 x 4,000.
    memory = {"tables": 440_044, "dense": 32_000, "activations": 5_000, "rows": 384_000}
    assert rounded(one.memory) == memory and not rounded(one.wire)
    # 4,000 x 60 bytes at 2,000 a us; sort; 4,000 x 20 bytes; 1,000 x 88 bytes
    assert rounded(one.us) == {"dense": 7, "fetch": 120, "give back": 40 + 20 + 22}
    assert one.step_us == 209


def test_shards_of_one_host_exchange_ids_rows_and_gradients():
    four = estimate(STEP, Mesh(1, 4), RATES)
    assert (four.memory["tables"], four.memory["exchange"]) == (2_501 * 44, 92_400)
    # Three quarters of 4 x 1,050 ids and of 20 x 1,050 values, there and back.
    wire = {"ids": 3_150, "rows": 15_750, "row gradients": 15_750}
    assert rounded(four.wire) == wire | {"dense gradients": 12_000}
    # 1,050 x 60 bytes; latency and transfer; 2 x 4,000 x 20 bytes
    assert four.us["fetch"] == pytest.approx(31.5 + 2 + 15.75 + 80)
    # sums; latency and transfer; sort; 1,050 x 108 bytes
    assert four.us["give back"] == pytest.approx(20 + 2 + 15.75 + 10.5 + 28.35)


def test_shards_over_two_hosts():
    eight = estimate(STEP, Mesh(1, 8), RATES)
    assert eight.wire["dense gradients"] == 14_000  # seven eighths, there and back
    # Half of the ids cross at half the speed: 2,100 / 500 us, more than those within.
    latency = 2 + 3 + 4 * 0.25
    assert eight.us["route"] == pytest.approx(40 + latency + 4.2)
    # Three quarters twice within a host; then a quarter of it half away, twice.
    assert eight.us["dense sum"] == pytest.approx(2 * 5 + 12 + 4)


def test_replicas_exchange_touched_rows():
    two = estimate(STEP, Mesh(2, 2), RATES)
    assert two.wire["replicas"] == 1_050 * 24
    # Latency, transfer, and one more list to sort and to apply.
    assert two.us["replicas"] == pytest.approx(2 + 25.2 + 10.5 + 28.35)
    # Over two hosts the slow link bears it, from all but one of eight groups.
    eight = estimate(STEP, Mesh(8, 1), RATES)
    more = 7 * (10.5 + 28.35)
    assert eight.us["replicas"] == pytest.approx(2 + 3 + 7 * 25.2 / 0.5 + more)


def test_groups_keep_the_rows_of_all_steps_until_they_average():
    stack = dataclasses.replace(STACK, averaged=(1_800.0, 1_200.0, 900.0, 800.0))
    step = dataclasses.replace(STEP, stacks=(stack,), average_every=2)
    log = 2 * 1_050 * (4 + 44)
    # Lists of 8 x 1,890 rows, and the log once more, without what is there twice.
    lists = 8 * 1_890 * (8 + 3 * 44)
    held = {"tables": 440_044, "dense": 32_000, "log": log, "replicas": lists + log}
    assert rounded(estimate(step, Mesh(8, 1), RATES).memory) == held
    one = estimate(step, Mesh(1, 8), RATES)  # there is nothing to average
    assert one.memory["log"] == one.memory["replicas"] == 0


def test_what_does_not_fit_is_refused_with_numbers():
    # 60 M rows of 44 bytes: 1.32 GB on two shards, 0.66 on four, of 0.5 usable.
    stack = dataclasses.replace(STACK, rows=6 * 10**7)
    large = dataclasses.replace(STEP, stacks=(stack,))
    assert require_fit(large, 8, RATES).mesh == Mesh(1, 8)
    reason = estimate(large, Mesh(2, 2), RATES).why_not(RATES)
    assert reason == ("1.3 GB a GPU do not fit into 0.5 GB (50% of 1); tables take 1.3")
    with pytest.raises(ValueError, match="some fits no mesh of 4 GPUs: on 1 x 4, .* 0"):
        require_fit(large, 4, RATES)


def test_the_fastest_mesh_that_fits_is_taken_or_the_smallest_of_all():
    assert [*meshes(6)] == [Mesh(3, 2), Mesh(6, 1)]  # shards divide the virtual ones
    assert next(meshes(1024)) == Mesh(4, 256)
    far = dataclasses.replace(RATES, peer_us=1e3)  # the fewest shards are faster
    smallest, *others = (estimate(STEP, mesh, far) for mesh in meshes(8))
    quickest = min(others, key=lambda one: one.step_us)
    assert smallest.step_us > quickest.step_us
    # Just what the fastest takes is enough; for a byte less another is taken.
    need = quickest.memory_bytes / (1e9 * RATES.memory_share)
    for memory_gb, is_enough in ((need, True), (need * (1 - 1e-9), False)):
        found = fastest(STEP, 8, dataclasses.replace(far, memory_gb=memory_gb))
        assert (found == quickest) == is_enough
        assert found.memory_bytes <= quickest.memory_bytes
    assert fastest(STEP, 8, dataclasses.replace(far, memory_gb=1e-6)) == smallest


def test_a_slow_host_makes_steps_wait():
    slow = dataclasses.replace(RATES, launch_us=100.0, call_us=8_000.0)
    assert estimate(STEP, Mesh(1, 4), slow).step_us == pytest.approx(8_100)
    assert estimate(STEP, Mesh(1, 1), slow).us["host"] == 0
