import copy
import dataclasses

import jax.numpy as jnp
import pytest

from loka_jax import recipe
from loka_jax.fp8 import E4M3, E5M2
from loka_jax.recipe import Cast, GemmRecipe, Recipe, get_recipe

E4M3_CAST = Cast(dtype=E4M3)
E5M2_CAST = Cast(dtype=E5M2)


@pytest.mark.parametrize("name", recipe.RECIPES)
def test_recipes_are_found_by_their_own_names(name):
    assert get_recipe(name).name == name
    assert not get_recipe(name).scales_initialized


def test_an_unknown_recipe_suggests_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'fp8_rowwise'"):
        get_recipe("fp8_rowise")


def test_an_unlike_recipe_lists_what_there_is():
    with pytest.raises(ValueError, match="There are bf16, f32, fp8_blockwise"):
        get_recipe("qqq")


def test_initialized_is_a_suffix_of_the_name():
    initialized = get_recipe("fp8_tensorwise_delayed:initialized")
    plain = get_recipe("fp8_tensorwise_delayed")
    assert initialized == dataclasses.replace(plain, scales_initialized=True)


def test_only_recipes_with_a_history_are_delayed():
    delayed = {name for name in recipe.RECIPES if get_recipe(name).is_delayed}
    assert delayed == {
        "fp8_tensorwise_delayed",
        "fp8_tensorwise_delayed_bf16_drhs",
    }


@pytest.mark.parametrize("dtype", [E5M2, "float8_e5m2", jnp.dtype(E5M2)])
def test_e5m2_by_e5m2_is_refused(dtype):
    with pytest.raises(ValueError, match="E5M2 x E5M2"):
        GemmRecipe(first=E5M2_CAST, second=Cast(dtype=dtype))


def test_other_formats_are_refused():
    with pytest.raises(ValueError, match="E4M3 or E5M2"):
        Cast(dtype=jnp.bfloat16)


def test_blockwise_with_another_granularity_is_refused():
    with pytest.raises(ValueError, match="both operands blockwise"):
        GemmRecipe(first=Cast(granularity="blockwise"), second=E4M3_CAST)


@pytest.mark.parametrize("granularity", ["rowwise", "blockwise"])
def test_delayed_scaling_is_only_tensorwise(granularity):
    with pytest.raises(ValueError, match="one scale per tensor"):
        Cast(granularity=granularity, scaling="delayed")


def test_two_whole_tensor_casts_of_one_operand_are_refused():
    with pytest.raises(ValueError, match="casts rhs tensorwise in two ways"):
        Recipe(
            name="mixed",
            fwd=GemmRecipe(first=E4M3_CAST, second=E4M3_CAST),
            dlhs=GemmRecipe(
                first=E5M2_CAST, second=Cast(dtype=E4M3, scaling="delayed")
            ),
        )


def test_an_empty_history_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        Recipe(name="short", amax_history_length=0)


def test_casts_are_those_of_the_roles_that_read_an_operand():
    r = Recipe(
        name="r",
        fwd=GemmRecipe(first=E4M3_CAST, second=E4M3_CAST),
        dlhs=GemmRecipe(first=E5M2_CAST, second=E4M3_CAST),
    )
    assert r.casts("lhs") == (E4M3_CAST,)
    assert r.casts("rhs") == (E4M3_CAST, E4M3_CAST)
    assert r.casts("g") == (E5M2_CAST,)


@pytest.mark.parametrize("name", recipe.RECIPES)
def test_recipes_are_hashable_for_jit(name):
    equal = copy.deepcopy(get_recipe(name))
    assert {get_recipe(name): name}[equal] == name
