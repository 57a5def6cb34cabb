"""Live errors change the plan of a run in progress."""

import dataclasses
import json

import numpy as np
import pytest

from loka_jax.data import Position
from loka_jax.dispatch.drift import SiteDrift, Watch
from loka_jax.dispatch.plan import as_json
from loka_jax.dispatch.policy import Limits
from loka_jax.probe import live_errors
from loka_jax.probe.site import SiteStats
from loka_jax.site import BF16
from loka_jax.train import build as build_lib
from loka_jax.train import planning, session
from loka_jax.train.config import DispatchOptions, ProbeOptions
from loka_jax.train.loop import Loop
from loka_jax.train.watch import replan
from loka_jax.train.watch.host_state import Progress
from tests.support import train as support

SITES = BOTTOM, TOP = ("bottom_mlp/dense_1", "top_mlp/dense_0")
PROBE = ProbeOptions(every=1, covariances_every=1, recipes=("fp8_rowwise",))
# Batches of 32 examples have errors that differ widely from step to step.
LIMITS = Limits(healthy=3.0, worst_row=30.0)
PLANTED_ID, SINCE = 7, 4


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    support.share_data(monkeypatch)


def _config(workdir, plan, probe=PROBE, **loop):
    config = support.config(workdir, **{"eval_every": 4} | loop)
    dispatch = DispatchOptions(limits=LIMITS)
    return dataclasses.replace(config, plan=str(plan), probe=probe, dispatch=dispatch)


def _plant_outlier(monkeypatch):
    """Plants a huge embedding in an example of each batch, and interrupts a run once.

    The example has weight zero, and so adds nothing to drhs. Beside it, the other rows
    of `top_mlp/dense_0`'s lhs are zeros in FP8.
    """
    plain, kills = Loop.step, [SINCE + 2]

    def planted(self, taken):
        if self.progress.step in kills:
            kills.clear()
            raise KeyboardInterrupt
        if self.progress.step == SINCE:
            table = self.state.table.at[PLANTED_ID].set(1e6)
            self.state = dataclasses.replace(self.state, table=table)
        if self.progress.step >= SINCE:
            ((position, batch),) = taken
            ids, weights = np.array(batch.ids), np.array(batch.weights)
            ids[ids[:, 0] == PLANTED_ID, 0] = 0
            ids[0, 0], weights[0] = PLANTED_ID, 0.0
            batch = batch._replace(ids=ids, weights=weights)
            taken = [(position, batch)]
        plain(self, taken)

    monkeypatch.setattr(Loop, "step", planted)


@pytest.mark.slow
def test_sites_enter_fp8_by_live_errors_and_leave_it(tmp_path, monkeypatch):
    table = support.write_table(tmp_path / "table.json", source="another")
    _plant_outlier(monkeypatch)
    monkeypatch.setattr(session, "build", support.build)
    workdir = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        support.train(_config(workdir, table, max_steps=12))
    resumed = _config(workdir, table, max_steps=12, resume=True)
    code, said = support.train(resumed)
    assert code == 0 and "Resuming at step 4" in said
    changes = support.summary(workdir)["changes"]
    why = "its live errors are within the limits"
    promoted = [f"step 4: {path} runs by {support.ROW} now: {why}." for path in SITES]
    assert changes[:2] == promoted
    (demoted,) = changes[2:]  # at step 6, the first review beside evaluations
    assert f"step 6: {TOP} runs in bfloat16 now: the live error of its drhs" in demoted
    assert said.count(demoted) == 1 and demoted in (workdir / "report.html").read_text()
    plan = json.loads((workdir / "plan.json").read_text())
    assert plan[BOTTOM]["choice"] == support.ROW and plan[BOTTOM]["reason"] == why
    assert plan[TOP]["choice"] == BF16.name and "drhs" in plan[TOP]["reason"]

    # The plan is that of the checkpoint, which needs no table.
    table.unlink()
    code, said = support.train(resumed)
    assert code == 0 and "Live errors will not change the plan: --plan" in said
    assert json.loads((workdir / "plan.json").read_text()) == plan
    assert support.summary(workdir)["changes"] == changes


@pytest.mark.slow
def test_a_run_without_known_errors_is_observed_and_enters_fp8(tmp_path, monkeypatch):
    for module in (planning, session):
        monkeypatch.setattr(module, "OBSERVE_EVERY", 1)
    monkeypatch.setattr(planning, "OBSERVING_SECONDS", 0.0)
    monkeypatch.setattr(session, "build", support.build)
    table = support.write_table(tmp_path / "table.json", source="another")
    workdir, probe = tmp_path / "run", dataclasses.replace(PROBE, every=None)
    options = {"probe": probe, "max_steps": 12, "save_every": 2}
    plain = Loop.step

    def interrupted(self, taken):
        if self.progress.step == 3:
            raise KeyboardInterrupt
        plain(self, taken)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Loop, "step", interrupted)
        support.train(_config(workdir, table, eval_every=100, **options))
    options |= {"eval_every": 100, "resume": True}
    code, said = support.train(_config(workdir, table, **options))
    assert code == 0 and "Resuming at step 2" in said
    changes = support.summary(workdir)["changes"]
    first = [line for line in changes if line.startswith("step 6: ")]
    assert first == changes and len(changes) == len(SITES)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose sites begin in bfloat16."""
    path = tmp_path_factory.mktemp("run") / "table.json"
    with pytest.MonkeyPatch.context() as patch:
        support.share_data(patch)
        table = support.write_table(path, source="another")
        return build_lib.build(_config(None, table))


def _seen(**errors):
    """Returns statistics of Probe with errors of all products, by path."""
    probe = {}
    for path, value in errors.items():
        empty = live_errors.empty_errors(1)
        moments = np.broadcast_to([9.0, 9.0, value, 0.0], empty.moments.shape)
        stats = SiteStats(None, None, None, live_errors.LiveErrors(9.0, moments))
        group, name = path.split("/")
        probe.setdefault(group, {})[name] = {"stats": stats}
    return probe


def _progress(**options):
    return Progress(step=8, position=Position(0, 8, 0), **options)


def test_good_errors_promote_and_a_second_review_changes_nothing(run):
    seen = _seen(**{path: 0.03 for path in SITES})
    change, progress = replan.after_review(run, seen, _progress())
    choices = dict(change.plan.choices)
    assert [choices[path].name for path in SITES] == [support.ROW] * 2
    assert replan.after_review(run.replanned(change.plan), seen, progress) is None


def test_a_demoted_site_is_remembered_and_looked_at_anew(run):
    good, bad = _seen(**{TOP: 0.03}), _seen(**{TOP: 0.5})
    change, _ = replan.after_review(run, good, _progress())
    watch = Watch(sites={path: SiteDrift(looks=9) for path in SITES})
    run = run.replanned(change.plan)
    change, progress = replan.after_review(run, bad, _progress(drift=watch))
    assert dict(change.plan.choices)[TOP] == BF16
    assert progress.unsafe == (TOP,) and list(progress.drift.sites) == [BOTTOM]
    # 0.1 is within 3 * 0.037, but not within three quarters of it.
    again, run = _seen(**{TOP: 0.1}), run.replanned(change.plan)
    assert replan.after_review(run, again, progress) is None
    assert replan.after_review(run, again, _progress()) is not None
    assert replan.after_review(run, good, progress) is not None


def test_a_site_that_drift_demoted_is_not_promoted(run):
    away = SiteDrift(away=True, demotions=1)
    progress = _progress(drift=Watch(sites={TOP: away}))
    seen = _seen(**{path: 0.03 for path in SITES})
    change, _ = replan.after_review(run, seen, progress)
    choices = dict(change.plan.choices)
    assert choices[BOTTOM].name == support.ROW and choices[TOP] == BF16


@pytest.mark.parametrize("error, returns", [(0.03, True), (0.1, False)])
def test_a_site_returns_from_drift_once_its_live_errors_are_low(run, error, returns):
    seen = _seen(**{TOP: 0.03})
    change, _ = replan.after_review(run, seen, _progress())
    planned = {TOP: as_json(change.plan)[TOP]}
    back = SiteDrift(away=True, demotions=1, home=9)
    progress = _progress(drift=Watch(sites={TOP: back}), planned=planned)
    found = replan.after_drift(run, _seen(**{TOP: error}), progress)
    assert (found is not None) is returns


def test_kernels_that_did_not_compile_are_not_promoted(run):
    seen = _seen(**{path: 0.03 for path in SITES})
    change, _ = replan.after_review(run, seen, _progress(broken=(TOP,)))
    assert dict(change.plan.choices)[TOP] == BF16


def test_runs_without_times_or_without_probe_are_not_reviewed(tmp_path):
    table = support.write_table(tmp_path / "table.json")
    plans = ["off", "auto", str(table)]  # there is no GPU: "auto" knows no times
    found = [build_lib.build(_config(None, plan)).reviewer for plan in plans]
    assert [reviewer is not None for reviewer in found] == [False, False, True]
    run = build_lib.build(_config(None, table, probe=ProbeOptions()))
    assert run.reviewer is None


def test_a_run_with_a_recipe_of_its_own_keeps_it(run):
    run = dataclasses.replace(run, reviewer=None)
    seen = _seen(**{TOP: 0.03})
    assert replan.after_review(run, seen, _progress()) is None
