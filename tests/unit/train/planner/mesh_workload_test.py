"""The step of a GPU from a configuration: sizes of its parts, nothing allocated."""

import dataclasses

import jax
import pytest

from experiments.configs import get_config
from loka_jax.data import generated
from loka_jax.train.config import EmbeddingConfig
from loka_jax.train.planner.mesh_plan import Rates, estimate
from loka_jax.train.planner.mesh_workload import workload_of
from loka_jax.train.planner.step_sizes import Mesh


def workload(config, batch=64, **options):
    return workload_of(config, generated.schema_of(config.data), batch, **options)


def test_it_has_the_sizes_of_the_state():
    config = get_config("fp8_dlrm_tiny")
    step = workload(config, dense_us=5.0)
    (stack,) = step.stacks
    rows = sum(config.data.rows)
    assert (stack.rows, stack.dim, stack.row_bytes) == (rows, 16, 4 * 16 + 4)
    assert stack.lookups == 64 * len(config.data.rows)
    assert 0 < stack.distinct < rows
    # Adam: parameters, gradients and two moments, and a few counters.
    assert 4 * step.gradient_bytes <= step.state_bytes <= 4 * step.gradient_bytes + 64
    assert step.dense_us == 5.0


def test_tables_in_bfloat16_take_half_the_memory():
    config = get_config("fp8_dlrm_tiny")
    tables = dataclasses.replace(config.embedding, dtype="bf16")
    (wide,) = workload(config).stacks
    (stack,) = workload(dataclasses.replace(config, embedding=tables)).stacks
    assert (stack.row_bytes, stack.value_bytes) == (2 * 16 + 4, 2)
    assert (wide.row_bytes, wide.value_bytes) == (4 * 16 + 4, 4)


def test_optimizers_of_rows_and_several_dims_count():
    config = get_config("fp8_dlrm_tiny")
    config = dataclasses.replace(
        config,
        embedding=EmbeddingConfig(dim=16, dims=("C1=8", "C2=8")),
        optim=dataclasses.replace(config.optim, rows="adam"),
    )
    eight, sixteen = workload(config).stacks
    assert (eight.dim, sixteen.dim) == (8, 16)
    assert (eight.row_bytes, sixteen.row_bytes) == (3 * 32 + 4, 3 * 64 + 4)
    assert eight.rows == sum(config.data.rows[:2])
    assert eight.lookups == 64 * 2


def test_groups_that_average_rows_touch_more_of_them_in_more_steps():
    config = get_config("fp8_dlrm_tiny")
    exact = workload(config)
    alone = dataclasses.replace(config.mesh, sync="weights", sync_every=4)
    step = workload(dataclasses.replace(config, mesh=alone))
    assert (exact.average_every, step.average_every) == (0, 4)
    (stack,) = step.stacks
    assert stack.distinct < stack.averaged[0] < 4 * stack.distinct
    assert stack.state_bytes == 4


def test_groups_of_several_gpus_touch_a_row_once():
    config = get_config("fp8_dlrm_tiny")
    mesh = dataclasses.replace(config.mesh, sync="weights", sync_every=4)
    config = dataclasses.replace(config, mesh=mesh)
    (one,), (four,) = (workload(config, batch).stacks for batch in (64, 256))
    # Four GPUs have the ids of one with their batches, a quarter of the rows each.
    assert one.averaged[2] == pytest.approx(four.averaged[0] / 4)
    assert one.averaged[2] < 0.9 * one.averaged[0]
    assert len(one.averaged) == 9  # 256 shards are the most


def test_estimates_follow_the_batch():
    config = get_config("fp8_dlrm_tiny")
    small, large = (workload(config, batch) for batch in (64, 6400))
    assert large.activation_bytes == 100 * small.activation_bytes
    assert large.dense_us > small.dense_us > 0


@pytest.mark.slow
def test_huge_tables_take_no_memory_here():
    config = get_config("fp8_dlrm_tiny")
    data = dataclasses.replace(config.data, rows=(10**9, *config.data.rows[1:]))
    before = len(jax.live_arrays())
    step = workload(dataclasses.replace(config, data=data))
    assert step.stacks[0].rows > 10**9
    assert len(jax.live_arrays()) <= before + 2  # keys


def test_one_gpu_takes_the_time_that_was_measured():
    """800 us of `fp8_dlrm` at 65,536 on an H200, 562 of them without the tables."""
    step = workload(get_config("fp8_dlrm"), 65536, dense_us=562.0)
    assert step.stacks[0].distinct == pytest.approx(83_000, rel=0.01)
    assert estimate(step, Mesh(1, 1), Rates()).step_us == pytest.approx(800, rel=0.01)
