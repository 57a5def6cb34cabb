"""How far operands have left their delayed scales, and for how long."""

import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import scaling
from loka_jax.dispatch.drift import LOOKS, MOST, Watch, amax_ratio
from loka_jax.recipe import get_recipe

RECIPE = get_recipe("fp8_tensorwise_delayed")


def _seen(*amaxes):
    """Returns the state of a site whose operands all had these amaxes in turn."""
    state = scaling.init_delayed(RECIPE)
    for amax in amaxes:
        state = scaling.update_delayed(state, jnp.full(3, amax, jnp.float32), RECIPE)
    return state


@pytest.mark.parametrize(
    "amaxes, ratio",
    [
        ((), 0.0),
        ((3.0,), 0.0),  # its scale was made for itself
        ((1.0, 2.0), 1.0),  # the margin is one bit
        ((1.0, 4.0, 1.0), 0.125),
        ((1.0, 32.0), 16.0),
    ],
)
def test_the_ratio_is_to_what_the_scale_reached(amaxes, ratio):
    found = amax_ratio(_seen(*amaxes), RECIPE)
    np.testing.assert_allclose(found, ratio)


def test_one_look_proves_nothing_and_two_in_a_row_do():
    watch, off = Watch(), {"a": 2 * MOST, "b": 0.9 * MOST}
    for _ in range(LOOKS - 1):
        watch = watch.after(off)
        assert watch.drifted == {}
    assert set(watch.after(off).drifted) == {"a"}
    watch = Watch()
    for ratio in (2 * MOST, 0.5, 2 * MOST, 0.5):
        watch = watch.after({"a": ratio})
        assert watch.drifted == {}
