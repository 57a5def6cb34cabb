"""The FP8 state among variables: plain arrays, refused where no step made them."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization, traverse_util
from jax import export

from loka_jax import nn
from loka_jax.nn import OVERWRITE_WITH_GRADIENT
from loka_jax.recipe import OPERANDS, Cast
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


def changed(row, entry):
    """Returns a table in which an entry of one operand is another."""
    table = stored_table()
    table[row, 1] = entry
    return table


@pytest.mark.parametrize("row, entry", [(0, -0.5), (1, np.inf), (2, np.nan)])
def test_what_no_step_makes_is_refused(row, entry, variables, apply):
    wrong = with_table(variables, changed(row, entry))
    said = f"scale of {OPERANDS[row]} at site 'dense_0' .* {entry:.6g}, .*overwriting"
    for use in (nn.check_scales, lambda variables: MODEL.apply(variables, X)):
        with pytest.raises(ValueError, match=said):
            use(wrong)
    # Inside of jit values are unknown, and what comes out is NaN.
    if row < 2:  # g has no part in it
        assert np.all(np.isnan(apply(wrong, X).astype(np.float32)))


def test_multiples_and_roundings_of_states_are_taken_as_they_were(variables, apply):
    expected = apply(variables, X)
    for treated in (1 / 48, 2.0**-16, 2.0**10):
        table = np.float32(treated) * stored_table()
        nn.check_scales(with_table(variables, table))
        chex.assert_trees_all_equal(apply(with_table(variables, table), X), expected)
    in_bf16 = with_table(variables, jnp.bfloat16(stored_table()))
    chex.assert_trees_all_equal(apply(in_bf16, X), expected)


def test_zeros_are_the_state_before_the_first_step(variables, apply):
    fresh = jax.eval_shape(MODEL.init, jax.random.key(0), X)[OVERWRITE_WITH_GRADIENT]
    (table,) = jax.tree.leaves(fresh)
    zero = with_table(variables, np.zeros(table.shape, table.dtype))
    nn.check_scales(zero)
    assert np.all(np.isfinite(apply(zero, X).astype(np.float32)))


def test_bad_scales_of_several_models_are_named(variables):
    models = {"user": variables, "item": with_table(variables, changed(2, -3))}
    with pytest.raises(ValueError, match="scale of g at site 'item/dense_0' .* -3"):
        nn.check_scales(models)


def test_parameters_alone_are_refused(variables):
    with pytest.raises(ValueError, match="'dense_0' has no delayed scales.*all that"):
        MODEL.apply({"params": variables["params"]}, X)


def test_variables_go_wherever_those_of_flax_go(variables, apply):
    data = serialization.to_bytes(variables)
    plain = serialization.msgpack_restore(data)  # without a template
    chex.assert_trees_all_equal(states(plain), states(variables))
    chex.assert_trees_all_equal(apply(plain, X), apply(variables, X))
    flat = traverse_util.flatten_dict(variables, sep="/")
    assert all(isinstance(leaf, np.ndarray) for leaf in flat.values())
    shapes = jax.eval_shape(lambda x: x, variables)
    rows = jax.ShapeDtypeStruct((export.symbolic_shape("b")[0], 48), np.float32)
    exported = export.export(jax.jit(MODEL.apply))(shapes, rows).serialize()
    found = export.deserialize(bytearray(exported)).call(variables, X)
    chex.assert_trees_all_equal(found, apply(variables, X))


def test_nans_are_debugged_outside_of_jit(variables):
    def loss(variables):
        return jnp.sum(MODEL.apply(variables, X).astype(jnp.float32))

    with jax.debug_nans(True):
        grads = jax.grad(loss)(variables)
    chex.assert_tree_all_finite(grads)


def test_a_delayed_scale_is_a_power_of_two():
    with pytest.raises(ValueError, match="needs pow2_scale=True"):
        Cast(scaling="delayed", pow2_scale=False)
