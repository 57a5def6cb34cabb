"""The choice for an attention: by its times, its errors, and rules."""

import dataclasses

import pytest

from loka_jax import checked
from loka_jax.dispatch import attention
from loka_jax.dispatch.attention import IN_BF16, IN_FP8, in_bf16, with_attention_times
from loka_jax.dispatch.candidates import why_not_runnable
from loka_jax.dispatch.first_use import as_if_accurate, sites_us, unchecked
from loka_jax.dispatch.outlook import speedup
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.plan import as_json, from_json, make_plan
from loka_jax.dispatch.review import Reviewer
from loka_jax.dispatch.table import ATTENTION, Entry, Table, to_json
from loka_jax.dispatch.table import from_json as table_of
from loka_jax.measure.timing import Timing
from loka_jax.nn import Site
from loka_jax.nn.batched import in_high_precision
from loka_jax.ops.jagged_attention import AttentionPlan
from loka_jax.ops.plan import resolve
from loka_jax.recipe import get_recipe
from loka_jax.site import BF16, Choice, SiteSpec
from tests.support import stand_ins
from tests.support.dispatch import HEADER, LIMIT, errors, site

PATH = "layer_0/attention"
SPEC, HEADS = SiteSpec(2048, 256, 512), 4
OF_ALL_HEADS = dataclasses.replace(SPEC, m=HEADS * SPEC.m)
FASTER = {IN_BF16.name: 130.0, IN_FP8.name: 100.0}
WITHIN = errors(("fwd",), tensorwise=LIMIT)


def attention_site(recipe="fp8_rowwise", why_xla=None) -> Site:
    choice = Choice("xla", in_high_precision(get_recipe(recipe)))
    plan = resolve(SPEC, choice, stand_ins.CPU)
    return Site(path=PATH, plan=plan, batch=HEADS, together=AttentionPlan(why_xla))


def known(times=FASTER) -> PerformanceModel:
    table = Table(
        HEADER, {OF_ALL_HEADS: Entry({ATTENTION: dict(times)} if times else {})}
    )
    return PerformanceModel.of(table_of(to_json(table)))


def decided(own, performance, errors=WITHIN, **options):
    errors = {PATH: errors} if errors else None
    plan = make_plan([own], performance, config="model", errors=errors, **options)
    return dict(plan.decisions)[PATH]


@pytest.mark.parametrize(
    ("own", "times", "errors", "reason"),
    [
        ({"why_xla": "no Hopper GPU"}, FASTER, WITHIN, "no Hopper GPU"),
        ({"recipe": "bf16"}, FASTER, WITHIN, "its recipe is bf16"),
        ({}, None, WITHIN, "the time of its FP8 is not known"),
        (
            {},
            {IN_BF16.name: 104.0, IN_FP8.name: 100.0},
            WITHIN,
            "not faster: FP8 forward is 1.04 times bfloat16",
        ),
        ({}, FASTER, None, "its error was not measured"),
        (
            {},
            FASTER,
            errors(("fwd",), tensorwise=1.1 * LIMIT),
            "fwd: relative l2 0.0611 is above 0.0555",
        ),
    ],
)
def test_what_keeps_an_attention_in_bfloat16_is_its_reason(own, times, errors, reason):
    own = attention_site(**own)
    decision = decided(own, known(times), errors)
    assert decision.reason == reason and decision.choice == in_bf16(own)
    assert decision.choice == (IN_BF16 if own.attention.why_xla is None else BF16)


def test_fp8_within_the_limits_that_is_faster_is_chosen():
    decision = decided(attention_site(), known())
    assert decision.choice == IN_FP8 and decision.reason == "FP8 forward, 1.30x"
    assert decision.speedup == 1.3 and decision.error == pytest.approx(LIMIT / 2)
    # Errors count by the source of the run, too.
    entry = Entry(errors={f"model {PATH}": WITHIN})
    table = known().table
    named = PerformanceModel.of(Table(HEADER, table.sites | {SPEC: entry}))
    assert decided(attention_site(), named, None).choice == IN_FP8


def test_kernels_in_fp8_that_are_wrong_here_are_not_chosen(monkeypatch):
    wrong = {"jagged_attention_fp8": "they are wrong"}
    monkeypatch.setattr(checked, "why_wrong", wrong.get)
    decision = decided(attention_site(), known())
    assert (decision.choice, decision.reason) == (IN_BF16, "they are wrong")


@pytest.mark.parametrize(
    ("why_xla", "rule", "choice"),
    [
        (None, "fp8_tensorwise", IN_FP8.name),
        (None, "xla fp8_rowwise", "xla fp8_tensorwise/bf16/bf16"),
        (None, "bf16", IN_BF16.name),
        (None, "bf16/fp8_rowwise/bf16", IN_BF16.name),
        (None, "group bf16", IN_BF16.name),
        ("no GPU", "fp8_rowwise/bf16/bf16", "xla fp8_tensorwise/bf16/bf16"),
    ],
)
@pytest.mark.parametrize("performance", [None, known(None)])
def test_a_rule_forces_either(why_xla, rule, choice, performance):
    rules = {"layer_*/attention": rule}
    decision = decided(attention_site(why_xla=why_xla), performance, rules=rules)
    assert decision.choice.name == choice
    assert decision.reason == "rule 'layer_*/attention'"


def test_a_rule_for_kernels_that_do_not_serve_is_refused():
    own = attention_site(why_xla="no GPU")
    with pytest.raises(ValueError, match=r"rule '\*': pallas bf16 cannot .*: no GPU\."):
        decided(own, None, rules={"*": "pallas bf16"})


def test_without_times_or_in_float32_nothing_is_decided():
    assert make_plan([attention_site()], None).decisions == ()
    assert make_plan([attention_site("f32")], known()).decisions == ()


def test_a_saved_plan_keeps_it_and_sites_stay_in_their_order():
    sites = [attention_site(), site("out")]
    plan = make_plan(sites, known(), errors={PATH: WITHIN})
    assert [path for path, _ in plan.decisions] == [PATH, "out"]
    again = from_json(as_json(plan), sites, "a file")
    assert again == plan and dict(again.choices)[PATH] == IN_FP8
    assert why_not_runnable(dict(again.choices), sites) is None
    away = [attention_site(why_xla="no Hopper GPU"), site("out")]
    assert why_not_runnable({PATH: Choice("xla", IN_FP8.recipe)}, away) is None
    reason = why_not_runnable(dict(again.choices), away)
    assert reason == f"{IN_FP8.name} cannot run at {PATH}: no Hopper GPU"


def test_live_errors_promote_and_demote():
    sites, performance = [attention_site()], known()
    reviewer = Reviewer(sites, performance)
    in_bf16 = make_plan(sites, performance)
    _, promoted = reviewer.review(in_bf16, {PATH: WITHIN})
    assert promoted[PATH].choice == IN_FP8
    in_fp8 = in_bf16.changed(promoted)
    assert reviewer.review(in_fp8, {PATH: WITHIN}) == ({}, {})
    bad = errors(("fwd",), tensorwise=2.2 * LIMIT)
    demoted, _ = reviewer.review(in_fp8, {PATH: bad})
    assert demoted[PATH].choice == IN_BF16
    assert "live error of its fwd is 1.10 times its limit" in demoted[PATH].reason


def test_what_it_saves_counts_and_no_product_is_checked_in_its_place():
    sites, performance = [attention_site()], known()
    plan = make_plan(sites, performance, errors=as_if_accurate(sites))
    assert sites_us(plan, sites, performance) == pytest.approx(100.0)
    assert speedup(plan, sites, performance) == pytest.approx(1.3)
    assert unchecked([plan], sites, performance, "training") == []


def test_both_forms_are_timed_once_and_kept(monkeypatch, tmp_path):
    path, asked, said = tmp_path / "cache.json", [], []
    monkeypatch.setattr(attention, "cache_path", lambda: path)
    monkeypatch.setattr(attention, "header_here", lambda: HEADER)

    def time_attention(spec, heads):
        asked.append((spec, heads))
        return dict(FASTER)

    monkeypatch.setattr(attention, "time_attention", time_attention)
    unserved = dataclasses.replace(attention_site(why_xla="no GPU"), path="unserved")
    others = [attention_site("bf16"), attention_site("f32"), unserved, site("out")]
    layers = [attention_site(), dataclasses.replace(attention_site(), path="layer_1/x")]
    assert (
        with_attention_times(known(None), others, said.append).table
        == known(None).table
    )
    after = with_attention_times(known(None), [*others, *layers], said.append)
    assert asked == [(SPEC, HEADS)] and len(said) == 1
    assert decided(layers[0], after).choice == IN_FP8
    with_attention_times(after, layers, said.append)
    assert len(asked) == 1 and attention.tables.read(path).sites == after.table.sites

    def failing(spec, heads):
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(attention, "time_attention", failing)
    after = with_attention_times(known(None), layers, said.append)
    assert (
        "was not timed, and runs in bfloat16: RuntimeError: out of memory" in said[-1]
    )
    assert "not known" in decided(layers[0], after).reason


def test_what_is_timed_has_the_sizes_of_the_site(monkeypatch):
    seen = {}

    def time_kernels(cases):
        for name, (function, sets) in cases.items():
            (out,) = {function.eval_shape(*arguments).shape for arguments in sets}
            program = str(function.trace(*sets[0]).jaxpr)
            seen[name] = out, [*sets[0][-1]], "f8_e4m3" in program
        return {name: Timing.of([5.0]) for name in cases}

    monkeypatch.setattr(attention, "time_kernels", time_kernels)
    found = attention.time_attention(SiteSpec(320, 128, 150), 2)
    assert found == {IN_BF16.name: 5.0, IN_FP8.name: 5.0}
    (shape, offsets, is_fp8), (_, _, in_fp8) = seen[IN_BF16.name], seen[IN_FP8.name]
    assert shape == (320, 2, 64) and offsets == [0, 150, 300, 320]
    assert not is_fp8 and in_fp8
