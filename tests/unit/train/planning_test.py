"""Which plan a run follows, and what is said of it."""

import dataclasses

import jax
import pytest

from loka_jax.dispatch.first_use import CheckedPlan
from loka_jax.dispatch.header import header_here
from loka_jax.dispatch.local import Local
from loka_jax.dispatch.plan import DispatchPlan, as_json, save
from loka_jax.dispatch.policy import Decision
from loka_jax.site import Choice
from loka_jax.train import build as build_lib
from loka_jax.train import planning
from loka_jax.train.config import DispatchOptions
from tests.support import train as support
from tests.support import without_data

ROW = support.ROW


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    without_data.patch_build(monkeypatch)


def _config(*, plan="auto", rules=(), every=None):
    dispatch = DispatchOptions(rules=rules, tune_seconds=7.0, check_seconds=5.0)
    config = dataclasses.replace(support.config(), plan=plan, dispatch=dispatch)
    probe = dataclasses.replace(config.probe, every=every)
    return dataclasses.replace(config, probe=probe)


def _choices(config):
    return {path: one.name for path, one in build_lib.build(config).plan.choices}


def test_a_table_decides(tmp_path):
    path = support.write_table(tmp_path / "table.json")
    run = build_lib.build(_config(plan=str(path)))
    assert set(dict(run.plan.choices)) == {s.path for s in run.sites if s.spec.n > 1}
    planned = {site.path: site.recipe for site in run.sites if site.spec.n > 1}
    assert set(planned.values()) == {"bf16", "fp8_rowwise"}  # 13 columns fit no FP8


@pytest.mark.parametrize(
    "source, every, least_seconds, observed",
    [
        ("another", None, 20.0, planning.OBSERVE_EVERY),
        ("another", None, 20.1, 0),
        ("another", 0, 0.0, 0),
        ("another", 7, 100.0, 7),
        ("small", None, 0.0, 0),
    ],
    ids=["unknown errors", "short run", "forbidden", "asked", "known errors"],
)
def test_a_run_is_observed_where_errors_keep_fp8_out(
    tmp_path, monkeypatch, source, every, least_seconds, observed
):
    monkeypatch.setattr(planning, "OBSERVING_SECONDS", least_seconds)
    times = {"bf16_us": 1e6, "fp8_us": 5e5}  # saves 20 s: 20 steps, two sites of FP8
    path = support.write_table(tmp_path / "table.json", source=source, **times)
    run = build_lib.build(_config(plan=str(path), every=every))
    assert run.config.probe.every == observed
    assert (run.reviewer is not None) == bool(observed)
    said = any("FP8 may make the sites" in note for note in run.plan_notes)
    assert said == (every is None and bool(observed))


def test_one_of_several_processes_is_not_observed(tmp_path, monkeypatch):
    """A review by times that each has measured would change their plans apart."""
    monkeypatch.setattr(planning, "OBSERVING_SECONDS", 0.0)
    path = support.write_table(tmp_path / "table.json", source="another")
    sites = build_lib.build(_config()).sites
    chosen = planning.choose_plan(_config(plan=str(path)), sites, 20)
    assert chosen.observe_every == planning.OBSERVE_EVERY
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert planning.choose_plan(_config(plan=str(path)), sites, 20).observe_every == 0


@pytest.mark.parametrize(
    "header, why",
    [
        ({"device_kind": "NVIDIA B200"}, "NVIDIA B200"),
        ({"jax": "0.1"}, "jax 0.1"),
        ({"kernels": "x"}, "kernels have changed"),
    ],
    ids=["device", "version", "kernels"],
)
def test_a_table_that_does_not_hold_is_refused(tmp_path, header, why):
    path = tmp_path / "table.json"
    support.write_table(path, dataclasses.replace(header_here(), **header))
    with pytest.raises(ValueError, match=f"{path}.*{why}"):
        build_lib.build(_config(plan=str(path)))


def _plan_file(path, choice):
    decision = Decision(Choice.parse(choice), "why")
    save(path, DispatchPlan((("top_mlp/dense_0", decision),)))
    return str(path)


def test_a_plan_file_decides_and_rules_have_the_last_word(tmp_path):
    path = _plan_file(tmp_path / "plan.json", ROW)
    assert _choices(_config(plan=path)) == {"top_mlp/dense_0": ROW}
    config = _config(plan=path, rules=("top_mlp/*=bf16",))
    assert _choices(config) == {"top_mlp/dense_0": "xla bf16"}
    config = _config(plan="off", rules=("top_mlp/*=fp8_rowwise",))
    assert _choices(config) == {"top_mlp/dense_0": ROW}


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


class Checked:
    """Stands for the checks of plans; each changes what is known of times."""

    def __init__(self, monkeypatch):
        self.asked = []
        monkeypatch.setattr(planning, "check_plan", self.check)

    def check(self, make_plan, sites, performance, seconds, say):
        self.asked.append((make_plan.keywords.get("errors"), performance, seconds, say))
        known = f"checked {performance}"
        return CheckedPlan(known, known, (known,))


@pytest.mark.parametrize("every", [0, 3])
def test_tuning_comes_before_a_check_of_what_may_run(monkeypatch, every):
    checked = Checked(monkeypatch)
    config, say = _config(plan="tune", every=every), lambda line: None

    def tune_at_start(*given, **options):
        assert given == ("sites", 7.0)
        assert options == {"name": "small", "say": say}
        return Local("tuned", ("a note",))

    monkeypatch.setattr(planning, "tune_at_start", tune_at_start)
    monkeypatch.setattr(planning, "as_if_accurate", lambda sites: f"hope of {sites}")
    chosen = planning.choose_plan(config, "sites", 20, say)
    asked = [(None, "tuned", 5.0, say)]
    # What a review may promote sites to is checked, too.
    asked += [("hope of sites", "checked tuned", 5.0, say)] if every else []
    assert checked.asked == asked
    assert chosen.plan == "checked tuned" and chosen.observe_every == every
    assert chosen.notes == ("a note", "checked tuned")
    assert chosen.performance == ("checked " * len(asked)) + "tuned"


def test_a_resumed_run_has_the_plan_of_its_checkpoint(tmp_path, monkeypatch):
    path = support.write_table(tmp_path / "table.json")
    run = build_lib.build(_config(plan=str(path)))
    saved, sites = as_json(run.plan), run.sites
    config = _config(plan=str(path))
    chosen = planning.resumed_plan(config, saved, sites)
    assert dict(chosen.plan.choices) == dict(run.plan.choices)
    assert (chosen.performance, chosen.observe_every) == (None, 0)
    observed = _config(plan=str(path), every=3)
    chosen = planning.resumed_plan(observed, saved, sites)
    assert chosen.performance is not None and chosen.observe_every == 3
    assert chosen.notes == ()
    path.unlink()  # the table is lost, the plan is not
    chosen = planning.resumed_plan(observed, saved, sites)
    assert dict(chosen.plan.choices) == dict(run.plan.choices)
    (note,) = chosen.notes
    assert note.startswith("Live errors will not change the plan: ")
    assert chosen.performance is None
    monkeypatch.setattr(planning, "local_performance", lambda: Local("known"))
    for plan, performance in (("off", None), ("auto", "known")):
        config = dataclasses.replace(observed, plan=plan)
        assert planning.resumed_plan(config, saved, sites).performance == performance
    with pytest.raises(ValueError, match="the checkpoint's plan"):
        planning.saved_plan({"nowhere": {}}, sites)
