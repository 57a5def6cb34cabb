"""States that sites did not make are refused: by name, or inside of jit by NaN."""

import chex
import jax
import numpy as np
import pytest
from flax import serialization

from loka_jax import nn
from loka_jax.nn import OVERWRITE_WITH_GRADIENT
from loka_jax.recipe import OPERANDS, Cast, GemmRecipe, Recipe
from tests.support.nn import DELAYED, initialized, rounded, states, stored_table

X = rounded(32, 48)
MODEL = nn.Mlp((16,), recipe=DELAYED, use_bias=False)


@pytest.fixture(scope="module")
def variables():
    return initialized(MODEL, X, table=stored_table())


@pytest.fixture(scope="module")
def apply():
    """Returns the model, compiled."""
    return jax.jit(MODEL.apply)


def with_table(variables, table):
    """Returns the variables with another table for each site."""
    states = jax.tree.map(lambda _: table, variables[OVERWRITE_WITH_GRADIENT])
    return variables | {OVERWRITE_WITH_GRADIENT: states}


def changed(row, scale):
    """Returns a table in which the factor of one operand is another."""
    table = stored_table()
    table[row, 0] = scale
    return table


@pytest.mark.parametrize("row, scale", [(0, -0.5), (1, np.inf), (2, np.nan), (0, 3.0)])
def test_what_is_no_scale_is_refused(row, scale, variables, apply):
    wrong = with_table(variables, changed(row, scale))
    said = f"scale of {OPERANDS[row]} at site 'dense_0' is {scale:.6g}, .*overwriting"
    for use in (nn.check_scales, lambda variables: MODEL.apply(variables, X)):
        with pytest.raises(ValueError, match=said):
            use(wrong)
    # Inside of jit values are unknown, and what comes out is NaN.
    assert np.all(np.isnan(apply(wrong, X).astype(np.float32)))


def test_what_sites_have_made_is_taken(variables, apply):
    nn.check_scales(variables)
    assert np.all(np.isfinite(apply(variables, X).astype(np.float32)))
    table = stored_table()
    table[1, 0] = 2.0**-126  # the least factor there is
    nn.check_scales(with_table(variables, table))


def test_a_scale_of_zero_is_that_of_a_site_before_its_first_step(variables, apply):
    tables = np.stack([stored_table()] * 2)
    tables[:, 1] = 0  # JAX's gradient of a site without one
    tables[1, 1, 0] = 2.0**-126
    zero, fresh = (with_table(variables, table) for table in tables)
    nn.check_scales(zero)
    chex.assert_trees_all_equal(apply(zero, X), apply(fresh, X))


def test_scales_that_are_no_powers_of_two_pass_where_the_recipe_has_them():
    cast = Cast(scaling="delayed", pow2_scale=False)
    own = Recipe(name="own", fwd=GemmRecipe(first=cast, second=cast))  # g has none
    model = nn.Dense(16, recipe=own)
    table = stored_table()
    table[:, 0] = 3, 0.7, -1
    variables = initialized(model, X, table=table)
    y = jax.jit(model.apply)(variables, X)
    assert np.all(np.isfinite(y.astype(np.float32)))
    table[2, 0] = 5
    variables = initialized(model, X, table=table)
    nn.check_scales(variables, pow2_scale=False)
    with pytest.raises(ValueError, match="of lhs at site '' is 3, .* powers of two"):
        nn.check_scales(variables)
    table[1, 0] = -0.7
    wrong = initialized(model, X, table=table)
    with pytest.raises(ValueError, match="of rhs at site '' is -0.7"):
        nn.check_scales(wrong, pow2_scale=False)


def test_bad_scales_of_several_models_are_named(variables):
    models = {"user": variables, "item": with_table(variables, changed(2, 3))}
    with pytest.raises(ValueError, match="scale of g at site 'item/dense_0' is 3"):
        nn.check_scales(models)


def test_parameters_alone_are_refused(variables):
    with pytest.raises(ValueError, match="'dense_0' has no delayed scales.*all that"):
        MODEL.apply({"params": variables["params"]}, X)


def test_a_state_restored_without_a_template_is_refused(variables):
    data = serialization.to_bytes(variables)
    plain = serialization.msgpack_restore(data)
    for use in (nn.check_scales, lambda v: jax.eval_shape(MODEL.apply, v, X)):
        with pytest.raises(ValueError, match="of site 'dense_0' .* template: restore"):
            use(plain)
    restored = serialization.from_bytes(variables, data)
    nn.check_scales(restored)
    chex.assert_trees_all_equal(states(restored), states(variables))
