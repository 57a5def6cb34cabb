"""Which plan a run follows, and what is said of it."""

import dataclasses

import pytest

from loka_jax.dispatch.first_use import Budget, CheckedPlan
from loka_jax.dispatch.header import header_here
from loka_jax.dispatch.local import Local, performance_of
from loka_jax.dispatch.plan import DispatchPlan, as_json, save
from loka_jax.dispatch.policy import Decision
from loka_jax.site import Choice
from loka_jax.train import build as build_lib
from loka_jax.train import plan_files, planning
from loka_jax.train.config import DispatchOptions
from loka_jax.train.mesh.devices import MeshConfig
from tests.support import train as support
from tests.support import without_data

ROW = support.ROW


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    without_data.patch_build(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _config(*, plan="auto", rules=(), every=None):
    dispatch = DispatchOptions(rules=rules, tune_seconds=7.0, check_seconds=5.0)
    config = dataclasses.replace(support.config(), plan=plan, dispatch=dispatch)
    probe = dataclasses.replace(config.probe, every=every)
    return dataclasses.replace(config, probe=probe)


def test_a_table_decides(tmp_path):
    path = support.write_table(tmp_path / "table.json")
    run = build_lib.build(_config(plan=str(path)))
    planned = {site.path: site.recipe for site in run.sites if site.spec.n > 1}
    assert set(planned.values()) == {
        "bf16",
        ROW.removeprefix("xla "),
    }  # 13 columns fit no FP8
    assert set(dict(run.plan.choices)) == set(planned) and run.reviewer is None


# FP8 halves the time of two sites of four. A program of a step takes 3.6 s to compile:
# the one that observes, before the first observed step, and one of FP8 before the first
# review, 81 steps later; so long, too, takes a check of kernels, 28 s and 1.2 s each.
@pytest.mark.parametrize(
    "source, every, steps, us, kernels, begin, pays",
    [
        ("another", None, 146, 1e6, 0, 64, True),
        ("another", None, 146, 4e4, 0, 64, False),  # for later runs
        ("another", None, 430, 1e4, 0, 128, True),
        ("another", None, 2000, 1e4, 5, 768, True),
        ("another", None, 2000, 1e3, 0, 832, True),
        ("another", None, 900, 1e4, 5, 128, False),
        ("another", None, 145, 1e6, 0, None, False),  # a short run
        ("another", 0, 146, 1e6, 0, None, False),
        (None, None, 146, 1e6, 0, None, False),  # errors are known
    ],
)
def test_a_run_is_observed_where_fp8_gains(
    tmp_path, monkeypatch, source, every, steps, us, kernels, begin, pays
):
    waits_for, check = [], planning.check_plan
    monkeypatch.setattr(planning, "to_check", lambda *_: [None] * kernels)

    def check_plan(make, sites, performance, budget, *rest, **options):
        waits_for.append(budget.steps)
        return check(make, sites, performance, budget, *rest, **options)

    monkeypatch.setattr(planning, "check_plan", check_plan)
    times = {"bf16_us": us, "fp8_us": us / 2}
    path = support.write_table(tmp_path / "table.json", source=source, **times)
    run = build_lib.build(_config())
    config = _config(plan=str(path), every=every)
    chosen = planning.choose_plan(config, run.sites, steps, source=run.source)
    wanted = None if begin is None else (begin, ("fp8_rowwise",))
    assert chosen.observed == wanted
    assert (chosen.hope is not None) is (begin is not None)
    said = [note for note in chosen.notes if "FP8 may save" in note]
    assert len(said) == (begin is not None) + (steps == 145)
    if begin is None:
        assert all("too short to look for them" in note for note in said)
        return
    saves = us * (steps - begin - 81) / 1e6
    waits = 0.9 * len(run.sites) + (28 + 1.2 * kernels if kernels else 0)
    costs = 0.2 * len(run.sites) + (0 if pays else waits)
    [note] = said
    assert f"may save {saves:.0f} s" in note and f"some {costs:.0f} s" in note
    assert f"from step {begin} on" in note
    assert ("for this run" in note) is pays is (saves > costs)
    assert chosen.hope.is_awaited is pays
    # What is checked before the first step serves until FP8 is entered. A check for
    # later runs is of their plan, too.
    chosen.hope.checked()
    first = begin + 81 if pays else steps
    assert waits_for == [first, *([None] * (1 if pays else 2))]


def test_a_run_that_is_asked_to_be_observed_knows_what_a_review_may_choose(tmp_path):
    times = {"bf16_us": 1e6, "fp8_us": 5e5}
    path = support.write_table(tmp_path / "table.json", source="another", **times)
    run, config = build_lib.build(_config()), _config(plan=str(path), every=7)
    chosen = planning.choose_plan(config, run.sites, 146, source=run.source)
    assert chosen.observed is None and not any(x.is_fp8 for _, x in chosen.plan.choices)
    hoped, known, _ = chosen.hope.checked()
    assert any(choice.is_fp8 for _, choice in hoped.choices)
    assert known is not None


def test_a_run_on_several_devices_is_observed_at_once_where_fp8_pays(
    tmp_path, monkeypatch
):
    waits_for, check = [], planning.check_plan

    def check_plan(make, sites, performance, budget, *rest, **options):
        waits_for.append(budget.steps)
        return check(make, sites, performance, budget, *rest, **options)

    monkeypatch.setattr(planning, "check_plan", check_plan)
    times = {"bf16_us": 1e6, "fp8_us": 5e5}
    path = support.write_table(tmp_path / "table.json", source="another", **times)
    run, config = build_lib.build(_config()), _config(plan=str(path))
    config = dataclasses.replace(config, mesh=MeshConfig(replicas=2))
    # Two programs and an evaluation take 8 s; the first review is at step 81.
    for steps, begin in ((90, 0), (88, None)):
        chosen = planning.choose_plan(config, run.sites, steps, source=run.source)
        assert (chosen.observed and chosen.observed.begin) == begin
    # FP8's kernels are checked once, before the first step, as those of the plan are.
    assert waits_for == [90, 90, 88]


def test_a_table_that_does_not_hold_is_refused(tmp_path):
    path = tmp_path / "table.json"
    for header, why in (
        ({"device_kind": "NVIDIA B200"}, "NVIDIA B200"),
        ({"jax": "0.1"}, "jax 0.1"),
        ({"kernels": "x"}, "kernels have changed"),
    ):
        support.write_table(path, dataclasses.replace(header_here(), **header))
        with pytest.raises(ValueError, match=f"{path}.*{why}"):
            build_lib.build(_config(plan=str(path)))


def _plan_file(path, choice):
    decision = Decision(Choice.parse(choice), "why")
    save(path, DispatchPlan((("top_mlp/dense_0", decision),)))
    return str(path)


@pytest.mark.parametrize(
    "options, choice",
    [
        ({}, ROW),
        ({"rules": ("top_mlp/*=bf16",)}, "xla bf16"),
        ({"plan": "off", "rules": (f"top_mlp/*={ROW}",)}, ROW),
    ],
)
def test_a_plan_file_decides_and_rules_have_the_last_word(tmp_path, options, choice):
    path = _plan_file(tmp_path / "plan.json", ROW)
    run = build_lib.build(_config(**{"plan": path} | options))
    assert {k: v.name for k, v in run.plan.choices} == {"top_mlp/dense_0": choice}


@pytest.mark.parametrize(
    "choice, options, reason",
    [
        (ROW, {"rules": ("tip/*=bf16",)}, "matches no site"),
        (ROW, {"rules": ("top_mlp/*=fp9",)}, "unknown recipe"),
        (ROW, {"plan": "nowhere.json"}, "nowhere.json is not a file"),
        ("pallas bf16", {}, "Hopper"),
    ],
)
def test_what_cannot_be_followed_is_refused(tmp_path, choice, options, reason):
    path = _plan_file(tmp_path / "plan.json", choice)
    with pytest.raises(ValueError, match=reason):
        build_lib.build(_config(**{"plan": path} | options))


@pytest.mark.parametrize("every", [0, 3])
def test_tuning_comes_before_a_check_of_what_may_run(monkeypatch, tmp_path, every):
    asked, said, say = [], [], lambda line: None
    path = support.write_table(tmp_path / "table.json")
    sites = build_lib.build(_config()).sites
    tuned = performance_of(path)

    def check_plan(make_plan, sites, performance, budget, say, *, turns):
        plan = make_plan(performance)
        asked.append((dict(plan.choices), performance, budget, say))
        return CheckedPlan(plan, performance, ("checked",))

    def tune_at_start(sites, seconds, *, name, say):
        said.append((sites, seconds, name, say))
        return Local(tuned, ("a note",))

    monkeypatch.setattr(planning, "check_plan", check_plan)
    monkeypatch.setattr(planning, "tune_at_start", tune_at_start)
    chosen = planning.choose_plan(_config(plan="tune", every=every), sites, 20, say)
    assert said == [(sites, 7.0, "small", say)] and len(asked) == 1
    if chosen.hope is not None:  # later, in a thread of the run
        chosen.hope.checked()
    # The run waits for its own plan only, and what that costs is held against it; what
    # is checked beside it has twice the time.
    budgets = [Budget(5.0, steps=20), Budget(10.0)][: 2 if every else 1]
    assert [rest for _, *rest in asked] == [[tuned, x, say] for x in budgets]
    assert chosen.notes == ("a note", "checked") and chosen.performance is tuned
    # Errors of others make no FP8; what a review may promote sites to is checked, too.
    fp8 = [{path for path, x in own.items() if x.is_fp8} for own, *_ in asked]
    assert fp8 == [set(), {"bottom_mlp/dense_1", "top_mlp/dense_0"}][: len(asked)]
    remedy = "Probe measures them in this run" if every else "--probe.every 64"
    assert "errors on the model's own operands are not known" in chosen.outlook
    assert remedy in chosen.outlook


def test_a_resumed_run_has_the_plan_of_its_checkpoint(tmp_path, monkeypatch):
    path = support.write_table(tmp_path / "table.json")
    run = build_lib.build(_config(plan=str(path)))
    saved, sites = as_json(run.plan), run.sites
    observed = _config(plan=str(path), every=3)
    chosen = planning.resumed_plan(_config(plan=str(path)), saved, sites)
    assert chosen.performance is None
    chosen = planning.resumed_plan(observed, saved, sites)
    assert chosen.performance is not None
    path.unlink()  # the table is lost, the plan is not
    chosen = planning.resumed_plan(observed, saved, sites)
    assert dict(chosen.plan.choices) == dict(run.plan.choices)
    assert chosen.notes[0].startswith("Live errors will not change the plan: ")
    monkeypatch.setattr(planning, "local_performance", lambda: Local("known"))
    for plan, performance in (("off", None), ("auto", "known")):
        config = dataclasses.replace(observed, plan=plan)
        assert planning.resumed_plan(config, saved, sites).performance == performance
    with pytest.raises(ValueError, match="the checkpoint's plan"):
        plan_files.saved_plan({"nowhere": {}}, sites)
