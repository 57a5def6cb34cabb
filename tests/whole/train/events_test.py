"""Runs on event logs: in the order of time, evaluated ahead, resumed bit for bit."""

import dataclasses
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.data import DataConfig, Position
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.attention import IN_BF16, IN_FP8
from loka_jax.dispatch.header import header_here
from loka_jax.dispatch.policy import Limits
from loka_jax.dispatch.table import ATTENTION, Entry
from loka_jax.fp8 import E4M3
from loka_jax.heads import Heads, Qkv
from loka_jax.jagged import BY_KEY, BY_QUERY, FORWARD
from loka_jax.models import Hstu
from loka_jax.ops import jagged_attention as ops
from loka_jax.pallas import jagged_attention as kernels
from loka_jax.train.build import build
from loka_jax.train.config import EmbeddingConfig, LoopConfig, RunOptions
from loka_jax.train.evaluation import quality
from loka_jax.train.loop_options import DispatchOptions, ProbeOptions
from loka_jax.train.mesh.devices import MeshConfig
from loka_jax.xla import jagged_attention as xla
from tests.support import train as support
from tests.support.dispatch import LIMIT, errors
from tests.support.event_runs import config_of
from tests.support.train import lines, train

LOG = DataConfig(
    kind="events",
    rows=(5, 21),
    examples=256,
    eval_examples=64,
    history=6,
    row_capacity=128,
    stream=True,
)
MODEL = Hstu(
    dim=16,
    num_layers=1,
    num_heads=1,
    qk_dim=16,
    v_dim=16,
    item_mlp=(),
    head_mlp=(16,),
    max_length=8,
    age_buckets=8,
    layer_dropout_rate=0.1,
    recipe="fp8_tensorwise_delayed",
)


def config(workdir, *, resume=False, data=LOG, model=MODEL, **loop):
    loop = {"batch_size": 32, "eval_every": 3, "log_every": 2, "save_every": 4} | loop
    return config_of(
        model,
        name="events",
        data=data,
        embedding=EmbeddingConfig(dim=16),
        optim=support.OPTIM,
        loop=LoopConfig(**loop),
        run=RunOptions(workdir=workdir, resume=resume),
    )


def numbers(workdir):
    """Returns the lines of a run without what was measured of time and memory."""
    return [
        {key: x for key, x in line.items() if key not in support.MEASURED}
        for line in lines(workdir)
    ]


def test_a_stream_that_is_stopped_in_the_middle_goes_on_bit_for_bit(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    code, said = train(config(whole))
    assert code == 0 and "events were left out of histories" in said
    assert train(config(parts, max_steps=4))[0] == 0
    assert train(config(parts, resume=True))[0] == 0
    own = [line for line in numbers(parts) if line["step"] != 4]
    assert own == [line for line in numbers(whole) if line["step"] != 4]
    a, b = (np.load(workdir / "scores.npy") for workdir in (whole, parts))
    assert np.array_equal(a, b) and len(a) == LOG.eval_examples


def trained(workdir, mesh):
    """Returns parameters after two steps, and the quality on the validation rows."""
    data = dataclasses.replace(LOG, row_capacity=None)
    model = MODEL.clone(recipe="bf16", layer_dropout_rate=0.0)
    run = build(dataclasses.replace(config(workdir, data=data, model=model), mesh=mesh))
    state = run.init()
    with run.prefetched(Position(0, 0, 0), 2) as batches:
        for _, batch in run.placement.look_ahead(batches):
            state = run.train_step()(state, batch)
    return jax.device_get(state.params), quality(run, state, run.splits.valid)


def test_devices_that_share_histories_train_as_one_does(tmp_path):
    one, alone = trained(tmp_path, MeshConfig(replicas=1, shards=1))
    mesh = MeshConfig(replicas=2, shards=2, wire_rows="f32", wire_gradients="f32")
    four, shared = trained(tmp_path, mesh)
    # Sums of float32 in another order, and bfloat16 of what they move over a boundary.
    chex.assert_trees_all_close(four, one, atol=1e-4)
    assert shared["logloss"] == pytest.approx(alone["logloss"], rel=1e-4)


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """Kernels of the attention that XLA stands in for, as if on a Hopper GPU."""

    def plan_jagged_attention(rows, device, *, is_fp8=False):
        return ops.AttentionPlan(None, why_not_fp8=None if is_fp8 else "not chosen")

    def attend(kind, fixed, streamed, visible, *, interpret, **how):
        found.append((kind, fixed[0].array.dtype))
        return xla.attend(kind, fixed, streamed, visible, **how)

    def gradients(rows, gradient, visible, *, into, interpret, **how):
        assert into is None
        (q, k, v), g = rows.parts(), Heads.of(gradient)
        how = dict(interpret=interpret, visible=visible) | how
        (dq,) = attend(BY_QUERY, (q, g), (k, v), **how)
        dk, dv = attend(BY_KEY, (k, v), (q, g), **how)
        return Qkv.of(dq, dk, dv)  # of heads with columns of zeros

    found = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # runs keep their errors there
    monkeypatch.setattr(ops, "plan_jagged_attention", plan_jagged_attention)
    monkeypatch.setattr(kernels, "attend", attend)
    monkeypatch.setattr(kernels, "gradients", gradients)
    return found


def planned(tmp_path, us, errors, **options):
    """Returns a run that is planned by a table with times, and errors if there are."""
    options = config(tmp_path / "run", **options)
    run = build(options)
    (site,) = (x for x in run.sites if x.attention is not None)
    assert (site.path, site.batch) == ("layer_0/attention", 1)
    own = {f"{run.source} {site.path}": errors} if errors else {}
    times = {IN_BF16.name: 1.3 * us, IN_FP8.name: us}
    path, entry = tmp_path / "table.json", Entry({ATTENTION: times}, own)
    tables.write(path, tables.Table(header_here(), {site.spec: entry}))
    return dataclasses.replace(options, plan=str(path))


def test_a_plan_with_attention_in_fp8_is_trained_and_resumed(tmp_path, ran):
    own = errors(("fwd",), tensorwise=LIMIT)
    options = planned(tmp_path, 10.0, own, max_steps=2)
    code, said = train(options)
    assert code == 0 and "FP8 forward, 1.30x" in said
    # Sites are listed, and evaluated once, in bfloat16, too.
    assert (FORWARD, E4M3) in ran
    assert {dtype for kind, dtype in ran if kind != FORWARD} == {jnp.dtype("bfloat16")}
    ran.clear()
    # Made anew it would have no FP8.
    tables.write(pathlib.Path(options.plan), tables.Table(header_here(), {}))
    more = config(tmp_path / "run", max_steps=3, resume=True)
    code, said = train(dataclasses.replace(more, plan=options.plan))
    assert code == 0 and "FP8 forward, 1.30x" in said
    assert (FORWARD, E4M3) in ran


def test_live_errors_bring_the_attention_to_fp8(tmp_path, ran, monkeypatch):
    monkeypatch.setattr("loka_jax.train.loop_options.LOOK_EVERY", 1)
    options = planned(tmp_path, 1e8, None, max_steps=8, eval_every=4)
    limits = Limits(healthy=99.0, worst_row=9999.0)
    probe = ProbeOptions(begin=0, recipes=("fp8_tensorwise",))
    changes = dict(probe=probe, dispatch=DispatchOptions(limits=limits))
    code, said = train(dataclasses.replace(options, **changes))
    assert code == 0 and "its error was not measured" in said
    entered = f"layer_0/attention runs by {IN_FP8.name} now: its live errors are within"

    assert entered in said and (FORWARD, E4M3) in ran


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"microbatches": 2}, "--loop.microbatches"),
        ({"epochs": 2}, "--loop.epochs 1"),
        ({"data": dataclasses.replace(LOG, history=9)}, "--max-length 8"),
        ({"model": MODEL.clone(oldest=2)}, "add --window"),
        ({"data": DataConfig()}, "takes an event log"),
    ],
)
def test_what_does_not_go_with_an_event_log_is_refused(tmp_path, changes, named):
    with pytest.raises(ValueError, match=named):
        train(config(tmp_path, **changes))
