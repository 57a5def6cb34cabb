"""Plans: from tables and rules, to files and back."""

import dataclasses
import json

import pytest

from loka_jax import nn
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.candidates import candidates, table_key, why_not
from loka_jax.dispatch.header import Header, header_here
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.plan import load, save
from loka_jax.dispatch.plan import make_plan as make_plan_of
from loka_jax.dispatch.policy import Decision, Limits
from loka_jax.dispatch.table import MEASURES, Entry, Table
from loka_jax.measure.intervals import Interval
from loka_jax.ops.plan import resolve_served
from loka_jax.recipe import ROLES, get_recipe
from loka_jax.site import BF16, Choice, SiteSpec
from tests.support import stand_ins

HEADER = Header("cpu", "1", "1", "", "x")
ROW = "xla fp8_rowwise"


def _site(
    path="top/dense_0", m=128, k=64, n=64, recipe="fp8_rowwise", *, batch=None, **spec
) -> nn.Site:
    follows = spec.pop("follows", False)
    site = SiteSpec(m, k, n, **spec)
    plan = resolve_served(site, get_recipe(recipe), stand_ins.CPU)
    return nn.Site(path=path, plan=plan, batch=batch, follows=follows)


def _errors(value=0.03):
    measures = {name: Interval(value, value, value) for name in MEASURES}
    return {role: {"fp8_rowwise": measures} for role in ROLES}


def _of_model(sites, errors=None):
    return {f"model {site.path}": errors or _errors() for site in sites}


def _table(site, times, errors=None) -> Table:
    entry = Entry({"training": times}, _of_model([site], errors))
    return Table(HEADER, {table_key(site.spec): entry})


def make_plan(sites, table, **options):
    performance = None if table is None else PerformanceModel(table)
    return make_plan_of(sites, performance, **options)


def test_exact_rows_decide_what_can_run():
    # 100 is far below a multiple of 16: a product that contracts the batch has no FP8.
    reason = why_not(Choice.parse(ROW), SiteSpec(100, 256, 256))
    assert reason is not None and "100" in reason
    assert why_not(Choice.parse(ROW), SiteSpec(5000, 256, 256)) is None
    names = {choice.name for choice in candidates(SiteSpec(100, 256, 256))}
    # Kernels pad the rows.
    assert "pallas fp8_rowwise" in names
    assert not any(name.startswith("xla fp8") for name in names)


def test_the_fallback_can_run_anywhere_and_is_first():
    for key in (SiteSpec(64, 13, 7), SiteSpec(4096, 256, 256, "layer", "swish")):
        assert next(candidates(key)) == BF16


def test_kernels_are_candidates_where_they_serve():
    served, other = SiteSpec(4096, 256, 256, "layer", "swish"), SiteSpec(4096, 256, 16)
    choice = Choice.parse("pallas fp8_rowwise")
    assert why_not(choice, served) is None
    reason = why_not(choice, other)
    assert reason is not None and "n=16" in reason


def test_fp8_is_no_candidate_where_sizes_forbid_it():
    reason = why_not(Choice.parse(ROW), SiteSpec(4096, 13, 64))
    assert reason is not None and "k=13" in reason


def test_a_plan_takes_what_the_table_says():
    site = _site()
    plan = make_plan([site], _table(site, {"xla bf16": 2.0, ROW: 1.0}), config="model")
    assert dict(plan.choices) == {site.path: Choice.parse(ROW)}


def _with_effects(*effects: tuple[float, float]):
    """Returns sites and a table in which FP8 is twice as fast at each of them.

    Args:
        effects: mean and half width of the relative rise of the loss at each site.
    """
    sites = [_site(f"top/dense_{i}", n=64 * (i + 1)) for i in range(len(effects))]
    table = Table(HEADER)
    for site, (mean, half) in zip(sites, effects, strict=True):
        found = _table(site, {"xla bf16": 2.0, ROW: 1.0})
        (entry,) = found.sites.values()
        effect = Interval(mean, mean - half, mean + half)
        entry.effects[f"model {site.path}"] = effect
        table = table.merged(found)
    return sites, table


def _in_fp8(plan) -> list[bool]:
    return [choice.is_fp8 for _, choice in plan.choices]


def test_fp8_that_raises_the_loss_is_not_taken():
    sites, table = _with_effects((0.003, 1e-5), (-0.001, 1e-5))
    plan = make_plan(sites, table, config="model")
    first, _ = dict(plan.decisions).values()
    assert _in_fp8(plan) == [False, True]
    assert first.runner_up is not None and "loss by 0.200%" in first.runner_up
    free = make_plan(sites, table, config="model", limits=Limits(loss=0.01))
    assert _in_fp8(free) == [True, True]


def test_effects_on_the_loss_add_up():
    effects = (0.00012, 1e-6), (0.00015, 1e-6), (0.00001, 1e-6)
    assert _in_fp8(make_plan(*_with_effects(*effects), config="model")) == [
        True,
        False,
        True,
    ]


def test_where_data_cannot_tell_it_is_said_how_many_examples_would():
    # The interval must shrink from 0.0003 to 0.0002: 2.25 times as many examples.
    plan = make_plan(*_with_effects((0.0, 0.0003)), config="model")
    ((_, decision),) = plan.decisions
    assert decision.choice == BF16 and decision.runner_up is not None
    assert "cannot tell, 2.2 times as many" in decision.runner_up
    assert _in_fp8(make_plan(*_with_effects((0.0, 0.0002)), config="model")) == [True]
    # Intervals of independent effects add up in squares: 0.00014 twice is 0.000198.
    two = _with_effects((0.0, 0.00014), (0.0, 0.00014))
    assert _in_fp8(make_plan(*two, config="model")) == [True, True]


def test_borrowed_errors_make_fp8_safe_for_inference_only():
    site = _site()
    table = _table(site, {"xla bf16": 2.0, ROW: 1.0})
    (entry,) = table.sites.values()
    entry.times["inference"] = {"xla bf16": 2.0, ROW: 1.0}
    ((_, decision),) = make_plan([site], table, config="other").decisions
    assert decision.choice == BF16 and decision.runner_up is not None
    assert "borrowed from model top/dense_0" in decision.runner_up
    assert "--probe.every" in decision.runner_up
    inference = make_plan([site], table, config="other", roles=("fwd",))
    assert _in_fp8(inference) == [True]
    # Live errors of the site itself are its own.
    live = {site.path: _errors()}
    own = make_plan([site], table, config="other", errors=live)
    assert _in_fp8(own) == [True]
    live = {site.path: _errors(0.2)}
    assert _in_fp8(make_plan([site], table, config="model", errors=live)) == [False]


def test_a_site_that_was_refused_stays_in_bfloat16():
    site = _site()
    table = _table(site, {"xla bf16": 2.0, ROW: 1.0})
    (entry,) = table.sites.values()
    entry.refused[f"model {site.path}"] = "too harmful"
    ((_, decision),) = make_plan([site], table, config="model").decisions
    assert decision.choice == BF16 and decision.runner_up == f"{ROW}: too harmful"
    # Until its effect is measured again.
    again = Entry(effects={f"model {site.path}": Interval(0.0, 0.0, 0.0)})
    table = table.merged(Table(HEADER, {table_key(site.spec): again}))
    assert _in_fp8(make_plan([site], table, config="model")) == [True]


@pytest.mark.parametrize(
    "change",
    [{"m": 1000}, {"k": 128}, {"norm": "layer"}, {"use_bias": True}],
    ids=["rows", "width", "norm", "bias"],
)
def test_a_shape_that_was_not_measured_runs_in_bfloat16(change):
    site = _site()
    table = _table(site, {"xla bf16": 2.0, ROW: 1.0})
    plan = make_plan([_site(**change)], table)
    (decision,) = dict(plan.decisions).values()
    assert decision.choice == BF16 and "times are unknown" in decision.reason


def test_sites_without_a_choice_are_left_to_their_modules():
    sites = [_site("head", recipe="f32"), _site("pairs", batch=4)]
    assert make_plan(sites, Table(HEADER)).choices == ()
    assert make_plan([_site()], None).choices == ()


def test_rules_have_the_last_word():
    sites = [_site("top/dense_0"), _site("top/dense_1"), _site("head")]
    times = {"xla bf16": 2.0, ROW: 1.0}
    table = Table(
        HEADER, {table_key(sites[0].spec): Entry({"training": times}, _of_model(sites))}
    )
    rules = {"top/*": "fp8_tensorwise", "top/dense_1": "xla bf16"}
    plan = dict(make_plan(sites, table, rules=rules, config="model").choices)
    assert plan["top/dense_0"].name == "xla fp8_tensorwise"
    assert plan["top/dense_1"] == BF16 and plan["head"].name == ROW


@pytest.mark.parametrize(
    "rules, match",
    [
        ({"tip/*": "bf16"}, "matches no site"),
        ({"*": "fp9"}, "unknown recipe"),
        ({"*": "pallas fp8_rowwise"}, "cannot run at top/dense_0"),
    ],
)
def test_rules_that_cannot_be_followed_are_refused(rules, match):
    with pytest.raises(ValueError, match=match):
        make_plan([_site(n=16)], None, rules=rules)


def test_a_row_is_decided_together():
    sites = [
        _site("mlp/dense_0", k=256, n=256, norm="layer"),
        _site("mlp/dense_1", k=256, n=256, norm="layer", follows=True),
    ]
    kernel = "pallas fp8_rowwise"
    times = {
        "training": {"xla bf16": 10.0, kernel: 11.0},
        "training in": {kernel: 4.0},
        "training out": {kernel: 9.0},
    }
    table = Table(HEADER, {table_key(sites[0].spec): Entry(times, _of_model(sites))})
    plan = make_plan(sites, table, config="model")
    assert [c.name for _, c in plan.choices] == [kernel, kernel]
    # Of its own operands, where the table has them.
    entry = table.sites[table_key(sites[0].spec)]
    entry.errors["model mlp/dense_0"] = _errors(0.02)
    found = [one.error for _, one in make_plan(sites, table, config="model").decisions]
    assert found == [0.02, 0.03]
    apart = [sites[0], dataclasses.replace(sites[1], follows=False)]
    assert [c for _, c in make_plan(apart, table).choices] == [BF16, BF16]


def test_a_row_takes_the_fastest_way_if_fp8_is_worth_it_there():
    sites = [
        _site("mlp/dense_0", k=256, n=256, norm="layer"),
        _site("mlp/dense_1", k=256, n=128, norm="layer", follows=True),
    ]
    kernel = "pallas fp8_rowwise"
    # The second alone gains too little by FP8, and the row little by its hand-over.
    first = {
        "training": {"xla bf16": 10.0, kernel: 8.0},
        "training out": {kernel: 8.0},
    }
    second = {
        "training": {"xla bf16": 6.0, "pallas bf16": 5.0, kernel: 4.9},
        "training in": {kernel: 4.6},
    }
    table = Table(HEADER)
    for site, times in zip(sites, (first, second), strict=True):
        table.sites[table_key(site.spec)] = Entry(times, _of_model(sites))
    plan = make_plan(sites, table, config="model")
    assert [choice.name for _, choice in plan.choices] == [kernel, kernel]
    # Were bfloat16 nearly as fast in all, it would stay.
    first["training"]["pallas bf16"] = first["training out"]["pallas bf16"] = 8.1
    plan = make_plan(sites, table, config="model")
    assert [choice.name for _, choice in plan.choices][1] == "pallas bf16"


def test_a_row_leaves_xla_if_that_is_worth_it_there():
    sites = [
        _site("mlp/dense_0", k=256, n=256, norm="layer"),
        _site("mlp/dense_1", k=256, n=128, norm="layer", follows=True),
    ]
    kernel = "pallas bf16"
    # By itself the second gains too little.
    first = {"training": {"xla bf16": 12.0, kernel: 10.0}}
    second = {"training": {"xla bf16": 5.3, kernel: 5.0}}
    table = Table(HEADER)
    for site, times in zip(sites, (first, second), strict=True):
        table.sites[table_key(site.spec)] = Entry(times, {})
    plan = make_plan(sites, table, config="model")
    assert [choice.name for _, choice in plan.choices] == [kernel, kernel]
    first["training"]["xla bf16"] = 10.5
    plan = make_plan(sites, table, config="model")
    assert [choice for _, choice in plan.choices] == [BF16, BF16]


def test_a_pass_that_was_not_measured_leaves_a_row_in_bfloat16():
    sites = [
        _site("mlp/dense_0", k=256, n=256, norm="layer"),
        _site("mlp/dense_1", k=256, n=256, norm="layer", follows=True),
    ]
    table = _table(sites[0], {"xla bf16": 2.0, ROW: 1.0})
    plan = make_plan(sites, table, roles=("fwd",))
    assert [choice for _, choice in plan.choices] == [BF16, BF16]


def test_a_plan_is_a_file(tmp_path):
    site = _site()
    plan = make_plan([site], _table(site, {"xla bf16": 2.0, ROW: 1.0}), config="model")
    path = tmp_path / "plan.json"
    save(path, plan)
    assert load(path, [site]) == plan
    with pytest.raises(ValueError, match="not sites of this model"):
        load(path, [_site("elsewhere")])


_TYPES = {
    "choice": (None, True, 3, [1], {}, "xla fp9", "os.system bf16"),
    "reason": (None, True, 3, [1], {}),
    "speedup": (True, "fast", [1], {}, -1, 0, 2**70),
    "error": (True, "small", [1], {}, 2**70),
    "runner_up": (True, 3, [1], {}),
}


@pytest.mark.parametrize(
    "field, value",
    [(field, value) for field, values in _TYPES.items() for value in values],
)
def test_a_plan_with_a_field_of_another_type_is_refused(field, value, tmp_path):
    site = _site()
    decision = {"choice": ROW, "reason": "it is fast", field: value}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({site.path: decision}))
    with pytest.raises(ValueError, match="plan.json is not .*\\.$"):
        load(path, [site])


@pytest.mark.parametrize(
    "value",
    [
        3,
        None,
        "text",
        [],
        {"top/dense_0": None},
        {"top/dense_0": [ROW, "why"]},
        {"top/dense_0": {"choice": ROW}},
        {"top/dense_0": {"reason": "why"}},
        {"top/dense_0": {"choice": ROW, "reason": "why", "faster": 1}},
    ],
)
def test_what_is_not_a_plan_is_refused(value, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(value))
    with pytest.raises(ValueError, match="plan.json is not a plan: .*\\.$"):
        load(path, [_site()])


def test_a_plan_written_by_hand_needs_choices_and_reasons_only(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"top/dense_0": {"choice": ROW, "reason": "I say so"}}))
    (decision,) = dict(load(path, [_site()]).decisions).values()
    assert decision == Decision(Choice.parse(ROW), "I say so")


def test_a_plan_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nowhere.json cannot be read: No such file"):
        load(tmp_path / "nowhere.json", [_site()])
    with pytest.raises(ValueError, match="is not a regular file"):
        load(tmp_path, [_site()])


def test_a_path_names_a_table(tmp_path):
    site = _site()
    times = {"xla bf16": 2.0, ROW: 1.0}
    here = Table(header_here(), _table(site, times).sites)
    tables.write(tmp_path / "table.json", here)
    plan = make_plan_of([site], str(tmp_path / "table.json"), config="model")
    assert dict(plan.choices) == {site.path: Choice.parse(ROW)}
    tables.write(tmp_path / "other.json", Table(HEADER, here.sites))
    with pytest.raises(ValueError, match="other.json does not hold here, because"):
        make_plan_of([site], tmp_path / "other.json")
    with pytest.raises(ValueError, match="cannot be read"):
        make_plan_of([site], tmp_path / "none.json")
