"""What drift, live errors and kernels that do not compile change in a plan."""

import dataclasses
import functools
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import scaling, triton
from loka_jax.data import Position
from loka_jax.dispatch import learned
from loka_jax.dispatch.drift import HOME_LOOKS, LOOKS, SiteDrift
from loka_jax.dispatch.first_use import CheckedPlan
from loka_jax.dispatch.hope import Hope
from loka_jax.dispatch.outlook import with_rows
from loka_jax.dispatch.plan import DispatchPlan, as_json
from loka_jax.dispatch.policy import Decision, Limits
from loka_jax.nn.scale_state import SCALES
from loka_jax.probe import live_errors
from loka_jax.probe.site import SiteStats
from loka_jax.recipe import get_recipe
from loka_jax.site import BF16, Choice
from loka_jax.train import build as build_lib
from loka_jax.train import planning
from loka_jax.train.config import DispatchOptions, ProbeOptions
from loka_jax.train.step import named_sites
from loka_jax.train.watch import replan
from loka_jax.train.watch.host_state import Progress
from tests.support import train as support
from tests.support import without_data
from tests.support.configs import tiny
from tests.support.loop import start_state

CROSS = ["cross/u_0", "cross/u_1"]
DELAYED = "xla fp8_tensorwise_delayed"
ROW = Choice.parse(support.ROW)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def progress_of(**options):
    return Progress(step=80, position=Position(0, 80, 0), **options)


@pytest.fixture(scope="module")
def crossed():
    """A run of a cross network, which is one operation, and of layers beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "why_not_installed", lambda: None)
        without_data.patch_build(patch)
        config = tiny("fp8_dcnv2")
        options = dict(num_cross_layers=2, recipe="fp8_tensorwise_delayed")
        model = config.model.clone(**options)
        run = build_lib.build(dataclasses.replace(config, model=model, plan="off"))
        yield run


def reviewed(run, probe, progress, said=None):
    """Returns what follows a review, which says what is said there."""
    return replan.review(
        run, probe, progress, [].append if said is None else said.append
    )


def after_drift(run, progress, **sites):
    """Returns what follows looks at sites of the cross network, by their names."""
    looks = {path: SiteDrift(looks=9) for path in (*CROSS, "deep_mlp/dense_0")}
    looks |= progress.drift
    for name, changes in sites.items():
        looks[f"cross/{name}"] = dataclasses.replace(looks[f"cross/{name}"], **changes)
    return reviewed(run, {}, dataclasses.replace(progress, drift=looks))


def away(progress):
    return {path: x.left for path, x in progress.drift.items() if x.left is not None}


def test_a_cross_network_leaves_fp8_and_returns_as_a_whole(crossed):
    assert after_drift(crossed, progress_of(), u_1=dict(off=LOOKS - 1)) is None
    grown = dict(off=LOOKS, why="it grew")
    plan, (first, second), progress = after_drift(crossed, progress_of(), u_1=grown)
    assert dict(plan.choices) == dict.fromkeys(CROSS, BF16)
    assert first == "step 80: cross/u_1 runs in bfloat16 now: it grew."
    assert "cross/u_0 runs in bfloat16 now: cross/u_1 has drifted, and" in second
    assert {path: x["choice"] for path, x in away(progress).items()} == dict.fromkeys(
        CROSS, DELAYED
    )
    demoted = crossed.replanned(plan)
    # What is in bfloat16 already has nothing to leave.
    off = dict(off=LOOKS, left=None)
    assert after_drift(demoted, progress, u_0=off, u_1=off) is None
    # The one that had to follow is home first, and waits for the other.
    home = dict(home=HOME_LOOKS)
    assert after_drift(demoted, progress, u_0=home) is None
    plan, said, progress = after_drift(demoted, progress, u_0=home, u_1=home)
    assert all(dict(plan.choices)[path].name == DELAYED for path in CROSS)
    assert not away(progress)
    expected = f"step 80: {CROSS[0]} runs by {DELAYED} now: its operands are back."
    assert expected in said


def test_sites_of_alarms_stay_in_bfloat16_with_their_cross_network(crossed):
    before = progress_of(broken=("x",))
    paths = ["cross/u_1", "top[3]", "unknown"]
    plan, said, progress = replan.after_alarms(crossed, before, paths)
    assert dict(plan.choices) == dict.fromkeys(CROSS, BF16)
    why = "its monitors raised an alarm"
    assert f"step 80: cross/u_1 runs in bfloat16 now: {why}." in said
    assert any("cross/u_1 has raised an alarm, and its" in x for x in said)
    assert progress.broken[0] == "x" and {*progress.broken[1:]} == {*CROSS}
    # What is in bfloat16 already has nothing to leave.
    demoted = crossed.replanned(plan)
    assert replan.after_alarms(demoted, progress, paths) == (plan, (), progress)


def test_a_new_plan_keeps_the_scales_that_there_are_and_begins_others():
    one, two = {"x": jnp.ones(3)}, {"x": 2 * jnp.ones(3)}
    state = dataclasses.replace(start_state(), fp8={"a": one, "gone": one})
    begun = dataclasses.replace(state, fp8={"a": two, "b": two}, table=None)
    of_plan = {"plan": SimpleNamespace(init=lambda: begun, sites=())}
    run = SimpleNamespace(replanned=of_plan.get)
    found, new = replan.replanned(run, state, "plan")
    assert found is of_plan["plan"] and new.table is state.table
    chex.assert_trees_all_equal(new.fp8, {"a": one, "b": two})


def test_new_scales_are_of_the_amaxes_that_probe_has_seen():
    recipe = get_recipe("fp8_tensorwise_delayed")
    empty = scaling.init_delayed(recipe)
    kept = scaling.stored(jnp.float32([8.0, 8.0, 8.0]), recipe)
    tables = {"kept": kept, "seen": empty, "unseen": empty}
    tables |= {"stack": scaling.DelayedScaling(jnp.stack([empty.table] * 2))}
    begun = {name: {SCALES: state.table} for name, state in tables.items()}
    plan = SimpleNamespace(choice=SimpleNamespace(recipe=recipe))
    run = SimpleNamespace(
        replanned=lambda plan: run,
        sites=[SimpleNamespace(path=path, plan=plan) for path in tables],
        init=lambda: SimpleNamespace(fp8=begun),
    )
    amaxes = jnp.float32([[1.0, 2.0, 3.0], [4.0, 0.0, 1.0]])
    seen = {"kept": amaxes[0], "seen": amaxes[0], "stack": amaxes}
    errors = live_errors.empty_errors(1)
    probe = {x: {"stats": errors._replace(amaxes=own)} for x, own in seen.items()}
    state = dataclasses.replace(start_state(), fp8={}, probe=probe)
    _, new = replan.replanned(run, state, "plan")
    sites = named_sites(new)
    update = functools.partial(scaling.update_delayed, empty, recipe=recipe)
    expected = {
        "kept": kept.table,
        "seen": update(amaxes[0]).table,
        "unseen": empty.table,
        "stack": jnp.stack([update(x).table for x in amaxes]),
    }
    found = {path: state.table for path, state in sites.items()}
    chex.assert_trees_all_equal(found, expected)
    assert bool(scaling.scales_initialized(sites["seen"]))
    assert not bool(scaling.scales_initialized(sites["stack"]))  # an amax is zero


def test_kernels_that_do_not_compile_are_left_to_xla(crossed):
    assert replan.after_failure(crossed, progress_of(), ValueError()) is None
    kernel = Choice.parse("pallas bf16")
    changed = {CROSS[0]: Decision(kernel, "fast"), CROSS[1]: Decision(ROW, "fast")}
    run = crossed.replanned(crossed.plan.changed(changed))
    full = RuntimeError("RESOURCE_EXHAUSTED: out of memory")
    assert replan.after_failure(run, progress_of(), full) is None
    error = RuntimeError("no\nregisters")
    change = replan.after_failure(run, progress_of(broken=("x",)), error)
    choices = dict(change.plan.choices)
    assert (choices[CROSS[0]], choices[CROSS[1]]) == (BF16, ROW)
    assert change.progress.broken == ("x", CROSS[0])
    assert "its step did not compile (RuntimeError: no reg" in change.said[0]


SITES = BOTTOM, TOP = ("bottom_mlp/dense_1", "top_mlp/dense_0")
PROBE = ProbeOptions(every=1, recipes=("fp8_rowwise",))
LONG = 10**9  # steps of 2 us, of which FP8 saves a half
LIMITS = Limits(healthy=3.0, worst_row=30.0)  # errors of 3 x 0.037 = 0.111


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose sites begin in bfloat16."""
    path = tmp_path_factory.mktemp("run") / "table.json"
    with pytest.MonkeyPatch.context() as patch:
        without_data.patch_build(patch)
        table = support.write_table(path, source="another")
        how = dict(
            plan=str(table), probe=PROBE, dispatch=DispatchOptions(limits=LIMITS)
        )
        built = build_lib.build(dataclasses.replace(support.config(), **how))
        yield dataclasses.replace(built, total_steps=LONG)


def seen(steps=9.0, **errors):
    """Returns statistics of Probe with these mean errors of all products, by path."""
    probe, empty = {}, live_errors.empty_errors(1)
    for path, value in errors.items():
        sums = np.array([steps, steps, steps * value, steps * value**2])
        amaxes = np.float32([1.0, 2.0, 3.0])
        sums = np.broadcast_to(sums, empty.sums.shape)
        errors = empty._replace(steps=steps, sums=sums, amaxes=amaxes)
        stats = SiteStats(None, None, None, errors)
        group, name = path.split("/")
        probe.setdefault(group, {})[name] = {"stats": stats}
    return probe


GOOD = {path: 0.03 for path in SITES}


def promoted(run, progress=None):
    """Returns the run after a review of good errors, and its progress."""
    change = reviewed(run, seen(**GOOD), progress or progress_of())
    return run.replanned(change.plan), change.progress


def test_sites_enter_fp8_and_one_that_leaves_it_is_remembered_and_looked_at_anew(run):
    now, progress = promoted(run)
    assert [dict(now.plan.choices)[path] for path in SITES] == [ROW] * 2
    assert reviewed(now, seen(**GOOD), progress) is None
    assert reviewed(run, seen(2.0, **GOOD), progress_of()) is None  # too few
    drift = {path: SiteDrift(looks=9) for path in SITES}
    before = progress_of(drift=drift, unsafe=("x",))
    plan, (said,), progress = reviewed(now, seen(**{TOP: 0.12}), before)
    assert dict(plan.choices) == {**dict(now.plan.choices), TOP: BF16}
    assert f"step 80: {TOP} runs in bfloat16 now: the live error of its" in said
    assert progress.unsafe == ("x", TOP) and list(progress.drift) == [BOTTOM]
    # 0.1 is within 0.111, but not within three quarters of it.
    again, now = seen(**{TOP: 0.1}), now.replanned(plan)
    assert reviewed(now, again, progress) is None
    assert reviewed(now, again, progress_of()) is not None
    assert reviewed(now, seen(**GOOD), progress) is not None


@pytest.fixture
def by_row(run):
    """The decision on the upper site in FP8, as JSON values."""
    return as_json(promoted(run)[0].plan)[TOP]


def test_a_site_that_left_fp8_for_another_reason_is_not_promoted(run, by_row):
    drift = {TOP: SiteDrift(left=by_row, demotions=1)}
    for reason in ({"drift": drift}, {"broken": (TOP,)}):
        choices = dict(promoted(run, progress_of(**reason))[0].plan.choices)
        assert choices[BOTTOM] == ROW and choices[TOP] == BF16


@pytest.mark.parametrize("error, returns", [(0.03, True), (0.1, False), (None, True)])
def test_a_site_returns_from_drift_once_its_live_errors_are_low(
    run, by_row, error, returns
):
    back = progress_of(drift={TOP: SiteDrift(left=by_row, demotions=1, home=9)})
    found = reviewed(run, {} if error is None else seen(**{TOP: error}), back)
    assert (found is not None) is returns
    if returns:
        choices = dict(found.plan.choices)
        assert (choices[TOP], choices[BOTTOM]) == (ROW, BF16)


def test_one_review_follows_the_looks_and_then_the_live_errors(run, by_row):
    back = progress_of(drift={TOP: SiteDrift(left=by_row, demotions=1, home=9)})
    plan, (returned, entered), progress = reviewed(run, seen(**GOOD), back)
    assert [dict(plan.choices)[path] for path in SITES] == [ROW] * 2
    assert f"{TOP} runs by {ROW.name} now: its operands are back" in returned
    assert f"{BOTTOM} runs by {ROW.name} now" in entered and not away(progress)


def test_sites_enter_fp8_if_the_rest_of_the_run_gains_more_than_it_costs(run):
    short, said = dataclasses.replace(run, total_steps=1_000_080), []
    assert short.hoped.plan.choices == promoted(run)[0].plan.choices
    # Steps of the plan that was hoped for are compiled, and those of another are not.
    assert reviewed(short, seen(**GOOD), progress_of(), said) is not None
    unforeseen = dataclasses.replace(short)
    assert reviewed(unforeseen, seen(**GOOD), progress_of(), said) is None
    assert said == [
        "step 80: FP8 may save 2 s of the rest of the run, and entering it takes some "
        "1 s.",
        "step 80: FP8 may save 2 s of the rest of the run, and entering it takes some "
        "4 s, so that it is not entered.",
    ]
    assert reviewed(run, seen(**GOOD), progress_of(), said) is not None
    assert said[2].startswith("step 80: FP8 may save 2,000 s of the rest of the run")


def test_live_errors_are_kept_for_the_next_run_of_the_same(run, monkeypatch):
    reviewed(run, seen(**GOOD), progress_of())
    kept = learned.kept_errors(run.source, run.sites)
    assert set(kept) == set(SITES)
    assert kept[TOP]["fwd"]["fp8_rowwise"]["relative_l2"].mean == pytest.approx(0.03)
    # The next run enters FP8 at its start, and observes whether that is right.
    config = dataclasses.replace(run.config, probe=ProbeOptions())
    monkeypatch.setattr(
        planning,
        "check_plan",
        lambda make, sites, known, *_, **__: CheckedPlan(make(known), known),
    )
    sites = run.list_sites(DispatchPlan())
    chosen = planning.choose_plan(config, sites, 20, source=run.source)
    assert [dict(chosen.plan.choices)[path] for path in SITES] == [ROW] * 2
    assert chosen.observed == (0, ("fp8_rowwise",))
    # Another run's, of other sizes, forged for another device, torn.
    assert learned.kept_errors("another", run.sites) == {}
    smaller = [with_rows(site, 0.5) for site in run.sites]
    assert learned.kept_errors(run.source, smaller) == {}
    path = learned.learned_path(run.source)
    text = path.read_text()
    path.write_text(text.replace('"kernels": "', '"kernels": "0'))
    assert learned.kept_errors(run.source, run.sites) == {}
    for torn in (text[: len(text) // 2], text.replace("0.03", "NaN")):
        path.write_text(torn)
        assert learned.kept_errors(run.source, run.sites) == {} and not path.exists()


def test_a_check_for_later_runs_is_not_waited_for(run):
    checked = CheckedPlan(promoted(run)[0].plan, run.reviewer.performance)
    hope = Hope(lambda turns: checked, is_awaited=False)
    hoping = dataclasses.replace(run, hope=hope)
    assert reviewed(hoping, seen(**GOOD), progress_of()) is None
    assert set(learned.kept_errors(run.source, run.sites)) == set(SITES)
    hope.checked()
    assert reviewed(hoping, seen(**GOOD), progress_of()) is not None


def test_the_first_errors_are_kept_until_others_demote(run):
    now, progress = promoted(run)

    def kept():
        errors = learned.kept_errors(run.source, run.sites)
        means = [errors[x]["fwd"]["fp8_rowwise"]["relative_l2"].mean for x in SITES]
        return pytest.approx(means)

    reviewed(now, seen(**{BOTTOM: 0.02, TOP: 0.1}), progress)
    assert kept() == [0.03, 0.03]
    reviewed(now, seen(**{BOTTOM: 0.02, TOP: 0.12}), progress)
    assert kept() == [0.03, 0.12]
    # Early errors of the next run are low, and do not undo what was learned later.
    first = dataclasses.replace(progress_of(), step=run.config.probe.first_review())
    assert reviewed(run, seen(**GOOD), first) is None
    assert reviewed(run, seen(**GOOD), progress_of()) is not None


def test_a_full_disk_is_said_and_the_review_goes_on(run, monkeypatch):
    def write(path, table):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(learned.tables, "write", write)
    said = []
    assert reviewed(run, seen(**GOOD), progress_of(), said) is not None
    assert "not kept for later runs: [Errno 28] No space left" in said[-1]


@pytest.mark.parametrize("index", [0, 1])
def test_all_processes_follow_the_first_ones_review(run, monkeypatch, index):
    expected = reviewed(run, seen(**GOOD), progress_of())
    told = []
    monkeypatch.setattr(replan, "same_text", lambda text: told.append(text) or told[0])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for process in (0, index):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        own = run if process == 0 else dataclasses.replace(run, reviewer=None)
        change = replan.agreed_review(own, seen(**GOOD), progress_of(), print)
        assert change == expected
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    told.clear()
    assert replan.agreed_review(run, {}, progress_of(), print) is None
