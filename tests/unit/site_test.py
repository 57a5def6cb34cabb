"""Names of choices, and recipes composed of those of products."""

import pytest

from loka_jax.recipe import RECIPES, get_recipe
from loka_jax.site import Choice


@pytest.mark.parametrize(
    "name",
    ["xla bf16", "pallas fp8_rowwise/fp8_blockwise/bf16", "xla fp8_tensorwise_delayed"],
)
def test_a_name_is_read_back(name):
    assert Choice.parse(name).name == name
    assert Choice.parse(Choice.parse(name).name) == Choice.parse(name)


def test_each_product_has_the_casts_of_its_recipe():
    recipe = get_recipe("fp8_rowwise/fp8_tensorwise/bf16")
    assert recipe.fwd == get_recipe("fp8_rowwise").fwd
    assert recipe.dlhs == get_recipe("fp8_tensorwise").dlhs
    assert recipe.drhs is None


def test_a_composed_recipe_that_has_a_name_is_known_by_it():
    delayed = "fp8_tensorwise_delayed"
    found = get_recipe(f"{delayed}/{delayed}/bf16")
    assert found == RECIPES["fp8_tensorwise_delayed_bf16_drhs"]
    assert get_recipe("bf16/bf16/bf16") == RECIPES["bf16"]


@pytest.mark.parametrize(
    "name, match",
    [
        ("cuda bf16", "no provider"),
        ("bf16", "no provider"),
        ("xla fp9", "unknown recipe"),
        ("xla bf16/bf16", "names 2 recipes"),
        ("xla f32/bf16/bf16", "one dtype"),
    ],
)
def test_other_names_are_refused(name, match):
    with pytest.raises(ValueError, match=match):
        Choice.parse(name)
