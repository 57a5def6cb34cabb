"""What a mesh takes, against numbers by hand."""

import dataclasses

import pytest

from loka_jax.train.planner.mesh_plan import Rates, estimate, fastest, require_fit
from loka_jax.train.planner.step_sizes import Mesh, Stack, Workload, meshes

# Sent: 1.05 x 1,000 = 1,050 ids.
STACK = Stack(rows=10_001, dim=10, row_bytes=44, lookups=4_000, distinct=1e3)
STEP = Workload(
    name="some",
    batch=100,
    stacks=(STACK,),
    gradient_bytes=8_000,
    state_bytes=32_000,
    activation_bytes=5_000,
    dense_us=7.0,
)
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
    assert rounded(one.memory) == {
        "tables": 440_044,
        "dense": 32_000,
        "activations": 5_000,
        # 2 x 4,000 x 10 x 2 and 4 x 4,000 x 10 and 16 x 4,000
        "rows": 160_000 + 160_000 + 64_000,
    }
    assert rounded(one.wire) == {}
    assert rounded(one.us) == {
        "dense": 7,
        "fetch": 120,  # 4,000 x 60 bytes at 2,000 a us
        "give back": 40 + 20 + 22,  # sort; 4,000 x 20 bytes; 1,000 x 88 bytes
    }
    assert one.step_us == 209


def test_several_gpus_wait_for_the_host():
    slow = dataclasses.replace(RATES, launch_us=1e4, call_us=4e3)
    for steps, us in ((1, 1.4e4), (4, 1.1e4)):
        step = dataclasses.replace(STEP, steps_per_call=steps)
        assert estimate(step, Mesh(1, 4), slow).step_us == pytest.approx(us)
    assert estimate(STEP, Mesh(1, 1), slow).us["host"] == 0
    fast = estimate(STEP, Mesh(1, 4), RATES)
    assert fast.us["host"] == 0 and fast.step_us > RATES.launch_us + RATES.call_us


def test_shards_of_one_host():
    four = estimate(STEP, Mesh(1, 4), RATES)
    assert rounded(four.memory) == {
        "tables": 2_501 * 44,
        "dense": 32_000,
        "activations": 5_000,
        "exchange": 1_050 * (8 + 80),
        "rows": 384_000,
    }
    assert rounded(four.wire) == {
        "ids": 3_150,  # three quarters of 4 x 1,050
        "rows": 15_750,  # three quarters of 20 x 1,050
        "row gradients": 15_750,
        "dense gradients": 12_000,
    }
    assert rounded(four.us) == {
        "dense": 7,
        "route": 40 + 2 + 3.15,
        # 1,050 x 60 bytes; latency and transfer; 2 x 4,000 x 20 bytes
        "fetch": 31.5 + 2 + 15.75 + 80,
        # sums; latency and transfer; sort; 1,050 x 108 bytes
        "give back": 20 + 2 + 15.75 + 10.5 + 28.35,
        "dense sum": 2 * 2 + 12,
    }


def test_replicas_of_one_shard_hold_the_lists_of_an_exchange():
    two = estimate(STEP, Mesh(2, 1), RATES)
    assert two.memory["exchange"] == 1_050 * (8 + 80)
    assert two.wire["ids"] == two.wire["rows"] == two.wire["row gradients"] == 0


def test_shards_over_two_hosts():
    eight = estimate(STEP, Mesh(1, 8), RATES)
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
    # However few rows a shard has: each device's list is sent as it is.
    few = dataclasses.replace(STEP, stacks=(dataclasses.replace(STACK, rows=200),))
    assert estimate(few, Mesh(2, 2), RATES).wire["replicas"] == 1_050 * 24


def test_replicas_hold_lists_of_all_of_them():
    # Lists of 4 x 1,050: sort, gradients in two bytes, twice in float32.
    lists = 4 * 1_050 * (8 + 20 + 80)
    short = dataclasses.replace(STACK, lookups=1_000)
    four = estimate(dataclasses.replace(STEP, stacks=(short,)), Mesh(4, 1), RATES)
    tables, dense = 440_044, 32_000
    held = {"tables": tables, "dense": dense, "replicas": lists}
    assert rounded(four.memory) == held
    # With more lookups the step takes more before it gives rows to replicas.
    four = estimate(STEP, Mesh(4, 1), RATES)
    assert four.memory["replicas"] == 0
    before = 5_000 + 1_050 * 88 + 384_000
    assert four.memory_bytes == tables + dense + before and before > lists


def test_groups_that_average_rows_hold_changes_sums_and_means():
    alone = dataclasses.replace(STEP, average_every=1)
    eight = estimate(alone, Mesh(8, 1), RATES)
    assert rounded(eight.memory)["replicas"] == 8 * 1_050 * (8 + 3 * 44)
    # Lists are no longer than a shard.
    few = dataclasses.replace(alone, stacks=(dataclasses.replace(STACK, rows=800),))
    many = estimate(few, Mesh(64, 2), RATES)
    assert rounded(many.memory)["replicas"] == 64 * 400 * (8 + 3 * 44)


def test_groups_keep_the_rows_of_all_steps_until_they_average():
    stack = dataclasses.replace(STACK, averaged=(1_800.0, 1_200.0, 900.0, 800.0))
    step = dataclasses.replace(STEP, stacks=(stack,), average_every=2)
    log = 2 * 1_050 * (4 + 44)
    # Lists of 8 x 1,890 rows, and the log once more, without what is there twice.
    lists = 8 * 1_890 * (8 + 3 * 44)
    eight = estimate(step, Mesh(8, 1), RATES)
    assert rounded(eight.memory) == {
        "tables": 440_044,
        "dense": 32_000,
        "log": log,
        "replicas": lists + log,
    }
    one = estimate(step, Mesh(1, 8), RATES)  # there is nothing to average
    assert one.memory["log"] == one.memory["replicas"] == 0


def test_groups_that_average_rows_send_those_of_several_steps_at_once():
    stack = dataclasses.replace(STACK, averaged=(1_800.0, 1_200.0, 900.0, 800.0))
    step = dataclasses.replace(STEP, stacks=(stack,), average_every=2)
    two = estimate(step, Mesh(2, 2), RATES)
    # Half of 1,260 rows: 630 of 28 bytes, with the 4 that the optimizer keeps.
    assert two.wire["replicas"] == pytest.approx(630 * 28)
    assert two.us["replicas"] == pytest.approx(2 / 2 + 17.64 + 6.3 + 630 * 0.027)
    assert estimate(step, Mesh(2, 1), RATES).wire["replicas"] == pytest.approx(945 * 28)
    assert two.wire["rows"] == estimate(STEP, Mesh(2, 2), RATES).wire["rows"]


def test_meshes_have_shards_that_divide_the_virtual_ones():
    assert [str(mesh) for mesh in meshes(8)] == ["1 x 8", "2 x 4", "4 x 2", "8 x 1"]
    assert [str(mesh) for mesh in meshes(6)] == ["3 x 2", "6 x 1"]
    assert next(meshes(1024)) == Mesh(4, 256)
    assert all(mesh.gpus == 1024 for mesh in meshes(1024))


def test_what_does_not_fit_is_refused_with_numbers():
    # 60 M rows of 44 bytes: 1.32 GB on two shards, 0.66 on four, of 0.5 usable.
    large = dataclasses.replace(
        STEP, stacks=(dataclasses.replace(STACK, rows=6 * 10**7),)
    )
    assert require_fit(large, 8, RATES).mesh == Mesh(1, 8)
    reason = estimate(large, Mesh(2, 2), RATES).why_not(RATES)
    assert reason == ("1.3 GB a GPU do not fit into 0.5 GB (50% of 1); tables take 1.3")
    with pytest.raises(
        ValueError, match="some fits no mesh of 4 GPUs: on 1 x 4, .* 0.7"
    ):
        require_fit(large, 4, RATES)


def test_more_gpus_are_never_faster_than_linear():
    alone = estimate(STEP, Mesh(1, 1), RATES).step_us
    for gpus in (2, 8, 64, 512):
        assert fastest(STEP, gpus, RATES).step_us > 0.5 * alone
    assert fastest(STEP, 512, RATES).step_us > fastest(STEP, 64, RATES).step_us


def test_rates_are_positive():
    with pytest.raises(ValueError, match="--rates.link-gb-s 0.0 must be positive"):
        Rates(link_gb_s=0.0)
