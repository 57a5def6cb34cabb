"""A site as one operation: values, gradients, state, FP8 between sites, refusals.

XLA's references stand in for the kernels, whose own tests compare them with these.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.ops.products import Activations
from loka_jax.recipe import RECIPES, get_recipe
from tests import support
from tests.support import sites, stand_ins
from tests.support.sites import Case, dense_norm, operands

PADDED = 40, 32, 80  # to the 64 rows that kernels take
CASES = [
    Case("f32", "layer", "swish"),
    Case("fp8_tensorwise_delayed", "none", "relu"),
    Case("fp8_rowwise_bf16_drhs", "layer", "swish", {}, PADDED),
    Case("fp8_tensorwise_delayed:initialized", "none", "relu", {}, (64, 32, 2048)),
    Case("fp8_tensorwise", "rms", "gelu", {"dense_norm": "too wide"}, (64, 32, 80)),
    Case("bf16", "block", "hard_swish", {"norm_backward": "odd"}, (64, 32, 272)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_state_are_those_of_the_equations(case):
    # A kernel of the backward pass that refuses is an error, unless what serves runs.
    provider = "served" if case.refusals else None
    sites.assert_follows_the_equations(case, provider=provider)


def test_a_chain_multiplies_and_differentiates_what_is_handed_on():
    sites.assert_chain_follows_the_equations(refusals={})


def test_activations_are_handed_over_in_fp8_alone_and_beside_them():
    lhs, rhs, _ = operands(70, 32, 48)  # padded to 80 rows
    second = support.normal(48, 16, seed=5) / 7
    static = dict(recipe=get_recipe("fp8_rowwise"), device=stand_ins.HOPPER)

    @support.jitted
    def handed_over(lhs):
        site_of = functools.partial(dense_norm, lhs, rhs, activation="gelu", **static)
        y, fp8, both = (site_of(out=out) for out in ("compute", "fp8", "both"))
        # Its wide form is another array altogether: it must not be read.
        unread = Activations(jnp.full((70, 48), jnp.nan, lhs.dtype), fp8.fp8)
        after = [dense_norm(x, second, **static) for x in (fp8, unread)]
        return (y, fp8.fp8, after[0]), (both.y, both.fp8, after[1])

    found = handed_over(lhs)
    chex.assert_trees_all_equal(*found)
    chex.assert_shape(found[0][1].scale_inv, (70, 1))
    assert np.isfinite(found[0][2]).all()


@pytest.mark.parametrize("device", [stand_ins.CPU, stand_ins.HOPPER])
def test_an_observer_gets_the_product_and_its_operands_from_xla(device):
    lhs, rhs, _ = operands(64, 32, 48, jnp.float32)
    plan = sites.plan_of(lhs, rhs, None, get_recipe("bf16"), device, norm="none")
    seen = []

    def observe(*given):
        seen.append(given)
        return 2 * given[0]

    @jax.jit
    def run(lhs, rhs):
        arrays = sites.SiteArrays(lhs, rhs)
        return sites.run_site(plan, arrays, observe=observe), seen.pop()

    y, (z, *given) = run(lhs, rhs)
    chex.assert_trees_all_equal((y, given), (2 * z, [lhs.astype(jnp.bfloat16), rhs]))


def test_epsilon_is_added_to_the_mean_square():
    lhs, rhs = jnp.full((16, 16), 1e-3), jnp.eye(16)
    recipe = get_recipe("f32")
    plan = sites.plan_of(lhs, rhs, None, recipe, stand_ins.CPU, norm="rms")
    arrays = sites.SiteArrays(lhs, rhs)
    y = jax.jit(lambda x: sites.run_site(plan, x, epsilon=3e-6))(arrays)
    np.testing.assert_allclose(y, 0.5, rtol=1e-5)  # 1e-3 / sqrt(1e-6 + 3e-6)


def test_a_chosen_kernel_that_refuses_is_an_error_once_it_is_needed():
    lhs, rhs, _ = operands(64, 32, 48)

    def run(run=lambda f, *args: f(*args), **refusals):
        site = dict(norm="layer", recipe=RECIPES["bf16"])
        f = functools.partial(dense_norm, device=stand_ins.hopper(**refusals), **site)
        return jax.eval_shape(functools.partial(run, f), lhs, rhs)

    with pytest.raises(ValueError, match=r"lhs \(64, 32\), .* too wide"):
        run(dense_norm="too wide", norm_quantize="odd")
    run(norm_backward="too wide")
    with pytest.raises(ValueError, match="the backward pass: too wide"):
        run(jax.vjp, norm_backward="too wide")


@pytest.mark.parametrize("device", [stand_ins.CPU, stand_ins.HOPPER])
def test_a_delayed_recipe_needs_a_state_and_others_take_none(device):
    lhs, rhs, _ = operands(64, 32, 48)
    delayed = RECIPES["fp8_tensorwise_delayed"]
    site = functools.partial(dense_norm, lhs, rhs, device=device)
    with pytest.raises(ValueError, match="needs a delayed-scaling state"):
        site(recipe=delayed)
    with pytest.raises(ValueError, match="takes no delayed-scaling state"):
        site(recipe=RECIPES["bf16"], state=sites.initial(delayed))
