"""What a thread compiles while a run trains."""

import dataclasses
import threading
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from loka_jax.measure.compiling import Ahead
from loka_jax.train import ahead
from loka_jax.train.config import ProbeOptions
from tests.support import train as support


def test_what_a_thread_has_compiled_is_not_compiled_again():
    compiled, function = [], jax.jit(lambda x, y: x * y, donate_argnums=0)

    def count(event, duration_secs, **names):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(threading.current_thread())

    program = Ahead(function)
    x, y, z = jnp.arange(3.0), jnp.full(3, 2.0), jnp.ones(3)
    thread = threading.Thread(target=program.ahead(x, y))
    jax.monitoring.register_event_duration_secs_listener(count)
    thread.start()
    thread.join()
    assert not program.has_run
    assert program(x, y).tolist() == [0, 2, 4] and program.has_run
    assert program(z, y).tolist() == [2, 2, 2]
    jax.monitoring.unregister_event_duration_listener(count)
    assert compiled == [thread]
    assert x.is_deleted()  # it was donated as by the function itself


def test_arguments_of_other_shapes_are_compiled_when_they_come():
    program = Ahead(jax.jit(lambda x: 2 * x, donate_argnums=0))
    program.ahead(jnp.ones(3))()
    assert program(jnp.arange(4.0)).tolist() == [0, 2, 4, 6]
    assert program(jnp.arange(3.0)).tolist() == [0, 2, 4]
    with pytest.raises(TypeError):
        program("two")


@pytest.mark.parametrize("lowers", [Ahead.ahead, Ahead.lowered])
def test_the_first_call_raises_what_the_compiler_has_met(lowers):
    program = Ahead(jax.jit(lambda x: x @ x))
    lowers(program, jnp.ones(3), jnp.ones(2))()  # too many arguments
    with pytest.raises(TypeError):
        program(jnp.ones(3))


def test_a_function_is_lowered_here_and_compiled_by_the_job():
    traced = []
    program = Ahead(jax.jit(lambda x: traced.append(threading.get_ident()) or x + 1))
    job = program.lowered(jnp.ones(3))
    assert traced == [threading.get_ident()]
    threading.Thread(target=job).start()
    assert program(jnp.arange(3.0)).tolist() == [1, 2, 3] and len(traced) == 1


@pytest.mark.parametrize("probe_begins", [0, 64])
@pytest.mark.parametrize(
    "case", ["fp8", "bf16", "scales", "mesh", "cpu", "bf16 later", "fp8 later", "hoped"]
)
def test_first_steps_of_fp8_are_lowered_one_by_one_and_compiled_beside_each_other(
    monkeypatch, case, probe_begins
):
    known = ("scales", "fp8 later", "hoped")
    done, config = [], support.config(steps_per_call=2)
    config = config.observed(probe_begins, ("fp8_rowwise",))
    run = mock.Mock(config=config)
    run.placement.size = 2 if case == "mesh" else 1
    is_delayed = run.planned.is_delayed = not case.startswith("bf16")

    def program(name):
        def lowered(state, *batches):
            done.append(f"lowered {name}, {len(batches)}")
            return lambda: done.append(f"compiled {name}")

        return mock.Mock(lowered=lowered, is_begun=case == "hoped")

    run.train_step = lambda scales_initialized=False, steps=1: program(
        f"steps, {scales_initialized}"
    )
    monkeypatch.setattr(ahead, "probe_step", lambda run, probe: program("probe"))
    monkeypatch.setattr(ahead, "scales_initialized", lambda state: case in known)
    monkeypatch.setattr(ahead.threading, "Thread", _at_once)
    backend = "cpu" if case == "cpu" else "gpu"
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    step = 64 if "later" in case or case == "hoped" else 0
    ahead.make_first(run, "state", mock.Mock(step=step), "batch")
    first = "probe" if probe_begins == 0 else "steps, False"
    later = f"steps, {is_delayed}"
    lowered, compiled = [f"{later}, 1", f"{later}, 2"], [later, later]
    if case == "fp8":
        lowered, compiled = [f"{first}, 1", *lowered], [first, *compiled]
    wanted = [f"lowered {x}" for x in lowered] + [f"compiled {x}" for x in compiled]
    is_new = case in ("fp8", "bf16 later", "fp8 later")
    assert done == (wanted if is_new else [])


class _Hoped:
    """A run under the hoped plan, which lists the jobs that are done."""

    def __init__(self, done, *, is_delayed, choices=("fp8",)):
        self.planned, self._done = mock.Mock(is_delayed=is_delayed), done
        self.plan = mock.Mock(choices=choices)

    def init(self):
        return {"scales": jnp.ones(2)}

    def train_step(self, *, scales_initialized, steps):
        def job(state, *batches):
            assert state["scales"].shape == (2,) and len(batches) == steps
            return lambda: self._done.append((scales_initialized, steps))

        return mock.Mock(ahead=job)


@pytest.mark.parametrize("is_delayed", [False, True])
@pytest.mark.parametrize("count, has_run", [(1, False), (3, False), (1, True)])
def test_probe_comes_before_the_steps_of_the_hoped_plan(
    monkeypatch, count, has_run, is_delayed
):
    done = []
    config = support.config(steps_per_call=count)
    config = dataclasses.replace(config, probe=ProbeOptions(every=64))
    run = _run(config, done, is_delayed=is_delayed)
    asked = mock.Mock(ahead=lambda *x: lambda: done.append(x), is_begun=has_run)
    probe_step = mock.Mock(return_value=asked)
    monkeypatch.setattr(ahead, "probe_step", probe_step)
    look = mock.Mock(ahead=lambda *x: lambda: done.append("look"), has_run=has_run)
    looks = {id(run): look, id(run.hoped): look if is_delayed else None}
    monkeypatch.setattr(ahead, "watched", lambda run, progress: progress)
    monkeypatch.setattr(ahead, "look_step", lambda run, sites: looks[id(run)])
    monkeypatch.setattr(ahead.threading, "Thread", _at_once)
    ahead.make_ahead(run, "state", "progress", "batch")
    steps = [(is_delayed, steps) for steps in sorted({1, count})]
    seen = ("state", "batch")
    observed = [] if has_run else [seen, "look", seen]
    its_look = ["look"] * (is_delayed and not has_run)
    assert done == [*observed, *steps, *its_look] and run.hope.is_ready.is_set()
    # Steps without and, later, with covariances of weights are programs of their own.
    probes = [config.probe.config_at(step) for step in (0, 1280)]
    assert probe_step.call_args_list == [mock.call(run, probe) for probe in probes]


@pytest.mark.parametrize("choices", [("bf16",), None])
def test_nothing_is_compiled_for_a_plan_that_is_the_same_or_cannot_be_made(
    monkeypatch, choices
):
    """But what waits for it goes on."""
    monkeypatch.setattr(ahead, "_look", lambda *_: [])
    config, done = support.config().observed(64, ("fp8_rowwise",)), []
    run = _run(config, done, is_delayed=True, choices=choices)
    asked = mock.Mock(is_begun=True)
    monkeypatch.setattr(ahead, "probe_step", mock.Mock(return_value=asked))
    monkeypatch.setattr(ahead.threading, "Thread", _at_once)
    if choices is None:
        run.hoped.init = mock.Mock(side_effect=ValueError("no"))
        with pytest.raises(ValueError, match="no"):
            ahead.make_ahead(run, "state", "progress", "batch")
    else:
        ahead.make_ahead(run, "state", "progress", "batch")
    assert not done and run.hope.is_ready.is_set()


def _at_once(target, daemon):
    """A thread whose work is done when it starts."""
    return mock.Mock(start=target)


def _run(config, done, **hoped):
    run = mock.Mock(config=config, hoped=_Hoped(done, **hoped))
    run.plan.choices = ("bf16",)
    run.hope.is_ready = threading.Event()
    run.placement.size, run.hoped.config = 1, config
    run.total_steps = run.hoped.total_steps = 10_000
    return run


@pytest.mark.parametrize("devices, begin", [(2, 64), (1, None)])
def test_nothing_is_compiled_ahead_over_a_mesh_or_without_probe(
    monkeypatch, devices, begin
):
    monkeypatch.setattr(ahead, "probe_step", probe_step := mock.Mock())
    monkeypatch.setattr(ahead, "_look", lambda *_: [])
    config = support.config()
    probe = dataclasses.replace(config.probe, begin=begin)
    run = mock.Mock(config=dataclasses.replace(config, probe=probe), hope=None)
    run.placement.size, run.total_steps = devices, 10_000
    ahead.make_ahead(run, "state", "progress", "batch")
    probe_step.assert_not_called()
