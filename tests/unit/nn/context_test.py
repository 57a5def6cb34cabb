"""Choices for sites, given from outside of a model, and planned models."""

import dataclasses

import jax
import pytest
from flax import linen

from loka_jax import nn
from loka_jax.nn.context import SiteContext, current
from loka_jax.recipe import RECIPES
from loka_jax.site import Choice, SiteSpec
from tests.support.nn import DELAYED, initialized, listed, rounded
from tests.support.stand_ins import CPU, HOPPER

SPEC = SiteSpec(m=64, k=48, n=32, norm="layer", activation="relu")
X = rounded(32, 48)


class Pair(linen.Module):
    """A model of one's own, whose recipe no attribute of that name tells."""

    precision: str

    @linen.compact
    def __call__(self, x):
        mlp = nn.Mlp((64, 32), recipe=self.precision, name="mlp")
        return nn.Dense(16, recipe=self.precision, name="last")(mlp(x))


def recipes(model, x=X):
    return {path: site.recipe for path, site in listed(model, x).items()}


@pytest.mark.parametrize(
    "path, implementation, device, provider, recipe",
    [
        ("other", None, HOPPER, "pallas", "fp8_rowwise"),
        ("other", None, CPU, "xla", "fp8_rowwise"),
        ("by name", None, HOPPER, "pallas", "bf16"),
        ("recipe", "xla", HOPPER, "xla", "fp8_tensorwise"),
        ("choice", None, HOPPER, "xla", DELAYED),
        ("kernel", "xla", HOPPER, "pallas", "bf16"),
    ],
)
def test_a_choice_prevails_over_what_the_module_says(
    path, implementation, device, provider, recipe
):
    choices = {
        "by name": "bf16",
        "recipe": RECIPES["fp8_tensorwise"],
        "choice": Choice.parse(f"xla {DELAYED}"),
        "kernel": Choice.parse("pallas bf16"),
    }
    context = SiteContext(choices=choices, device=device)
    plan = context.plan(path, SPEC, "fp8_rowwise", implementation)
    assert (plan.choice.provider, plan.choice.recipe.name) == (provider, recipe)
    assert plan.spec == SPEC and plan.device == device and context.called == {path}
    assert not plan.recipe.scales_initialized
    told = SiteContext(choices=choices, device=device, scales_initialized=True)
    assert told.plan(path, SPEC, "f32", "xla").recipe.scales_initialized


def test_one_site_follows_another_recipe():
    model = Pair("bf16")
    plain = dict.fromkeys(["mlp/dense_0", "mlp/dense_1", "last"], "bf16")
    with nn.overriding({"mlp/dense_1": "fp8_rowwise"}):
        assert recipes(model) == plain | {"mlp/dense_1": "fp8_rowwise"}
        # Of an inner context only what it names is another.
        with nn.site_context(device=HOPPER):
            site = listed(model, X)["mlp/dense_1"]
        assert (site.recipe, site.plan.device) == ("fp8_rowwise", HOPPER)
    assert recipes(model) == plain


def test_an_error_inside_is_not_hidden_and_ends_the_context():
    with pytest.raises(ZeroDivisionError):
        with nn.overriding({"there": "bf16"}):
            1 / 0  # noqa: B018
    assert current().choices == {} and current().observer is None


def test_a_planned_model_runs_its_choices_and_checks_their_paths():
    choices = (("last", Choice.parse("xla fp8_rowwise")),)
    planned = nn.Planned(Pair("bf16"), choices)
    assert recipes(planned)["last"] == "fp8_rowwise"
    variables = initialized(planned, X)
    for model, is_cast in ((planned, True), (planned.model, False)):
        program = jax.make_jaxpr(model.apply)(variables, X)
        assert ("f8_e4m3fn" in str(program)) == is_cast
    lost = nn.Planned(Pair("bf16"), (("first", choices[0][1]),))
    for use in (lambda: initialized(lost, X), lambda: lost.apply(variables, X)):
        with pytest.raises(ValueError, match="no site was called at first"):
            use()


def test_a_planned_model_initializes_the_scales_of_sites_deep_inside():
    plain = nn.Planned(Pair(DELAYED))
    planned = dataclasses.replace(plain, scales_initialized=True)
    for model, is_set in ((plain, False), (planned, True), (nn.Planned(planned), True)):
        recipes = [site.plan.recipe for site in nn.list_sites(model, X)]
        assert [recipe.scales_initialized for recipe in recipes] == [is_set] * 3


def test_a_planned_model_tells_whether_scales_are_delayed():
    choices = (("site", Choice.parse(f"xla {DELAYED}")),)
    for model, is_delayed in (
        (nn.Dense(4, recipe=DELAYED), True),
        (nn.Dense(4, recipe=RECIPES[DELAYED]), True),
        (nn.Dense(4, recipe="bf16"), False),
        (Pair(DELAYED), False),
    ):
        assert nn.Planned(model).is_delayed == is_delayed
        assert nn.Planned(model, choices).is_delayed


def test_a_planned_model_by_xla_keeps_its_recipes():
    choices = (
        ("dense_0", Choice.parse(f"pallas {DELAYED}")),
        ("dense_1", Choice.parse("triton fp8_rowwise")),
    )
    mlp = nn.Mlp((64, 32), recipe="bf16")
    by_xla = nn.Planned(mlp, choices, True).by_xla()
    assert by_xla.model == mlp.clone(implementation="xla")
    assert dict(by_xla.choices) == {
        "dense_0": Choice.parse(f"xla {DELAYED}"),
        "dense_1": Choice.parse("xla fp8_rowwise"),
    }
    assert by_xla.scales_initialized
