"""The step of a GPU from a configuration: sizes of its parts, nothing allocated."""

import dataclasses

import pytest

from experiments.configs import get_config
from loka_jax.data import generated
from loka_jax.data.planted import ZIPF, expected_distinct
from loka_jax.models import Dlrm
from loka_jax.train.config import DlrmConfig, EmbeddingConfig, LoopConfig
from loka_jax.train.mesh.devices import MeshConfig
from loka_jax.train.planner.mesh_plan import Mesh, Rates, estimate
from loka_jax.train.planner.workload import workload_of
from tests.support.train import DATA

BATCH = 48
BASE = DlrmConfig(
    name="small",
    model=Dlrm(bottom_mlp=(64,), top_mlp=(32,), recipe="bf16", norm="layer"),
    data=DATA,
    loop=LoopConfig(batch_size=64, microbatches=2, steps_per_call=3),
)
# [13, 64], [64, 16], [26 and padding, 32], [32, 1]
LAYERS = ((13, 64), (64, 16), (32, 32), (32, 1))


def workload(config, batch=BATCH, **options):
    return workload_of(config, generated.schema_of(config.data), batch, **options)


def test_it_has_the_sizes_of_the_state():
    step = workload(BASE)
    assert (step.name, step.batch, step.steps_per_call) == ("small", BATCH, 3)
    (stack,) = step.stacks
    rows = sum(DATA.rows)
    assert (stack.rows, stack.dim, stack.row_bytes) == (rows, 16, 4 * 16 + 4)
    assert stack.value_bytes == stack.state_bytes == 4
    assert stack.lookups == BATCH * len(DATA.rows) and stack.averaged == ()
    distinct = sum(expected_distinct(rows, BATCH, ZIPF) for rows in DATA.rows)
    assert stack.distinct == pytest.approx(distinct)
    # Weights, scales and biases of norms, and of the head one bias.
    count = sum(k * n for k, n in LAYERS) + 2 * (64 + 16 + 32) + 1
    assert step.gradient_bytes == 4 * count
    # Adam: parameters, gradients and two moments, and a few counters.
    assert 4 * step.gradient_bytes <= step.state_bytes <= 4 * step.gradient_bytes + 64


def test_estimates_follow_the_batch():
    values = sum(k + n for k, n in LAYERS)
    large = workload(BASE, 10**7)
    assert large.activation_bytes == 2 * 10**7 * values
    # Traffic takes longer than products do: three times all values, of two bytes.
    assert large.dense_us == pytest.approx(4 * 50 + 3 * 2 * 10**7 * values / 3e6)


def test_stacks_count_their_optimizers_dtypes_and_groups():
    dims = EmbeddingConfig(dim=16, dims=("C1=8", "C2=8"), dtype="f32")
    mesh = MeshConfig(sync="weights", sync_every=4)
    loop = LoopConfig(batch_size=64, microbatches=2)
    mixed = dataclasses.replace(BASE, embedding=dims, mesh=mesh, loop=loop)
    step = workload(mixed, dense_us=5.0)
    assert (step.dense_us, step.average_every) == (5.0, 4)
    eight, sixteen = step.stacks
    assert (eight.dim, sixteen.dim, eight.lookups) == (8, 16, 2 * BATCH)
    assert (eight.rows, sixteen.rows) == (sum(DATA.rows[:2]), sum(DATA.rows[2:]))
    assert len(eight.averaged) == 9  # 256 shards are the most
    for exponent, averaged in enumerate(eight.averaged):
        # A group has the ids of its GPUs in four steps, each a part of the rows.
        draws = 4 * BATCH * 2**exponent
        rows = sum(expected_distinct(rows, draws, ZIPF) for rows in DATA.rows[:2])
        assert averaged == pytest.approx(rows / 2**exponent)
    narrow = EmbeddingConfig(dim=16, dtype="bf16")
    adam = dataclasses.replace(BASE.optim, rows="adam")
    config = dataclasses.replace(BASE, embedding=narrow, optim=adam)
    (stack,) = workload(config, dense_us=5.0).stacks
    assert (stack.value_bytes, stack.row_bytes) == (2, 2 * 16 + 2 * 64 + 4)


def test_one_gpu_takes_the_time_that_was_measured():
    """800 us of `fp8_dlrm` at 65,536 on an H200, 562 of them without the tables."""
    step = workload(get_config("fp8_dlrm"), 65536, dense_us=562.0)
    assert step.stacks[0].distinct == pytest.approx(83_000, rel=0.01)
    assert estimate(step, Mesh(1, 1), Rates()).step_us == pytest.approx(800, rel=0.01)
