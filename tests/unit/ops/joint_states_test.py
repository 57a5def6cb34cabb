"""States of several sites in one array: which lie together, and where scales lie."""

import functools

import jax
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


def _state(i, name):
    """Returns a state with scales of its own; None for bfloat16."""
    if name == "bf16":
        return None
    amaxes, recipe = 2.0 ** jnp.arange(3.0 * i, 3 * i + 3), get_recipe(name)
    return scaling.update_delayed(scaling.init_delayed(recipe), amaxes, recipe)


SPEC = SiteSpec(32, 64, 32)
PLANS = [resolve(SPEC, Choice("xla", get_recipe(x)), local_device()) for x in RECIPES]
STATES = [_state(i, name) for i, name in enumerate(RECIPES)]


def test_sites_of_one_recipe_lie_together_below_a_kibibyte():
    joint = list(joint_states(PLANS, STATES))
    assert [x.sites for x in joint] == [(0, 1, 2, 3, 6), (7, 8), (5,)]
    assert all(x.tables.nbytes < 1024 for x in joint)


def test_scales_are_those_of_each_state():
    joint = joint_states(PLANS, STATES)
    found = {i: [s.value for s in scales] for x in joint for i, scales in x.scales()}
    assert sorted(found) == [i for i, state in enumerate(STATES) if state is not None]
    for i, scales in found.items():
        np.testing.assert_array_equal(scales, STATES[i].scale_inv)


def test_next_tables_are_those_of_each_site_by_itself():
    measured = [(jnp.float32([i, 50]), None, jnp.float32([3 * i])) for i in range(9)]

    @jax.jit
    def found_and_expected():
        pairs = []
        for joint in joint_states(PLANS, STATES):
            parts = [x for i in joint.sites for x in measured[i]]
            products = Products.of(PLANS[joint.sites[0]])
            amaxes = [jnp.float32([max(i, 50), np.nan, 3 * i]) for i in joint.sites]
            recipe = PLANS[joint.sites[0]].choice.recipe
            update = jax.vmap(functools.partial(scaling.update_delayed, recipe=recipe))
            after = update(scaling.DelayedScaling(joint.tables), jnp.stack(amaxes))
            pairs.append((products.tables_after(joint.tables, parts), after.table))
        return pairs

    for ours, expected in found_and_expected():
        np.testing.assert_array_equal(ours[:, ::2], expected[:, ::2])
        assert np.isneginf(ours[:, 1]).all()
