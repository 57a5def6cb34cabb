"""Alarms of monitors: what raises one, and what is usual."""

from types import SimpleNamespace

import numpy as np
import pytest

from loka_jax.probe import live_errors, monitors
from loka_jax.probe.monitors import FIELDS
from loka_jax.recipe import get_recipe
from loka_jax.train.watch import alarm
from loka_jax.train.watch.alarm import THRESHOLDS, Alarms

USUAL = dict(
    uses=1.0, lhs_kurtosis=4.0, g_kurtosis=20.0, g_zeros=0.3, out_rms=1.0
) | dict(largest_logit=6.0)


def history(steps=120, **changes):
    """Returns the monitors of a site of steps like others but for some columns."""
    noise = np.random.default_rng(0).lognormal(0, 0.1, (steps, len(FIELDS)))
    rows = noise * [USUAL.get(name, 0.0) for name in FIELDS]
    rows[:, 0] = 1.0
    for name, values in changes.items():
        values = np.atleast_1d(values)
        rows[-len(values) :, FIELDS.index(name)] = values
    empty = np.zeros((monitors.OBSERVATIONS, len(FIELDS)))
    return np.concatenate([empty, rows])[-monitors.OBSERVATIONS :]


def seen(ratio=None, **changes):
    """Returns what monitors say of such a site, beside others of fewer steps."""
    few = history(steps=3)
    found = alarm.seen_in(np.stack([few, history(**changes), 0 * few, few]))
    assert [*found] == [0, 1, 3]
    return found[1]._replace(gradient_to_noise=ratio)


def beyond(ratio=None, **changes):
    return alarm.beyond(seen(ratio, **changes))


def test_usual_numbers_raise_no_alarm():
    assert not beyond(ratio=30.0)
    # As sizes grow in healthy training: by a power of the time, or at its start.
    assert not beyond(steps=200, out_rms=np.arange(1.0, 201) ** 2)
    early = 1.2 ** np.arange(40)
    assert not beyond(out_rms=np.concatenate([early, np.full(80, early[-1])]))


@pytest.mark.parametrize(
    "name, changes, text",
    [
        ("lhs_kurtosis", [40.0, 50.0], "the kurtosis of its input is 40, and usually"),
        ("g_kurtosis", [400.0, 300.0], "the kurtosis of its gradient is 300, and"),
        ("g_zeros", [0.7, 0.8], "FP8 makes 70% of its gradient zero, and usually 3"),
        ("lhs_saturated", [0.02, 0.03], "2% of its input are beyond what their"),
        ("largest_logit", [2000.0, 1500.0], "its logits reach up to 1.5e+03"),
    ],
)
def test_a_number_beyond_its_threshold_in_two_steps_raises_an_alarm(
    name, changes, text
):
    (found,) = (found := beyond(**{name: changes})).items()
    assert found[0] == name and found[1].startswith(text)
    assert not beyond(**{name: changes[:1]})  # a single one may be an outlier
    assert not beyond(**{name: [*changes, USUAL.get(name, 0.0)]})
    few = THRESHOLDS.least - 1
    assert not beyond(steps=few, **{name: changes})
    assert not beyond(**{name: [*changes[:1], np.nan]})


def test_a_planted_growth_raises_an_alarm_and_one_that_has_ended_does_not():
    sizes = 1.06 ** np.arange(60)
    assert "and grows" in beyond(out_rms=sizes)["growth"]
    assert not beyond(out_rms=sizes[:10])
    assert not beyond(out_rms=np.concatenate([sizes, np.full(20, sizes[-1])]))


def test_a_gradient_within_its_noise_raises_an_alarm():
    found = beyond(ratio=1.5)
    assert found == {
        "gradient_to_noise": "its gradient is 1.5 times its quantization noise"
    }


@pytest.mark.parametrize(
    "recipe, expected",
    [
        ("fp8_rowwise", 5.0),
        ("fp8_tensorwise", 4.0),
        ("fp8_rowwise_bf16_drhs", None),
        ("bf16", None),
        (None, None),
    ],
)
def test_the_gradient_over_its_noise_is_of_the_product_that_runs(recipe, expected):
    recipes = ("fp8_rowwise", "fp8_tensorwise")
    noise = np.array([[9, 9, 9 * error, 9 * error**2] for error in (0.2, 0.25)])
    recipe = None if recipe is None else get_recipe(recipe)
    assert alarm.gradient_to_noise(noise / 4, recipes, recipe) is None  # of few steps
    found = alarm.gradient_to_noise(noise, recipes, recipe)
    assert found == (None if expected is None else pytest.approx(expected))


def test_sites_that_were_observed_are_seen_each_layer_of_a_stack_by_itself():
    recipe, empty = get_recipe("fp8_rowwise"), live_errors.empty_errors(1)
    sums = np.zeros_like(empty.sums)
    sums[0, 2, 0] = 9, 9, 4.5, 1  # drhs's relative L2
    told = dict(monitors=np.float32(history()), steps=np.float32(9), sums=sums)
    one = empty._replace(**told)
    stack = type(one)(*(np.stack([x, x]) for x in one))
    probe = {"top": {"stats": one}, "new": {"stats": empty}, "stack": {"stats": stack}}
    config = SimpleNamespace(probe=SimpleNamespace(recipes=("fp8_rowwise",)))
    plan = SimpleNamespace(choice=SimpleNamespace(recipe=recipe))
    sites = [SimpleNamespace(path="stack", plan=plan)]
    run = SimpleNamespace(sites=sites, config=config)
    found = alarm.seen_by(run, SimpleNamespace(probe=probe))
    assert {*found} == {"top", "stack[0]", "stack[1]"}
    expected = monitors.read(np.float32(history()))
    assert found["top"].line() == expected and "growth" in expected
    assert found["stack[1]"].line() == expected | {"gradient_to_noise": 2.0}
    assert not alarm.seen_by(run, SimpleNamespace(probe={}))


def test_each_monitor_of_a_site_raises_one_alarm():
    grown = seen(out_rms=1.06 ** np.arange(60), g_kurtosis=[400.0, 400.0])
    first = Alarms().after(9, {"a": seen(), "b": grown})
    assert [text.partition(" is ")[0] for text in first.warnings] == [
        "step 9: b: its output",
        "step 9: b: the kurtosis of its gradient",
    ]
    assert first.after(10, {"b": grown}) == first
    later = first.after(11, {"a": grown, "b": grown})
    assert later.sites_since(first) == ["a"] and len(later.warnings) == 4
