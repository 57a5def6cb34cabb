"""Drifts planted in operands are caught in every recipe; healthy ones raise nothing."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import scaling
from loka_jax.dispatch.drift import LOOKS, SiteDrift, health
from loka_jax.probe.operands import operands_of
from loka_jax.probe.site import Capture
from loka_jax.recipe import get_recipe

M, K, N = 128, 32, 32
RECIPES = ("fp8_rowwise_bf16_drhs", "fp8_tensorwise_delayed")
# Healthy looks before the plant, and looks within which it is caught.
BEFORE, AFTER = 50, 50

# By name, the factor on the columns of lhs t steps after the plant began.
PLANTS = {
    "jump": lambda t: np.full(K, 1000.0),
    "growth of 1.05": lambda t: np.full(K, 1.05**t),
    "growth of 1.9": lambda t: np.full(K, 1.9 ** min(t, 100)),
    "column": lambda t: np.where(np.arange(K) == 3, 1.1**t, 1.0),
    "collapse": lambda t: np.full(K, 1e-6),
}


def healthy(key, step):
    """Returns operands as healthy training has them, about 1."""
    keys = jax.random.split(jax.random.fold_in(key, step.astype(int)), 5)
    lhs = jax.nn.relu(jax.random.normal(keys[0], (M, K)))
    rhs = jax.random.normal(jax.random.key(1), (K, N))
    rhs += 0.1 * jax.random.normal(keys[1], (K, N))
    rows = jnp.exp(1.5 * jax.random.normal(keys[2], (M, 1)))
    g = rows * jax.random.normal(keys[3], (M, N))
    walk = 1.5 * jnp.sin(step / 5000 + jnp.arange(3.0))
    walk += 0.3 * jax.random.normal(keys[4], (3,))
    walk = walk.at[2].add(-jnp.minimum(step / 4000, 4.0))
    return [x * jnp.exp2(walk[i]) for i, x in enumerate((lhs, rhs, g))]


def sampled(recipe, state, lhs, rhs, g):
    """Returns the sample of a step, whose scales are those of the state."""
    scales = (None, None, None)
    if state is not None:
        stored = dataclasses.replace(recipe, scales_initialized=True)
        seen = jnp.any(state.history > 0, axis=1)
        pairs = zip(seen, scaling.stored_scales(state, stored), strict=True)
        scales = tuple(x if x is None else jnp.where(y, x, 0.0) for y, x in pairs)
    capture = Capture(recipes=(recipe,), max_rows=M)
    operands = operands_of(lhs, rhs, g, scales)
    return capture.observe(capture.init(M, K, N), operands)


@functools.partial(jax.jit, static_argnames="name")
def looks(key, factors, name):
    """Returns the health of a site over steps, `[steps, 3, 4]`."""
    recipe = get_recipe(name)

    def step(state, at):
        lhs, rhs, g = healthy(key, at[0])
        arrays = (lhs * at[1][None], rhs, g)
        sample = sampled(recipe, state, *arrays)
        found = health(sample.operands, sample.errors.relative_l2[0], recipe)
        if state is not None:
            state = scaling.update_delayed(state, sample.operands.amaxes, recipe)
        return state, found

    state = scaling.init_delayed(recipe) if recipe.is_delayed else None
    steps = jnp.arange(len(factors), dtype=jnp.float32)
    return jax.lax.scan(step, state, (steps, factors))[1]


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("name", RECIPES)
def test_a_planted_drift_is_caught_and_named(name, plant):
    factors = np.ones((BEFORE + AFTER, K), np.float32)
    factors[BEFORE:] = [PLANTS[plant](t) for t in range(AFTER)]
    site = SiteDrift()
    for found in np.asarray(looks(jax.random.key(0), factors, name)):
        if not site.has_drifted:
            site = site.after(found, 1)
    assert site.has_drifted and BEFORE + LOOKS <= site.looks
    # Delayed scales clip a jump at first, in both products of lhs.
    assert re.search("lhs|the error of its (fwd|drhs) is ", site.why)
