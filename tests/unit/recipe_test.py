import jax.numpy as jnp
import pytest

from loka_jax import recipe
from loka_jax.fp8 import E4M3, E5M2
from loka_jax.recipe import Cast, GemmRecipe, Recipe, get_recipe

E4M3_CAST = Cast(dtype=E4M3)
E5M2_CAST = Cast(dtype=E5M2)


def gemm(first, second):
    """Returns the casts of a product."""
    return GemmRecipe(first=first, second=second)


def test_recipes_are_found_by_their_own_names():
    assert [get_recipe(name).name for name in recipe.RECIPES] == [*recipe.RECIPES]
    with pytest.raises(ValueError, match="did you mean 'fp8_rowwise'"):
        get_recipe("fp8_rowise")


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: gemm(E5M2_CAST, Cast(dtype=jnp.dtype(E5M2))), "E5M2 x E5M2"),
        (lambda: Cast(dtype=jnp.bfloat16), "E4M3 or E5M2"),
        (lambda: gemm(Cast(granularity="blockwise"), E4M3_CAST), "operands blockwise"),
        (lambda: gemm(E4M3_CAST, Cast(granularity="mx")), "both operands mx"),
        (lambda: Cast(granularity="mx", pow2_scale=False), "mx scaling needs pow2"),
        (lambda: Cast(granularity="rowwise", scaling="delayed"), "one scale per tens"),
        (
            lambda: Recipe(
                name="mixed",
                fwd=gemm(E4M3_CAST, E4M3_CAST),
                dlhs=gemm(E5M2_CAST, Cast(dtype=E4M3, scaling="delayed")),
            ),
            "casts rhs tensorwise in two ways",
        ),
        (lambda: Recipe(name="short", amax_history_length=0), "at least 1"),
    ],
)
def test_what_no_product_serves_is_refused(make, reason):
    with pytest.raises(ValueError, match=reason):
        make()


def test_casts_are_those_of_the_roles_that_read_an_operand():
    narrow, wide = gemm(E4M3_CAST, E4M3_CAST), gemm(E5M2_CAST, E4M3_CAST)
    r = Recipe(name="r", fwd=narrow, dlhs=wide)
    casts = [r.casts(operand) for operand in recipe.OPERANDS]
    assert casts == [(E4M3_CAST,), (E4M3_CAST, E4M3_CAST), (E5M2_CAST,)]


def test_shipped_recipes_cast_each_operand_as_their_names_say():
    def casts(name):
        gemms = [get_recipe(name).gemm(role) for role in recipe.ROLES]
        pairs = [gemm and (gemm.first, gemm.second) for gemm in gemms]
        assert all(c.dtype == E4M3 and c.pow2_scale for p in pairs if p for c in p)
        return [p and [(c.granularity, c.scaling) for c in p] for p in pairs]

    row, whole = ("rowwise", "current"), ("tensorwise", "current")
    delayed = ("tensorwise", "delayed")
    assert {name: casts(name) for name in recipe.RECIPES} == {
        "f32": [None] * 3,
        "bf16": [None] * 3,
        "fp8_tensorwise": [[whole] * 2] * 3,
        "fp8_tensorwise_delayed": [[delayed] * 2] * 3,
        "fp8_tensorwise_delayed_bf16_drhs": [[delayed] * 2, [delayed] * 2, None],
        "fp8_rowwise": [[row] * 2] * 3,
        "fp8_rowwise_bf16_drhs": [[row] * 2, [row, whole], None],
        "fp8_blockwise": [[("blockwise", "current")] * 2] * 3,
        "mxfp8": [[("mx", "current")] * 2] * 3,
    }


def test_only_forward_products_accumulate_fast():
    for name in recipe.RECIPES:
        found = get_recipe(name)
        gemms = {role: found.gemm(role) for role in recipe.ROLES}
        fast = {role for role, gemm in gemms.items() if gemm and gemm.fast_accumulation}
        has_fast = found.fwd is not None and name not in ("fp8_blockwise", "mxfp8")
        assert fast == ({"fwd"} if has_fast else set())
        assert (found.amax_history_length, found.margin) == (16, 1)
