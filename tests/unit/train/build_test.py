"""What is made from a configuration before anything is trained."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from loka_jax import nn
from loka_jax.data import WHOLE, Part, Position
from loka_jax.optim import OptimConfig, make_schedule
from loka_jax.train import build as build_lib
from loka_jax.train import build_in_turn
from loka_jax.train.build import build
from loka_jax.train.config import EmbeddingConfig
from loka_jax.train.mesh.devices import MeshConfig
from loka_jax.train.mesh.gradient_sum import GradientSum
from loka_jax.train.mesh.mesh_step import StepOptions
from loka_jax.train.processes.group import Processes
from tests.support import train as support
from tests.support import without_data
from tests.support.train import digest

PROBE = nn.ProbeConfig()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    without_data.patch_build(monkeypatch)


def run_of(mesh=None, **loop):
    """Returns a run, whose options differ from those that are set by default."""
    config = support.config(seed=5, **loop)
    if mesh is not None:
        config = dataclasses.replace(config, mesh=mesh)
    return build(config)


def test_steps_are_counted_over_epochs_and_capped():
    assert run_of(epochs=3).total_steps == 30
    assert run_of(epochs=3, max_steps=7).total_steps == 7
    assert run_of(epochs=1, max_steps=70).total_steps == 10
    assert run_of(batch_size=96).steps_per_epoch == 4  # the last padded


def test_sites_are_listed_at_the_size_of_a_part_of_a_device():
    for mesh, m in ((None, 32), (MeshConfig(replicas=2, shards=1), 16)):
        run = run_of(mesh, batch_size=64, microbatches=2)
        assert {site.spec.m for site in run.sites} == {m}


def test_the_seed_decides_the_start():
    runs = [build(support.config(seed=seed)) for seed in (0, 0, 1)]
    starts = [run.init() for run in runs]
    tables = [digest(state.table) for state in starts]
    params = [digest(state.params) for state in starts]
    assert tables[0] == tables[1] != tables[2]
    assert params[0] == params[1] != params[2]
    assert np.asarray(starts[0].table).std() == pytest.approx(0.01, rel=0.2)
    assert starts[0].probe == {}
    # What a checkpoint is read into has its shapes, and nothing was computed for it.
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), vars(starts[0]))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), runs[0].template()) == shapes


class Recorder(list):
    """Records how it was called, and returns what it was told to."""

    def __init__(self, result=None):
        self.result = result

    def __call__(self, *args, **options):
        self.append((args, options))
        return self.result


OPTIM = OptimConfig(
    lr=0.5,
    rows="sgd",
    rows_lr=0.25,
    rows_l2=0.125,
    warmup_steps=4,
    decay="linear",
    task_weights=(),
)


@pytest.fixture
def compiled(monkeypatch):
    """Lets programs be the options that they are compiled with."""
    monkeypatch.setattr(build_lib, "untuned_here", lambda: {"tuned": False})
    steps = SimpleNamespace(alone=Recorder("step"), mesh=Recorder("mesh step"))
    monkeypatch.setattr(build_lib, "make_train_step", steps.alone)
    monkeypatch.setattr(build_lib, "make_mesh_train_step", steps.mesh)
    monkeypatch.setattr(build_lib, "one_after_another", lambda step: f"several {step}")
    return steps


OPTIONS = dict(dropout_seed=5, task_weights=(), microbatches=2)


def test_a_step_is_made_with_the_options_of_the_run(compiled, monkeypatch):
    run = run_of(microbatches=2)
    monkeypatch.setattr(jax, "jit", lambda step, **options: (step, options))
    first, step = run.first_step, run.step
    for taken, options in ((first, {"tuned": False}), (step, {})):
        expected = {"donate_argnums": 0, "compiler_options": options}
        assert taken._step == ("several step", expected)
        assert not taken._is_observed
    parts = run.tables, run.optimizer, run.row_update
    for (args, options), initialized in zip(compiled.alone, (False, True), strict=True):
        model = dataclasses.replace(run.planned, scales_initialized=initialized)
        assert args == (model, *parts) and options == OPTIONS | {"probe": None}
    # They are made once, and again for what differs.
    assert run.step is step and run.first_step is first and len(compiled.alone) == 2
    observed = run.train_step(scales_initialized=True, probe=PROBE)
    assert observed._is_observed and compiled.alone[-1][1]["probe"] == PROBE
    assert run.train_step(scales_initialized=True, steps=2) is not step
    demoted = run.replanned(run.plan.changed({}))
    assert demoted.step is not step


def run_over_devices():
    mesh, router = SimpleNamespace(size=4), SimpleNamespace(sharding="sharding")
    program = Recorder("program")
    spread = SimpleNamespace(
        wire="wire", mesh=mesh, router=router, train_program=program
    )
    summed = GradientSum("int8", "as asked", 8)
    run = run_of(microbatches=2, steps_per_call=3)
    return dataclasses.replace(run, spread=spread, summed=summed)


def test_a_step_over_devices_is_made_with_the_same_options(compiled):
    run = run_over_devices()
    step = run.train_step(scales_initialized=False, probe=PROBE, steps=3)
    ((args, _),) = compiled.mesh
    parts = run.planned, run.tables, run.optimizer, run.row_update
    assert args == (*parts, "wire", StepOptions(**OPTIONS, probe=PROBE), "int8")
    assert run.spread.train_program == [(("mesh step", 3, {"tuned": False}), {})]
    assert step._step == "program" and step._is_observed
    run.train_step(scales_initialized=True, steps=2)
    assert run.spread.train_program[1:] == [(("mesh step", 2, {}), {})]


def test_each_process_reads_its_part(monkeypatch):
    alone, run = run_of(), run_over_devices()
    assert alone.part == WHOLE and run.part == Part(0, 1)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(build_lib, "placed", lambda *given: given)
    data = SimpleNamespace(batch=Recorder("batch"))
    assert alone.read(data, 7) == "batch"
    assert run.read(data, 7) == ("batch", "sharding", Part(1, 2))
    assert data.batch == [
        ((Position(0, 7, 0), 32), {"shuffle": False, "part": part})
        for part in (WHOLE, Part(1, 2))
    ]


@pytest.mark.parametrize("steps, depth", [(1, 4), (3, 6)])
def test_batches_are_prefetched_shuffled_and_for_two_calls(monkeypatch, steps, depth):
    monkeypatch.setattr(build_lib, "Prefetcher", Recorder("batches"))
    run, place = run_of(steps_per_call=steps), Position(1, 2, 5)
    assert run.prefetched(place, 9) == "batches"
    options = {"shuffle": True, "num_batches": 9, "depth": depth}
    options |= {"sharding": None, "part": WHOLE}
    assert build_lib.Prefetcher == [((run.splits.train, place, 32), options)]


def test_optimizers_and_schedules_are_those_of_the_options():
    config = dataclasses.replace(support.config(epochs=1), optim=OPTIM)
    rows = EmbeddingConfig(dim=16, dtype="bf16", implementation="xla")
    run = build(dataclasses.replace(config, embedding=rows, seed=9))
    assert run.total_steps == 10
    for step in (0, 4, 9):
        rate = make_schedule(0.5, OPTIM, 10)(step)
        assert float(run.schedule(step)) == pytest.approx(float(rate))
        rows_rate = float(run.row_update.learning_rate(step))
        assert rows_rate == pytest.approx(float(rate) / 2)
    update = run.row_update
    assert (update.l2, update.implementation, update.rounding_seed) == (0.125, "xla", 9)
    nearest = dataclasses.replace(rows, rounding="nearest")
    run = build(dataclasses.replace(config, embedding=nearest, seed=9))
    assert run.row_update.rounding_seed is None


TOLD = '{"plan": {"a": 1}, "summed": {"wire": "bf16", "reason": "r", "num_bytes": 3}}'


class Told(Processes):
    """Processes that hear what the first has chosen."""

    said: list = []

    def same(self, text):
        self.said.append(text)
        return TOLD


@pytest.mark.parametrize("index", [0, 1])
def test_processes_build_in_turn_what_the_first_has_chosen(monkeypatch, index):
    events = []
    monkeypatch.setattr(build_in_turn, "meet", lambda *args: events.append(args[1]))
    monkeypatch.setattr(Told, "said", [])
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    own = dataclasses.replace(run_over_devices(), reviewer="reviewer")

    def build_run(plan):
        events.append(plan)
        return own

    run = build_in_turn.built_in_turn(Told(index, 2), build_run, "saved")
    assert events == ([{"a": 1}, "built"][::-1] if index else ["saved", "built"])
    assert run.summed == ("bf16", "r", 3) and run.reviewer is None
    (said,) = Told.said
    assert bool(said) == (index == 0) and ("int8" in said) == (index == 0)
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    with pytest.raises(ValueError, match="2 processes have 8 devices, and .* are 4"):
        build_in_turn.built_in_turn(Told(index, 2), build_run, None)
