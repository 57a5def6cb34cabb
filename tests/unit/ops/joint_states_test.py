"""States of several sites in one array: which lie together, and where scales lie.

Their next tables are those of the operations, which are tested with many sites.
"""

import jax.numpy as jnp
import numpy as np

from loka_jax import scaling
from loka_jax.ops.joint_states import joint_states
from loka_jax.recipe import get_recipe
from tests.support import tailed
from tests.support.tailed import BF16_DRHS, DELAYED


def test_sites_of_one_recipe_lie_together_below_a_kibibyte_with_their_scales():
    # More of one recipe than lie together.
    recipes = (*(DELAYED,) * 4, "bf16", BF16_DRHS, *(DELAYED,) * 3)
    plans, states = [tailed.plan(name, 32, 64, 32) for name in recipes], []
    for i, recipe in enumerate(map(get_recipe, recipes)):
        amaxes = 2.0 ** jnp.arange(3.0 * i, 3 * i + 3)
        state = scaling.init_delayed(recipe) if recipe.is_delayed else None
        states.append(state and scaling.update_delayed(state, amaxes, recipe))
    joint = list(joint_states(plans, states))
    assert [x.sites for x in joint] == [(0, 1), (2, 3), (6, 7), (8,), (5,)]
    assert all(x.tables.nbytes < 1024 for x in joint)
    for site, scales in (pair for x in joint for pair in x.scales()):
        found = [scale.value for scale in scales]
        np.testing.assert_array_equal(found, states[site].scale_inv)
