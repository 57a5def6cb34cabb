"""Plans: from tables, chains and rules, to files and back."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from loka_jax.dispatch.candidates import candidates, table_key, why_not
from loka_jax.dispatch.chains import chain_times, fastest
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.plan import chains_of, load, plan_rows, save
from loka_jax.dispatch.plan import make_plan as make_plan_of
from loka_jax.dispatch.policy import Decision, Limits
from loka_jax.dispatch.table import Entry, Table
from loka_jax.measure.intervals import Interval
from loka_jax.ops.device import Device
from loka_jax.ops.plan import resolve_served
from loka_jax.recipe import get_recipe
from loka_jax.site import BF16, Choice, SiteSpec
from tests.support.dispatch import HEADER, LIMIT, ROW, errors, in_a_row, site

KERNEL = "pallas fp8_rowwise"
SPEC = SiteSpec(128, 64, 64)
FASTER = {BF16.name: 2.0, ROW: 1.0}


def _of_model(sites):
    """Returns errors by source, of a configuration named "model"."""
    return {f"model {x.path}": errors(rowwise=LIMIT) for x in sites}


def _table(*sites) -> Table:
    """Returns a table in which FP8 is faster, and errors of the sites' operands."""
    entries = [Entry({"training": dict(FASTER)}, _of_model([x])) for x in sites]
    keys = [table_key(x.spec) for x in sites]
    return Table(HEADER, dict(zip(keys, entries, strict=True)))


def make_plan(sites, table, **options):
    performance = None if table is None else PerformanceModel.of(table)
    return make_plan_of(sites, performance, **{"config": "model"} | options)


def _names(plan) -> list[str]:
    return [choice.name for _, choice in plan.choices]


def _in_fp8(plan) -> list[bool]:
    return [choice.is_fp8 for _, choice in plan.choices]


def _decision(plan) -> Decision:
    ((_, decision),) = plan.decisions
    return decision


def test_exact_rows_and_sizes_decide_what_can_run():
    # 100 is far below a multiple of 16: a product that contracts the batch has no FP8.
    sizes = ((100, 256, 256), (5000, 256, 256), (4096, 13, 64))
    reasons = [why_not(Choice.parse(ROW), SiteSpec(*x)) for x in sizes]
    assert [x is None for x in reasons] == [False, True, False]
    names = [choice.name for choice in candidates(SiteSpec(100, 256, 256))]
    # Kernels pad the rows.
    assert KERNEL in names and names[0] == BF16.name
    assert not any(name.startswith("xla fp8") for name in names)


@pytest.mark.parametrize("capability", ["7.5", "8.0", "8.9", "10.0", None])
def test_a_gpu_without_fp8_runs_bf16_and_says_so(capability):
    device = Device(compute_capability=capability)
    recipes = {"a": "fp8_rowwise", "head": "f32", "b": "bf16", "ruled": "fp8_rowwise"}
    sites = [
        dataclasses.replace(
            site(path), plan=resolve_served(SPEC, get_recipe(recipe), device)
        )
        for path, recipe in recipes.items()
    ]
    plan = make_plan(sites, None, rules={"ruled": "fp8_rowwise"})
    found = {path: (x.choice.name, x.reason) for path, x in plan.decisions}
    assert found.pop("ruled")[0] == ROW
    why = f"its compute capability is {capability}, and FP8 needs 8.9"
    assert found == ({"a": (BF16.name, why)} if capability in ("7.5", "8.0") else {})


def test_a_plan_takes_what_the_table_says():
    one, other = site(), site("head", n=128)
    table = _table(one, other)
    table.sites[table_key(other.spec)].times["training"] = {BF16.name: 1.0, ROW: 2.0}
    plan = make_plan([one, other], table)
    assert _names(plan) == [ROW, BF16.name]
    changed = plan.changed({"head": Decision(Choice.parse(ROW), "so")})
    assert _names(changed) == [ROW, ROW]
    row = plan_rows(plan)[0]
    assert (row["path"], row["choice"], row["speedup"]) == ("top/dense_0", ROW, 2.0)


@pytest.mark.parametrize(
    "effects, is_fp8",
    [
        # At its upper end the rise is at most 0.0002.
        ([(0.0, -0.0009, 0.0002)], [True]),
        ([(0.0, -0.0001, 0.00021)], [False]),
        ([(0.003, 0.0029, 0.0031), (-0.001, -0.0011, -0.0009)], [False, True]),
        # Means add up; the one with the highest upper end leaves.
        (
            [(12e-5, 0, 12.5e-5), (11e-5, 0, 13e-5), (1e-5, 0, 2e-5)],
            [True, False, True],
        ),
        # Half widths add up in squares: 0.00014 twice is 0.000198.
        ([(0.0, -0.00014, 0.00014)] * 2, [True, True]),
    ],
)
def test_the_effects_on_the_loss_together_are_within_the_limit(effects, is_fp8):
    sites = [site(f"top/dense_{i}", n=64 * (i + 1)) for i in range(len(effects))]
    table = _table(*sites)
    for x, effect in zip(sites, effects, strict=True):
        entry = table.sites[table_key(x.spec)]
        entry.effects[f"model {x.path}"] = Interval(*effect)
    assert _in_fp8(make_plan(sites, table)) == is_fp8
    assert all(_in_fp8(make_plan(sites, table, limits=Limits(loss=0.01))))
    # The loss knows nothing of gradients.
    for entry in table.sites.values():
        backward = "xla bf16/fp8_rowwise/fp8_rowwise"
        entry.times["training"] = {BF16.name: 2.0, backward: 1.0}
    assert all(_in_fp8(make_plan(sites, table)))


def test_what_is_known_of_the_site_itself_goes_before_the_table_and_others():
    own = site()
    table = _table(own)
    # Errors of another model's operands are borrowed.
    found = _decision(make_plan([own], table, config="other"))
    assert found.choice == BF16
    assert "borrowed from model top/dense_0" in found.runner_up
    for high, is_fp8 in ((LIMIT, True), (1.01 * LIMIT, False)):
        live = {own.path: errors(rowwise=high)}
        for config in ("other", "model"):
            plan = make_plan([own], table, config=config, errors=live)
            assert _in_fp8(plan) == [is_fp8]
    # What was refused stays in bfloat16 until its effect is measured again.
    (entry,) = table.sites.values()
    entry.refused[f"model {own.path}"] = "too harmful"
    found = _decision(make_plan([own], table))
    assert found.choice == BF16 and found.runner_up == f"{ROW}: too harmful"
    again = Entry(effects={f"model {own.path}": Interval(0.0, 0.0, 0.0)})
    table = table.merged(Table(HEADER, {table_key(own.spec): again}))
    assert _in_fp8(make_plan([own], table)) == [True]


def test_rules_have_the_last_word():
    sites = [site("top/dense_0"), site("top/dense_1"), site("head"), site("a", batch=4)]
    table = _table(sites[0])
    (entry,) = table.sites.values()
    entry.errors |= _of_model(sites)
    rules = {"t*": "fp8_tensorwise", "top/dense_1": "xla bf16"}
    assert _names(make_plan(sites, table, rules=rules)) == [
        "xla fp8_tensorwise",
        BF16.name,
        ROW,
    ]
    decision = dict(make_plan(sites, None, rules=rules).decisions)["top/dense_0"]
    assert decision.reason == "rule 't*'"
    # XLA falls back where sizes rule FP8 out.
    assert _names(make_plan([site(k=13)], None, rules={"*": ROW})) == [ROW]


def test_sites_that_follow_each_other_are_a_chain():
    # What d follows is not decided.
    sites = in_a_row(site("a"), site("b"), site("c", recipe="f32"), site("d"))
    sites = [*sites, site("e")]
    paths = [[x.path for x in chain] for chain in chains_of(sites)]
    assert paths == [["a", "b"], ["d"], ["e"]]


def _chain(first, second):
    """Returns two sites in a row and the table of their times in training."""
    sites = in_a_row(
        site("mlp/dense_0", k=256, n=256, norm="layer"),
        site("mlp/dense_1", k=256, n=128, norm="layer"),
    )
    entries = {}
    for x, times in zip(sites, (first, second), strict=True):
        by_pass = {"training" + form: by_name for form, by_name in times.items()}
        entries[table_key(x.spec)] = Entry(by_pass, _of_model(sites))
    return sites, Table(HEADER, entries)


def test_a_chain_is_decided_together():
    sites, table = _chain(
        {"": {BF16.name: 10.0, KERNEL: 11.0}, " out": {KERNEL: 9.0}},
        {"": {BF16.name: 10.0, KERNEL: 11.0}, " in": {KERNEL: 4.0}},
    )
    first = table.sites[table_key(sites[0].spec)]
    first.errors["model mlp/dense_0"] = errors(rowwise=0.5 * LIMIT)
    plan = make_plan(sites, table)
    assert _names(plan) == [KERNEL, KERNEL]
    one, two = (decision for _, decision in plan.decisions)
    assert (one.speedup, two.speedup) == (10 / 9, 10 / 4)
    assert (one.error, two.error) == (0.25 * LIMIT, 0.5 * LIMIT)
    assert one.runner_up == "xla bf16: faster by itself, not in this chain"
    apart = [dataclasses.replace(site, group=None) for site in sites]
    assert _names(make_plan(apart, table)) == [BF16.name] * 2
    # A site that is not accurate is in no chain.
    first.errors["model mlp/dense_0"] = errors(rowwise=1.01 * LIMIT)
    assert _names(make_plan(sites, table)) == [BF16.name] * 2


@pytest.mark.parametrize(
    "in_bf16, names", [(20.0, [KERNEL] * 2), (8.1, ["xla bf16", "pallas bf16"])]
)
def test_a_chain_takes_the_fastest_way_if_fp8_is_worth_it_there(in_bf16, names):
    # The second alone gains too little by FP8, and the chain little by its hand-over.
    in_kernels = {"pallas bf16": in_bf16, KERNEL: 8.0}
    sites, table = _chain(
        {"": {BF16.name: 10.0, **in_kernels}, " out": in_kernels},
        {"": {BF16.name: 6.0, "pallas bf16": 5.0, KERNEL: 4.9}, " in": {KERNEL: 4.6}},
    )
    found = _names(make_plan(sites, table))
    assert found[1] == names[1] and (found[0] == KERNEL) == (names[0] == KERNEL)


def test_a_plan_is_a_file(tmp_path):
    path, full = tmp_path / "plan.json", Choice.parse(ROW)
    full = Decision(full, "why", 1.5, 0.02, "other: slower", 0.1)
    plan = make_plan([site()], _table(site())).changed({"top/dense_0": full})
    save(path, plan)
    assert load(path, [site()]) == plan
    with pytest.raises(ValueError, match="dense_0, which are not sites of this model"):
        load(path, [site("elsewhere")])
    with pytest.raises(ValueError, match="nowhere.json cannot be read: No such file"):
        load(tmp_path / "nowhere.json", [site()])


@pytest.mark.parametrize(
    "value",
    [
        *(3, [], {"a": None}, {"a": {"choice": ROW}}),
        *({"a": {"choice": x, "reason": "so"}} for x in (None, 3, "xla fp9")),
        *({"a": {"choice": ROW, "reason": "so", "speedup": x}} for x in (True, 0)),
        {"a": {"choice": ROW, "reason": "so", "faster": 1}},
    ],
)
def test_what_is_not_a_plan_is_refused(value, tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(value))
    with pytest.raises(ValueError, match="plan.json is not a plan: .*\\.$"):
        load(tmp_path / "plan.json", [site()])


NAMES = ("xla bf16", "pallas bf16", "pallas fp8_rowwise", "pallas fp8_tensorwise")
CHOICES = [Choice.parse(name) for name in NAMES]
FORMS = ("training", "training in", "training out", "training in out")


def _entry(seed: int) -> Entry:
    """Returns times that the form of a site changes at random."""
    rng = np.random.default_rng(seed)
    return Entry(
        {form: dict(zip(NAMES, rng.uniform(1, 9, 4), strict=True)) for form in FORMS}
    )


def test_the_time_of_a_site_is_that_of_its_form():
    chain = [Choice.parse(name) for name in (*NAMES[1:], NAMES[0])]
    entries = [_entry(i) for i in range(4)]
    forms = ("training out", "training in out", "training in", "training")
    expected = [
        entry.times[form][choice.name]
        for entry, form, choice in zip(entries, forms, chain, strict=True)
    ]
    assert chain_times(entries, chain, "training") == expected


@pytest.mark.parametrize("length, seed", [(1, 0), (2, 1), (3, 2), (4, 3), (4, 4)])
def test_no_other_chain_is_faster(length, seed):
    entries = [_entry(10 * seed + i) for i in range(length)]
    allowed = [CHOICES[i % 2 :] for i in range(length)]
    found = fastest(entries, allowed, "training")
    times = {
        chain: sum(chain_times(entries, chain, "training"))
        for chain in itertools.product(*allowed)
    }
    assert tuple(found) == min(times, key=times.__getitem__)
