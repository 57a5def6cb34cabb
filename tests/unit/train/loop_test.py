"""The training loop: what it does after which step, in which order, with what."""

import contextlib
import dataclasses
import types
from unittest import mock

import jax
import numpy as np
import pytest

from loka_jax.data import Position
from loka_jax.dispatch.plan import DispatchPlan, as_json
from loka_jax.dispatch.policy import Decision
from loka_jax.site import BF16
from loka_jax.train import loop as loop_lib
from loka_jax.train.config import ProbeOptions
from loka_jax.train.logs import timing
from loka_jax.train.watch import alarm, guard, heeded, host_state, replan
from loka_jax.train.watch.guard import Diverged, TrainingFailed
from loka_jax.train.watch.host_state import Moment, Progress
from tests.support import loop as support
from tests.support import train as runs
from tests.support.loop import LAST_SIZE, SIZE, SYNCED, Stop, loss_of, make_loop

PLAN = DispatchPlan((("site", Decision(BF16, "it is new")),))


@pytest.fixture(autouse=True)
def evaluations(monkeypatch):
    """Lists step, batch and rows of evaluated states; `nes` replace their NEs."""
    found = types.SimpleNamespace(of=[], nes=None)

    def evaluate(run, state, dataset):
        assert dataset == run.splits.valid
        step, rows = int(state.step), float(state.table[0, 0])
        run.events.append(f"evaluate {step}")
        found.of.append((step, float(state.params["newest"]), rows))
        ne = found.nes.pop(0) if found.nes else 1 / step
        return {"auc": 0.7, "logloss": ne / 2, "ne": ne, "calibration": 1.0}

    monkeypatch.setattr(loop_lib, "evaluate", evaluate)
    monkeypatch.setattr(loop_lib, "logged", lambda values: values)
    monkeypatch.setattr(loop_lib.confirm, "is_due", lambda *_: False)
    return found


@pytest.fixture
def watched(monkeypatch):
    """Lets looks and reviews of the plan record what they are asked."""
    events = []

    def look(kind):
        def at_step(run, state, progress, batch):
            rows = "synced" if state.table[0, 0] == SYNCED else "apart"
            run.events.append(f"look at {kind} of {int(batch.ids[0, 0])}, rows {rows}")
            return progress

        return at_step

    looks = types.SimpleNamespace(
        before_step=look("operands"),
        after_step=look("scales"),
        read=lambda progress: events.append("read") or progress,
        drop=lambda: events.append("drop"),
    )
    monkeypatch.setattr(loop_lib, "Looks", lambda _: looks)
    note = lambda run, *_: run.events.append("review")  # noqa: E731
    monkeypatch.setattr(replan, "review", note)
    return events


def of_training(made):
    return [line for line in made.record.lines if line.get("kind") == "train"]


def test_a_step_is_logged_then_evaluated_then_saved():
    made = make_loop(steps=8, eval_every=4, max_steps=8).train()
    fourth, end = (made.events.index(f"train on {n}") for n in (3, 4))
    done = ["log train 4", "sync", "evaluate 4", "log eval 4", "sync"]
    done += ["wait for best", "save newest 4"]
    assert made.events[fourth + 1 : end] == done
    assert made.events[-3:] == ["wait for best", "save newest 8", "wait for newest"]
    assert made.display.numbers.call_args_list[0].args == (2, made.record.lines[0])
    assert [call.args[0] for call in made.display.step.call_args_list] == [*range(1, 9)]


@pytest.mark.parametrize(
    "options, logs, evals, saves",
    [
        ({}, [2, 4, 6, 8, 10, 12], [5, 10, 12], [5, 10, 12]),  # after each epoch
        (dict(log_every=3, eval_every=8, save_every=5), [3, 6, 9, 12], [8, 12], None),
    ],
)
def test_what_is_due_is_done_with_equal_rows(evaluations, options, logs, evals, saves):
    made = make_loop(steps=12, **options).train()
    saves = saves or [5, 10, 12]
    done = [made.steps(what) for what in ("log train", "evaluate", "save newest")]
    assert done == [logs, evals, saves] and list(made.newest.saved) == saves
    assert [(step, rows) for step, _, rows in evaluations.of] == [
        (step, SYNCED) for step in evals
    ]
    for state, _ in made.newest.saved.values():
        assert float(state.table[0, 0]) == SYNCED


def test_a_log_line_is_of_the_steps_since_the_line_before():
    made = make_loop(steps=7, log_every=3)
    made.run.skipped |= {3}  # steps that are skipped advance no schedule
    first, second = of_training(made.train())
    for line, numbers in ((first, (0, 1, 2)), (second, (4, 10))):
        want = np.mean([loss_of(number) for number in numbers])
        assert line["loss"] == pytest.approx(want, rel=1e-6)
    assert int(made.loop.state.metrics.count) == SIZE  # of step 7
    assert (second["lr"], second["skipped_steps"]) == (pytest.approx(0.05), 1)


def test_batches_follow_one_another_and_calls_end_where_something_is_due():
    made = make_loop(steps=11, log_every=6, eval_every=12, steps_per_call=3).train()
    # Scales are looked at after step 8, so that there is no call from 6 to 9.
    assert made.trained_on() == ["0, 1, 2", "3, 4, 10", "11", "12", "13, 14, 20"]
    assert made.run.read_from == [(Position(0, 0, 0), 11)]
    progress = made.loop.progress
    assert progress.examples == 9 * SIZE + 2 * LAST_SIZE
    assert (progress.step, progress.position) == (11, Position(2, 1, 0))
    for traced in (made.profiler.before, made.profiler.after):
        assert [call.args[0] for call in traced.call_args_list] == [0, 3, 6, 7, 8]


def test_a_stop_ends_the_run_after_a_step_that_is_saved_once():
    made = make_loop(steps=9, eval_every=4)
    made.train(Stop(after=4))
    assert (made.loop.progress.step, made.steps("save newest")) == (4, [4])
    made.run.skipped |= {10, 11, 12}  # a run that is stopped is not judged
    made.train(Stop(after=3))
    assert made.steps("save newest") == [4, 7]
    assert made.events[-1] == "wait for newest"


def test_the_best_state_is_that_of_the_best_evaluation(evaluations):
    evaluations.nes = [0.9, 0.7, 0.8, 0.6, 0.65]
    made = make_loop(steps=10, eval_every=2, patience=9).train()
    assert made.steps("save best") == [2, 4, 8]
    best = made.loop.progress.best
    assert best is not None and (best["step"], best["ne"]) == (8, 0.6)
    for step, (state, meta) in made.best.saved.items():
        assert int(state.step) == step == meta["progress"]["best"]["step"]
        assert meta["progress"]["step"] == step
    # The checkpoint of a step waits for the best state of that step.
    at = made.events.index("save best 8")
    assert made.events[at + 1 :][:3] == ["sync", "wait for best", "save newest 8"]
    made = make_loop(steps=6, eval_every=2).train()  # without patience none is saved
    at_end = Moment(made.run, made.loop.state, made.loop.progress)
    assert not made.best.saved and made.loop.best_state() == at_end


def test_a_stall_lowers_the_rate_and_patience_ends_the_run(evaluations):
    evaluations.nes = [0.8, 0.9, 0.7, 0.75, 0.72]
    made = make_loop(steps=20, eval_every=2, patience=2).train()
    rates = [line["lr"] for line in of_training(made)]
    assert rates == pytest.approx([0.02, 0.04, 0.006, 0.008, 0.001])
    assert float(made.newest.saved[10][0].lr_scale) == pytest.approx(0.001)
    made.train()  # as a run that is resumed: no step is left
    assert made.run.read_from[1] == (Position(2, 0, 0), 0)
    assert made.loop.progress.step == 10


@pytest.fixture
def diverging(monkeypatch):
    """Makes a loop that diverges at steps 5 and 6, after a checkpoint of step 4."""

    def likely_cause(model, eval_step_of, state, batch, columns):
        what = (int(batch.ids[0, 0]), float(state.table[0, 0]), columns)
        assert what == (10, SYNCED, ("x",))
        return "the weather is the likely cause"

    def restored(checkpoints, saved, run):
        state, meta = checkpoints.saved[saved.step]
        return Moment(run, state, Progress.from_json(meta["progress"]))

    planned = types.SimpleNamespace(is_delayed=False)
    monkeypatch.setattr(guard, "likely_cause", likely_cause)
    monkeypatch.setattr(host_state, "restored", restored)
    monkeypatch.setattr(support.StandInRun, "planned", planned)

    def make(**options):
        made = make_loop(steps=8, log_every=1, eval_every=4, **options)
        made.run.losses.update({4: 50.0, 10: 50.0})
        return made

    return make


def test_a_run_that_diverges_ends_with_its_healthy_checkpoints(diverging):
    made = diverging()
    with pytest.raises(Diverged, match="at step 6: the NE .* weather.*step 4 is saved"):
        made.train()
    assert list(made.newest.saved) == [4]


def test_a_run_that_goes_back_does_not_train_on_the_same_batches(
    diverging, watched, monkeypatch
):
    made = diverging(on_divergence="go_back", patience=9)
    made.best.saved[6] = (None, {})  # of an evaluation that is undone
    # Once scales are initialized, nobody asks, but after a return.
    monkeypatch.setattr(loop_lib, "scales_initialized", lambda x: int(x.step) != 4)
    made.train()
    # Without batches 4 and 10, with which it diverged.
    assert made.run.read_from == [(Position(0, 0, 0), 8), (Position(1, 1, 0), 4)]
    assert made.loop.progress.step == int(made.loop.state.step) == 8
    assert float(made.loop.state.lr_scale) == 0.5
    assert [*made.loop.progress.returns] == made.said()
    assert "drop lines after 4" in made.events and sorted(made.best.saved) == [4, 8]
    assert watched.count("drop") == 1
    assert made.guarded() == [False] * 6 + [True] + [False] * 3
    # A new window of metrics and of the rate begins.
    fifth = of_training(made)[6]
    assert fifth["loss"] == pytest.approx(loss_of(11), rel=1e-6)
    assert (fifth["step"], fifth["examples_per_second"] is None) == (5, False)


def test_an_unhealthy_state_is_not_saved():
    made = make_loop(steps=9, log_every=3, eval_every=4, save_every=2)
    made.run.losses.update({3: 50.0})  # of step 4
    made.train()
    assert made.steps("save newest") == [2, 8, 9]
    sentence = "step {}: not saved, as the loss is out of bounds."
    assert made.said() == [sentence.format(step) for step in (4, 6)]


@pytest.mark.parametrize(
    "every, skipped, step",
    [
        (dict(log_every=2, eval_every=50), range(5), 4),
        (dict(log_every=50, eval_every=4), range(5), 4),
        (dict(log_every=2, eval_every=50), (11, 12, 13), 9),  # the run's last ones
    ],
)
def test_too_many_skipped_steps_end_the_run(every, skipped, step):
    made = make_loop(steps=9, max_skipped_steps=4, **every)
    made.run.skipped.update(skipped)
    with pytest.raises(TrainingFailed, match=f"steps up to step {step} were skipped"):
        made.train()
    assert made.steps("evaluate") == made.steps("save newest") == [9] * (step == 9)


def test_a_step_that_does_not_compile_is_taken_again_under_another_plan(monkeypatch):
    made = make_loop(steps=6, log_every=6, eval_every=6, steps_per_call=3)
    made.run.errors[0] = RuntimeError("no kernel")

    def failed(run, progress, error):
        said = ("site: its step did not compile",)
        progress = dataclasses.replace(progress, broken=("site",))
        return replan.Change(PLAN, said, progress)

    monkeypatch.setattr(replan, "after_failure", failed)
    follow = lambda run, state, plan: (run.replanned(plan), state)  # noqa: E731
    monkeypatch.setattr(replan, "replanned", follow)
    made.train()
    assert made.trained_on() == ["0", "1", "2", "3, 4, 10"]  # each once
    progress = made.loop.progress
    assert (progress.step, progress.broken) == (6, ("site",))
    made.record.write.assert_called_once_with("plan.json", as_json(PLAN))


@pytest.mark.parametrize("batch, has_plan", [(0, False), (3, True)])
def test_a_step_that_has_run_or_that_no_plan_helps_is_an_error(
    monkeypatch, batch, has_plan
):
    change = replan.Change(PLAN, (), Progress(position=Position(0, 0, 0)))
    followed = change if has_plan else None
    monkeypatch.setattr(replan, "after_failure", lambda *_: followed)
    made = make_loop(steps=6)
    made.run.errors[batch] = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        made.train()
    made.record.write.assert_not_called()


def test_scales_are_looked_at_every_eighth_step_and_at_the_end(watched, monkeypatch):
    monkeypatch.setattr("loka_jax.train.loop_options.LOOK_EVERY", 5)
    monkeypatch.setattr("loka_jax.train.loop_options.FIRST_LOOK", 6)
    options = dict(log_every=6, eval_every=18, steps_per_call=2)
    made = make_loop(steps=18, **options).train()
    looks = [event[8:] for event in made.events if "look at" in event]
    of_scales = [f"scales of {n}, rows apart" for n in (12, 30, 32)]
    assert [x for x in looks if x.startswith("scales")] == of_scales
    # Read before each log line ends, and before each checkpoint.
    assert watched == ["read"] * 5
    # Operands before a step, with equal rows.
    of_operands = [f"operands of {n}, rows synced" for n in (20, 30)]
    assert [x for x in looks if x.startswith("operands")] == of_operands
    at = made.events.index(f"look at {of_operands[0]}")
    assert (made.events[at - 1], made.events[at + 1]) == ("sync", "train on 20, 21")


def test_plans_are_reviewed_with_evaluations_but_not_at_the_end(watched, monkeypatch):
    config = runs.config(log_every=50, eval_every=6)
    config = dataclasses.replace(config, probe=ProbeOptions(every=8))
    made = make_loop(config, steps=14)

    def observe(state, batch):
        made.events.append(f"observe {int(batch.ids[0, 0])}")
        return {"observed": state.step}

    stand_in = mock.Mock(side_effect=observe, has_run=True)
    monkeypatch.setattr(loop_lib, "probe_step", lambda run, probe: stand_in)
    monkeypatch.setattr(loop_lib, "make_ahead", lambda *_: None)
    made.train()
    reviews = [i for i, event in enumerate(made.events) if event == "review"]
    assert len(reviews) == 3
    before = [made.events[i - 1] for i in reviews]
    assert before[:2] == ["log eval 6", "train on 20"]  # step 11: the first review
    # Rows are equal everywhere when sites are observed, before a step on that batch.
    observed = [i for i, x in enumerate(made.events) if x.startswith("observe")]
    batches = [made.events[i].removeprefix("observe ") for i in observed]
    assert batches == ["0", "2", "4", "11", "13", "20"]
    for i, batch in zip(observed, batches, strict=True):
        assert made.events[i - 1 : i + 2] == [
            "sync",
            f"observe {batch}",
            f"train on {batch}",
        ]
    assert made.loop.state.probe == {"observed": 10}


def test_a_run_whose_probe_does_not_compile_trains_on(monkeypatch):
    config = dataclasses.replace(runs.config(log_every=50), probe=ProbeOptions(every=4))
    made = make_loop(config, steps=9)
    broken = mock.Mock(side_effect=RuntimeError("no compiler"), has_run=False)
    monkeypatch.setattr(loop_lib, "probe_step", lambda run, probe: broken)
    monkeypatch.setattr(loop_lib, "make_ahead", lambda *_: None)
    assert made.train().loop.progress.step == 9
    why = "its program does not run (RuntimeError: no compiler)"
    assert made.said() == [f"Probe observes this run no more: {why}."]
    broken.assert_called_once()


def test_what_may_be_needed_is_compiled_once_after_the_first_step(monkeypatch):
    begun = []
    monkeypatch.setattr(loop_lib, "make_ahead", lambda *given: begun.append(given))
    made = make_loop(steps=7)
    made.train()
    [(run, state, progress, batch)] = begun
    assert run is made.run and state.step == 1 and batch.ids[0, 0] == 0
    assert progress.step == 0


def test_kernels_are_timed_between_steps_and_while_a_review_waits(watched, monkeypatch):
    made = make_loop(steps=3, eval_every=2)

    @contextlib.contextmanager
    def turn():
        made.events.append("turn")
        yield True
        made.events.append("its end")

    vars(made.run).update(hope=(hope := mock.Mock(turn=turn)))
    monkeypatch.setattr(loop_lib, "make_ahead", lambda *_: None)
    made.train()
    hope.end.assert_called_once()
    turns = " ".join(made.events).split("turn ")[1:]
    assert len(turns) == 3
    for begun in turns:
        within, _, after = begun.partition("its end")
        assert "train on" in within and "train on" not in after
        assert "review" not in within and ("review" in after) == ("eval 2" in within)


def test_a_new_plan_is_followed_recorded_and_saved(monkeypatch, watched):
    earlier = Progress(position=Position(0, 0, 0), changes=("earlier",))
    made = make_loop(steps=9, eval_every=4, progress=earlier)
    said = ("site: left FP8",)

    def review(run, probe, progress, say):
        if len(progress.changes) == 1:
            progress = dataclasses.replace(progress, unsafe=("site",))
            return replan.Change(PLAN, said, progress)

    def replanned(run, state, plan):
        return run.replanned(plan), dataclasses.replace(state, fp8={"new": state.step})

    monkeypatch.setattr(replan, "review", review)
    monkeypatch.setattr(replan, "replanned", replanned)
    monkeypatch.setattr(loop_lib, "scales_initialized", lambda state: not state.fp8)
    made.train()
    progress = made.loop.progress
    assert (progress.replanned, progress.unsafe) == (4, ("site",))
    assert progress.changes == ("earlier", *made.said()) == ("earlier", *said)
    made.record.write.assert_called_once_with("plan.json", as_json(PLAN))
    saved = [made.newest.saved[step][1]["plan"] for step in (4, 8)]
    assert saved == [as_json(PLAN)] * 2 and made.loop.run.plan == PLAN
    # New scales are not initialized.
    assert made.guarded() == [False] * 4 + [True] * 5


@pytest.mark.parametrize(
    "initialized, begun, replanned, guarded",
    [(3, 0, 0, 3), (99, 0, 0, 16), (99, 20, 18, 14)],
)
def test_steps_are_guarded_until_scales_are_initialized_or_sixteen_steps(
    monkeypatch, initialized, begun, replanned, guarded
):
    is_initialized = lambda state: int(state.step) >= initialized  # noqa: E731
    monkeypatch.setattr(loop_lib, "scales_initialized", is_initialized)
    at = Progress(step=begun, position=Position(0, 0, 0), replanned=replanned)
    options = dict(eval_every=18, steps_per_call=2, log_every=18)
    made = make_loop(steps=begun + 18, progress=at, **options).train()
    first = [call["steps"] for call in made.run.calls if not call["scales_initialized"]]
    assert first == [1] * guarded and made.run.calls[-1]["scales_initialized"]


def test_rates_are_of_training_alone(monkeypatch):
    now, plain = [0.0], support.Steps.__call__
    watch = types.SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(timing, "time", watch)

    def step(self, state, *batches):
        if not int(state.step):
            jax.jit(lambda x: x - now[0] - 3.25)(1.0)  # like no other program
            now[0] += 1
        now[0] += 0.5
        return plain(self, state, *batches)

    def takes(seconds, result):
        return lambda *_: now.__setitem__(0, now[0] + seconds) or result

    values = {"auc": 0.7, "logloss": 0.5, "ne": 0.5, "calibration": 1.0}
    monkeypatch.setattr(support.Steps, "__call__", step)
    monkeypatch.setattr(loop_lib, "evaluate", takes(10, values))
    monkeypatch.setattr(support.StandInCheckpoints, "save", takes(100, True))
    made = make_loop(steps=8, log_every=4, eval_every=3, save_every=5)
    lines = of_training(made.train())
    assert [line["seconds"] for line in lines] == pytest.approx([3, 5])
    # One batch of the last four is not full.
    rates = [line["examples_per_second"] for line in lines]
    assert rates == pytest.approx([SIZE / 0.5, (SIZE - 3) / 0.5], rel=0.01)
    assert made.loop.clock.session_rate(made.loop.progress) == pytest.approx(212 / 3.5)


def test_scales_are_logged_and_the_watchdog_hears_of_each_step(monkeypatch):
    made, watchdog = make_loop(steps=4), mock.Mock()
    watchdog.resting.side_effect = lambda compiles: contextlib.nullcontext()
    monkeypatch.setattr(loop_lib, "watchdog", watchdog)
    for name in ("scales", "amaxes"):
        monkeypatch.setattr(loop_lib.log_lines, name, lambda _, name=name: {name: 1})
    made.record.log = mock.Mock()
    made.train()
    for name in ("scales", "amaxes"):
        lines = [{"step": step, name: 1} for step in (2, 4)]
        calls = [mock.call(line, f"{name}.jsonl") for line in lines]
        assert [x for x in made.record.log.mock_calls if x in calls] == calls
    assert watchdog.alive.call_count == 4
    compiles = [call.args for call in watchdog.resting.call_args_list]
    assert compiles == [(True,), (False,), (False,), (False,)]


@pytest.fixture
def alarmed(monkeypatch):
    """Makes a loop with checkpoints of all steps and a new alarm at step 4, and 8."""

    def seen_by(run, state):
        step = int(state.step)
        return {f"site_{step}": f"grown {step}"} if step in (4, 8) else {}

    monkeypatch.setattr(loop_lib.alarm, "seen_by", seen_by)
    monkeypatch.setattr(alarm, "beyond", lambda site: {"growth": f"it has {site}"})
    monitors = lambda seen: {f"{x}/growth": 0.1 for x in seen}  # noqa: E731
    monkeypatch.setattr(loop_lib.log_lines, "monitors", monitors)
    return lambda **loop: make_loop(steps=9, save_every=1, keep_checkpoints=9, **loop)


SAID = ["step 4: site_4: it has grown 4.", "step 8: site_8: it has grown 8."]


def test_alarms_are_recorded_and_said_once_and_the_run_goes_on(alarmed):
    made = alarmed().train()
    progress = made.loop.progress
    assert made.said() == [*progress.alarms.warnings] == SAID
    assert made.loop.progress.step == 9 and float(made.loop.state.lr_scale) == 1
    lines = [line for line in made.record.lines if "kind" not in line]
    expected = [{"step": step, f"site_{step}/growth": 0.1} for step in (4, 8)]
    assert lines == expected and made.steps("log amaxes.jsonl") == [4, 8]
    # It is among the alarms of the checkpoint of its step.
    saved = [made.newest.saved[i][1]["progress"]["alarms"] for i in (3, 4)]
    assert [len(x["warnings"]) for x in saved] == [0, 1]


def test_an_alarm_halves_the_rates_three_times_at_most(alarmed, monkeypatch):
    made = alarmed(on_alarm="slow").train()
    halved = [f"step {step}: learning rates are halved." for step in (4, 8)]
    assert made.said() == [SAID[0], halved[0], SAID[1], halved[1]]
    rates = [float(made.newest.saved[i][0].lr_scale) for i in (3, 4, 8)]
    assert rates == [1, 0.5, 0.25]
    monkeypatch.setattr(heeded, "_MAX_LOWERED", 1)
    made = alarmed(on_alarm="slow").train()
    assert made.said() == [SAID[0], halved[0], SAID[1]]
    assert float(made.loop.state.lr_scale) == made.loop.progress.plateau.lr_scale == 0.5


def test_an_alarm_stops_the_run_with_the_checkpoints_from_before(alarmed):
    made = alarmed(on_alarm="stop", on_divergence="go_back")
    with pytest.raises(TrainingFailed, match=f"--loop.on-alarm stop.: {SAID[0]}$"):
        made.train()
    assert [*made.newest.saved] == [1, 2, 3]


def test_an_alarm_demotes_its_sites(alarmed, monkeypatch):
    asked = []

    def after_alarms(run, progress, paths):
        asked.append(paths)
        return replan.Change(PLAN, ("site: left FP8",), progress)

    monkeypatch.setattr(replan, "after_alarms", after_alarms)
    replanned = lambda run, state, plan: (run.replanned(plan), state)  # noqa: E731
    monkeypatch.setattr(replan, "replanned", replanned)
    made = alarmed(on_alarm="demote").train()
    progress = made.loop.progress
    assert asked == [["site_4"], ["site_8"]] and made.loop.run.plan == PLAN
    assert (progress.replanned, progress.changes) == (8, ("site: left FP8",) * 2)
    assert made.said() == [SAID[0], progress.changes[0], SAID[1], progress.changes[0]]
