"""Which plan a run follows, what is said of it, and that it keeps it."""

import dataclasses
import io
import json

import jax
import pytest
from rich.console import Console

from loka_jax import nn
from loka_jax.data import Position
from loka_jax.dispatch.header import header_here
from loka_jax.dispatch.plan import DispatchPlan, save
from loka_jax.dispatch.policy import Decision
from loka_jax.ops.device import HOPPER
from loka_jax.site import BF16, Choice
from loka_jax.train import build as build_lib
from loka_jax.train import planning
from loka_jax.train.config import DispatchOptions, EmbeddingConfig
from loka_jax.train.logs.progress import print_plan
from tests.support import train as support

ROW = support.ROW


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    support.share_data(monkeypatch)


def _config(workdir=None, *, plan="auto", rules=(), **options):
    config = support.config(workdir, **options)
    dispatch = DispatchOptions(rules=rules)
    return dataclasses.replace(config, plan=plan, dispatch=dispatch)


def _choices(config):
    return {path: one.name for path, one in build_lib.build(config).plan.choices}


def test_without_a_table_modules_decide():
    run = build_lib.build(_config())
    assert run.plan == DispatchPlan() and run.plan_notes == ()
    assert any(site.recipe == "fp8_tensorwise_delayed" for site in run.sites)


def test_a_table_decides(tmp_path):
    path = support.write_table(tmp_path / "table.json")
    run = build_lib.build(_config(plan=str(path)))
    assert set(dict(run.plan.choices)) == {s.path for s in run.sites if s.spec.n > 1}
    planned = {site.path: site.recipe for site in run.sites if site.spec.n > 1}
    assert set(planned.values()) == {"bf16", "fp8_rowwise"}  # 13 columns fit no FP8


@pytest.mark.parametrize(
    "source, every, observed",
    [
        ("another", None, planning.OBSERVE_EVERY),
        ("another", 0, 0),
        ("another", 7, 7),
        ("small", None, 0),
    ],
    ids=["unknown", "forbidden", "asked", "known"],
)
def test_a_run_is_observed_where_errors_keep_fp8_out(
    tmp_path, monkeypatch, source, every, observed
):
    monkeypatch.setattr(planning, "OBSERVING_SECONDS", 0.0)
    path = support.write_table(tmp_path / "table.json", source=source)
    config = _config(plan=str(path))
    probe = dataclasses.replace(config.probe, every=every)
    run = build_lib.build(dataclasses.replace(config, probe=probe))
    assert run.config.probe.every == observed
    assert (run.reviewer is not None) == bool(observed)
    said = any("FP8 may make the sites" in note for note in run.plan_notes)
    assert said == (every is None and bool(observed))


def test_a_run_is_not_observed_for_fp8_that_is_no_faster(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "OBSERVING_SECONDS", 0.0)
    path = support.write_table(tmp_path / "table.json", source="another", fp8_us=1.97)
    run = build_lib.build(_config(plan=str(path)))
    assert run.config.probe.every == 0 and run.reviewer is None


@pytest.mark.parametrize("seconds, observed", [(19.0, True), (21.0, False)])
def test_a_run_is_observed_if_it_is_long_enough(
    tmp_path, monkeypatch, seconds, observed
):
    monkeypatch.setattr(planning, "OBSERVING_SECONDS", seconds)
    times = {"bf16_us": 1e6, "fp8_us": 5e5}  # saves 20 s: 20 steps, two sites of FP8
    path = support.write_table(tmp_path / "table.json", source="another", **times)
    run = build_lib.build(_config(plan=str(path)))
    assert run.total_steps == 20
    assert bool(run.config.probe.every) == observed


@pytest.mark.slow
def test_a_step_follows_the_plan(tmp_path, monkeypatch):
    traces, make = [], build_lib.make_train_step

    def make_counted(*args, **options):
        step = make(*args, **options)
        return lambda state, batch: traces.append(state) or step(state, batch)

    monkeypatch.setattr(build_lib, "make_train_step", make_counted)
    path = support.write_table(tmp_path / "table.json")
    run = build_lib.build(_config(plan=str(path)))
    assert not jax.tree.leaves(run.init().fp8)  # current scales have no state
    state, train = run.init(), run.splits.train
    for i in range(3):
        batch = train.batch(Position(0, i, 0), 32, shuffle=True)
        state = run.step(state, batch)
    assert int(state.step) == 3 and int(state.skipped) == 0
    assert len(traces) == 1


def test_equal_plans_are_one_program(tmp_path):
    path = support.write_table(tmp_path / "table.json")
    first, second = (build_lib.build(_config(plan=str(path))) for _ in range(2))
    step = jax.jit(lambda planned: 1, static_argnums=0)
    for run in (first, second):
        step(run.planned)
    assert step._cache_size() == 1


@pytest.mark.parametrize(
    "spoil, why",
    [
        (lambda path: path.write_text(path.read_text()[:-50]), "is not JSON"),
        (lambda path: path.write_text('{"schema": 1}'), "not a dispatch table"),
        (lambda path: _foreign(path, device_kind="NVIDIA B200"), "NVIDIA B200"),
        (lambda path: _foreign(path, jax="0.1"), "jax 0.1"),
        (lambda path: _foreign(path, kernels="x"), "kernels have changed"),
    ],
    ids=["truncated", "schema", "device", "version", "kernels"],
)
def test_a_table_that_does_not_hold_is_refused(tmp_path, spoil, why):
    path = support.write_table(tmp_path / "table.json")
    spoil(path)
    with pytest.raises(ValueError, match=f"{path}.*{why}"):
        build_lib.build(_config(plan=str(path)))


@pytest.mark.parametrize(
    "text",
    ['{"top_mlp/dense_0": {"choice": "xla bf16", "rea', "", "[]", "3", "[" * 10_000],
    ids=["truncated", "empty", "list", "number", "deep"],
)
def test_a_plan_file_that_is_none_is_refused(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="plan.json is not (JSON|a plan)"):
        build_lib.build(_config(plan=str(path)))


def test_a_huge_plan_file_is_refused_before_it_is_parsed(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("[" + "[]," * (6 << 20) + "[]]")
    with pytest.raises(ValueError, match="plan.json is larger than 16 MiB"):
        build_lib.build(_config(plan=str(path)))


def test_texts_of_a_plan_are_printed_as_they_are(tmp_path):
    path = tmp_path / "plan.json"
    decision = Decision(
        Choice.parse(ROW), "[/b] \x1b[2J", runner_up="[red]x[/] :smile:"
    )
    save(path, DispatchPlan((("top_mlp/dense_0", decision),)))
    run = build_lib.build(_config(plan=str(path)))
    out = io.StringIO()
    notes = ("[/b] is a note",)
    print_plan(Console(file=out, width=200, soft_wrap=True), run.plan, notes)
    assert all(x in out.getvalue() for x in (r"[/b] \x1b[2J", "[red]x[/] :smile:"))
    assert out.getvalue().startswith(notes[0]) and "\x1b" not in out.getvalue()


def _foreign(path, **header):
    support.write_table(path, dataclasses.replace(header_here(), **header))


def test_a_plan_file_decides(tmp_path):
    path = tmp_path / "plan.json"
    save(path, DispatchPlan((("top_mlp/dense_0", Decision(Choice.parse(ROW), "why")),)))
    assert _choices(_config(plan=str(path))) == {"top_mlp/dense_0": ROW}


def test_rules_have_the_last_word_over_a_plan_file(tmp_path):
    path = tmp_path / "plan.json"
    save(path, DispatchPlan((("top_mlp/dense_0", Decision(Choice.parse(ROW), "why")),)))
    config = _config(plan=str(path), rules=("top_mlp/*=bf16",))
    assert _choices(config)["top_mlp/dense_0"] == "xla bf16"
    with pytest.raises(ValueError, match="matches no site"):
        build_lib.build(_config(plan=str(path), rules=("tip/*=bf16",)))


@pytest.mark.parametrize(
    "options, match",
    [
        ({"plan": "nowhere.json"}, "is not a file"),
        ({"rules": ("tip/*=bf16",)}, "matches no site"),
        ({"rules": ("top_mlp/*=fp9",)}, "unknown recipe"),
    ],
)
def test_what_cannot_be_followed_is_refused(options, match):
    with pytest.raises(ValueError, match=match):
        build_lib.build(_config(**options))


def test_a_rule_without_a_choice_is_refused():
    with pytest.raises(ValueError, match="PATTERN=CHOICE"):
        DispatchOptions(rules=("top_mlp",))


def test_kernels_for_a_gpu_are_refused_without_one(tmp_path):
    path = tmp_path / "plan.json"
    choice = Choice.parse("pallas bf16")
    save(path, DispatchPlan((("top_mlp/dense_0", Decision(choice, "why")),)))
    with pytest.raises(ValueError, match="Hopper"):
        build_lib.build(_config(plan=str(path)))


def test_kernels_that_do_not_serve_a_plans_site_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    choice = Choice.parse("pallas bf16")
    save(path, DispatchPlan((("top_mlp/dense_0", Decision(choice, "why")),)))
    monkeypatch.setattr(planning, "local_device", lambda: HOPPER)
    with pytest.raises(ValueError, match="cannot run at top_mlp/dense_0: k=32"):
        build_lib.build(_config(plan=str(path)))


def test_rules_hold_without_a_table():
    for plan in ("auto", "off"):
        config = _config(plan=plan, rules=("top_mlp/*=fp8_rowwise",))
        assert _choices(config) == {"top_mlp/dense_0": ROW}


@pytest.mark.slow
def test_a_resumed_run_keeps_its_plan(tmp_path):
    path = support.write_table(tmp_path / "table.json")
    workdir = tmp_path / "run"
    begun = _config(workdir, plan=str(path), epochs=1)
    code, said = support.train(begun)
    assert code == 0 and "fp8_rowwise" in said and "2.00x" in said
    saved = json.loads((workdir / "plan.json").read_text())
    assert {one["choice"] for one in saved.values()} == {BF16.name, ROW}
    report = (workdir / "report.html").read_text()
    assert "Dispatch" in report and ROW in report
    path.write_text("{}")  # the table is lost, the plan is not
    resumed = _config(workdir, plan=str(path), epochs=2, resume=True)
    code, said = support.train(resumed)
    assert code == 0 and "Resuming at step 10" in said and "ignored" not in said
    assert json.loads((workdir / "plan.json").read_text()) == saved


def _delayed(workdir, **options):
    rules = ("*_mlp/dense_[01]=fp8_tensorwise_delayed",)
    return _config(workdir, rules=rules, **options)


@pytest.mark.slow
def test_a_site_that_drifts_is_demoted_once_and_resumes_so(tmp_path, monkeypatch):
    support.plant_drift(monkeypatch, "top_mlp/dense_0", since=5)
    workdir = tmp_path / "run"
    looks = {"look_every": 1, "eval_every": 8}
    config = _delayed(workdir, epochs=1, **looks)
    code, said = support.train(config)
    assert code == 0 and said.count("runs in bfloat16 now") == 1
    (note,) = support.summary(workdir)["changes"]
    assert "step 8: top_mlp/dense_0" in note and "times its usual size" in note
    plan = json.loads((workdir / "plan.json").read_text())
    assert plan["top_mlp/dense_0"]["choice"] == BF16.name
    assert plan["bottom_mlp/dense_1"]["choice"] == "xla fp8_tensorwise_delayed"
    code, said = support.train(_delayed(workdir, epochs=2, resume=True, **looks))
    assert code == 0 and "Resuming at step 10" in said
    assert len(support.summary(workdir)["changes"]) == 1


@pytest.mark.slow
def test_kernels_that_do_not_compile_are_left_once(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    choice = Choice.parse("pallas bf16")
    config = dataclasses.replace(
        _config(tmp_path / "run", epochs=1, plan=str(path)),
        model=support.MODEL.clone(bottom_mlp=(64,)),
        embedding=EmbeddingConfig(dim=128),
    )
    save(path, DispatchPlan((("bottom_mlp/dense_1", Decision(choice, "why")),)))
    monkeypatch.setattr(planning, "local_device", lambda: HOPPER)  # but there is none
    with nn.site_context(device=HOPPER):
        code, said = support.train(config)
    assert code == 0 and said.count("runs in bfloat16 now") == 1
    assert "did not compile" in support.summary(tmp_path / "run")["changes"][0]
