"""Sites as data, names of choices, and recipes composed of those of products."""

import pytest

from loka_jax.recipe import RECIPES, ROLES, get_recipe
from loka_jax.site import Choice, SiteSpec
from tests.support.recipes import recipe_of


def test_each_product_has_the_casts_of_its_recipe():
    recipe = get_recipe("fp8_rowwise/fp8_tensorwise/bf16")
    assert recipe.fwd == get_recipe("fp8_rowwise").fwd
    assert recipe.dlhs == get_recipe("fp8_tensorwise").dlhs
    assert recipe.drhs is None
    assert get_recipe("bf16/bf16/fp8_rowwise").drhs == get_recipe("fp8_rowwise").drhs
    assert get_recipe("fp8_rowwise/fp8_rowwise/fp8_rowwise_bf16_drhs").drhs is None
    # One that has a name is known by it.
    found = get_recipe("fp8_tensorwise_delayed/fp8_tensorwise_delayed/bf16")
    assert found == RECIPES["fp8_tensorwise_delayed_bf16_drhs"]


@pytest.mark.parametrize(
    "name, match",
    [
        ("cuda bf16", "no provider"),
        ("xla fp9", "unknown recipe"),
        ("xla bf16/bf16", "names 2 recipes"),
        ("xla f32/bf16/bf16", "one dtype"),
    ],
)
def test_other_names_are_refused(name, match):
    with pytest.raises(ValueError, match=match):
        Choice.parse(name)


def test_a_choice_is_fp8_if_any_product_is_and_its_name_is_read_back():
    names = "bf16", "bf16/bf16/fp8_rowwise", "bf16/fp8_rowwise/bf16", "fp8_rowwise"
    found = [Choice.parse(f"xla {name}") for name in names]
    assert [choice.is_fp8 for choice in found] == [False, True, True, True]
    assert [choice.name for choice in found] == [f"xla {name}" for name in names]
    initialized = Choice.parse("xla fp8_tensorwise_delayed").with_initialized_scales()
    assert initialized.recipe == recipe_of("fp8_tensorwise_delayed:initialized")


def test_roles_multiply_their_own_sizes():
    spec = SiteSpec(2, 3, 5)
    sizes = [spec.gemm_sizes(role) for role in ROLES]
    assert sizes == [(2, 3, 5), (2, 5, 3), (3, 2, 5)]


def test_a_norm_decides_on_parameters_and_on_the_scale_of_its_output():
    specs = [SiteSpec(2, 3, 5, norm) for norm in ("none", "layer", "rms", "block")]
    assert [spec.has_affine for spec in specs] == [False, True, True, False]
    assert [spec.fp8_out for spec in specs] == ["rowwise", *["tensorwise"] * 3]
    spec = SiteSpec(2, 3, 5, "layer", "gelu", use_bias=True)
    assert str(spec) == "2 x 3 x 5, layer, gelu, bias"
