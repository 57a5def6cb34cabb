"""States of several sites in one array: which lie together, and where scales lie."""

import jax.numpy as jnp
import numpy as np

from loka_jax import scaling
from loka_jax.ops.device import local_device
from loka_jax.ops.joint_states import joint_states
from loka_jax.ops.plan import resolve
from loka_jax.ops.products import Products
from loka_jax.recipe import get_recipe
from loka_jax.site import Choice, SiteSpec

DELAYED = "fp8_tensorwise_delayed:initialized"
BF16_DRHS = "fp8_tensorwise_delayed_bf16_drhs:initialized"
# More of one recipe than lie together.
RECIPES = (*(DELAYED,) * 4, "bf16", BF16_DRHS, *(DELAYED,) * 3)


def _plan(name):
    return resolve(
        SiteSpec(32, 64, 32), Choice("xla", get_recipe(name)), local_device()
    )


def _state(i, name):
    """Returns a state with scales of its own; None for bfloat16."""
    if name == "bf16":
        return None
    amaxes, recipe = 2.0 ** jnp.arange(3.0 * i, 3 * i + 3), get_recipe(name)
    return scaling.update_delayed(scaling.init_delayed(recipe), amaxes, recipe)


PLANS = [_plan(name) for name in RECIPES]
STATES = [_state(i, name) for i, name in enumerate(RECIPES)]


def test_sites_of_one_recipe_lie_together_below_a_kibibyte():
    joint = list(joint_states(PLANS, STATES))
    assert [x.sites for x in joint] == [(0, 1, 2, 3, 6), (7, 8), (5,)]
    assert all(x.tables.nbytes < 1024 for x in joint)


def test_scales_are_those_of_each_state():
    found = {i: s for x in joint_states(PLANS, STATES) for i, s in x.scales()}
    assert sorted(found) == [i for i, state in enumerate(STATES) if state is not None]
    for i, scales in found.items():
        ours = [scale.value for scale in scales]
        np.testing.assert_array_equal(ours, STATES[i].scale_inv)


def test_next_tables_are_those_of_each_site_by_itself():
    measured = [(jnp.float32([i, 50]), None, jnp.float32([3 * i])) for i in range(9)]
    for joint in joint_states(PLANS, STATES):
        parts = [x for i in joint.sites for x in measured[i]]
        products = Products.of(PLANS[joint.sites[0]])
        ours = products.tables_after(joint.tables, parts)
        for i, table in zip(joint.sites, ours, strict=True):
            alone = Products.of(PLANS[i])
            expected = alone.tables_after(STATES[i].table, measured[i])
            np.testing.assert_array_equal(table, expected)
            amaxes = jnp.float32([max(i, 50), np.nan, 3 * i])
            recipe = get_recipe(RECIPES[i])
            after = scaling.update_delayed(STATES[i], amaxes, recipe).table
            np.testing.assert_array_equal(table[::2], after[::2])
            assert np.isneginf(table[1]).all()
