"""What is made from a configuration before anything is trained."""

import dataclasses
from unittest import mock

import jax
import numpy as np
import pytest

from loka_jax.data import WHOLE, Position
from loka_jax.dispatch.first_use import CheckedPlan
from loka_jax.dispatch.hope import Hope
from loka_jax.dispatch.policy import Decision
from loka_jax.optim import OptimConfig, make_schedule
from loka_jax.site import Choice
from loka_jax.train import build as build_lib
from loka_jax.train.build import build
from loka_jax.train.config import EmbeddingConfig
from loka_jax.train.mesh.devices import MeshConfig
from loka_jax.train.placement import Placement
from loka_jax.train.tasks import LOG_LOSS
from tests.support import train as support
from tests.support import without_data
from tests.support.train import digest


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    without_data.patch_build(monkeypatch)


def run_of(mesh=None, **loop):
    """Returns a run, whose options differ from those that are set by default."""
    config = support.config(seed=5, **loop)
    if mesh is not None:
        config = dataclasses.replace(config, mesh=mesh)
    return build(config)


def test_steps_are_counted_and_sites_have_the_size_of_a_part_of_a_device():
    steps = dict(epochs=3), dict(epochs=3, max_steps=7), dict(epochs=1, max_steps=70)
    assert [run_of(**x).total_steps for x in steps] == [30, 7, 10]
    assert run_of(batch_size=96).steps_per_epoch == 4  # the last padded
    for mesh, m in ((None, 32), (MeshConfig(replicas=2, shards=1), 16)):
        run = run_of(mesh, batch_size=64, microbatches=2)
        assert {site.spec.m for site in run.sites} == {m}


def test_the_seed_decides_the_start():
    runs = [build(support.config(seed=seed)) for seed in (0, 0, 1)]
    starts = [run.init() for run in runs]
    for part in ("table", "params"):
        found = [digest(getattr(state, part)) for state in starts]
        assert found[0] == found[1] != found[2]
    assert np.asarray(starts[0].table).std() == pytest.approx(0.01, rel=0.2)
    # What a checkpoint is read into has its shapes, and nothing was computed for it.
    trees = vars(starts[0]), runs[0].template()
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in trees]
    assert shapes[0] == shapes[1] and starts[0].probe == {}


@pytest.fixture
def make_train_step(monkeypatch):
    """Lets programs be what they are compiled of."""
    made = mock.Mock(return_value="step")
    monkeypatch.setattr(build_lib, "untuned_here", lambda: {"tuned": False})
    monkeypatch.setattr(build_lib, "make_train_step", made)
    monkeypatch.setattr(Placement, "train_program", lambda self, *parts: parts)
    return made


def test_a_step_is_made_with_the_options_of_the_run(make_train_step):
    run = run_of(microbatches=2)
    parts = run.placement, run.optimizer, run.row_update
    fixed = dict(dropout_seed=5, objective=LOG_LOSS, microbatches=2)
    for initialized, options in ((False, {"tuned": False}), (True, {})):
        taken = run.train_step(scales_initialized=initialized)
        assert taken._program._function == ("step", 1, options)
        model = dataclasses.replace(run.planned, scales_initialized=initialized)
        make_train_step.assert_called_with(model, *parts, **fixed)
    # They are made once, and again for what differs.
    how = dict(scales_initialized=True)
    step = run.train_step(**how)
    assert run.train_step(**how) is step and make_train_step.call_count == 2
    assert run.train_step(**how, steps=2) is not step
    assert run.replanned(run.plan.changed({})).train_step(**how) is not step


def test_steps_of_the_hoped_plan_are_compiled_once(make_train_step):
    run = run_of()
    path = next(site.path for site in run.sites if site.has_choice)
    changed = run.plan.changed({path: Decision(Choice.parse("xla bf16"), "hoped")})
    checked = CheckedPlan(changed, None)
    run = dataclasses.replace(run, hope=Hope(lambda turns: checked))
    step = run.hoped.train_step()
    found = run.plan.changed({path: Decision(Choice.parse("xla bf16"), "found")})
    assert run.replanned(found).train_step() is step
    assert run.replanned(found).plan is found
    assert run.replanned(run.plan).train_step() is not step


@pytest.mark.parametrize("steps, depth", [(1, 4), (3, 6)])
def test_batches_are_prefetched_shuffled_and_for_two_calls(monkeypatch, steps, depth):
    made = mock.Mock()
    monkeypatch.setattr(build_lib, "prefetch", made)
    run, place = run_of(steps_per_call=steps), Position(1, 2, 5)
    run.prefetched(place, 9)
    options = {"num_batches": 9, "depth": depth, "sharding": None, "part": WHOLE}
    made.assert_called_with(run.splits.train, place, 32, shuffle=True, **options)


def test_optimizers_and_schedules_are_those_of_the_options():
    rates = dict(lr=0.5, rows_lr=0.25, warmup_steps=4, decay="linear")
    optim = OptimConfig(rows="sgd", rows_l2=0.125, task_weights=(), **rates)
    rows = EmbeddingConfig(dim=16, dtype="bf16", implementation="xla")
    config = dataclasses.replace(support.config(seed=9, epochs=1), optim=optim)
    run = build(dataclasses.replace(config, embedding=rows))
    for step in (0, 4, 9):
        rate = float(make_schedule(0.5, optim, 10)(step))
        assert float(run.schedule(step)) == pytest.approx(rate)
        rows_rate = float(run.row_update.learning_rate(step))
        assert rows_rate == pytest.approx(rate / 2)
    update = run.row_update
    assert (update.l2, update.implementation, update.rounding_seed) == (0.125, "xla", 9)
