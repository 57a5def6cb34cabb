"""Clipping by the global norm: the norm, the scale, and what is not finite."""

import itertools

import chex
import jax
import numpy as np
import optax
import pytest

from loka_jax.optim.clip import clip_by_global_norm, global_norm

SHAPES = {"bias": (30,), "small": (64, 3), "large": (300, 1000), "scalar": ()}
norm_of = jax.jit(global_norm)


def gradients(scale=1.0):
    """Returns arrays of all kinds; `large` has a norm for each row."""
    rng = np.random.default_rng(0)
    draw = {name: rng.normal(0, scale, shape) for name, shape in SHAPES.items()}
    return {name: np.asarray(x, np.float32) for name, x in draw.items()}


def exact_norm(tree):
    """Returns the norm of all elements in float64."""
    leaves = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]
    return np.linalg.norm(np.concatenate(leaves))


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_the_norm_is_that_of_all_elements_and_shows_what_is_not_finite(scale):
    grads = gradients(scale)
    # A sum of squares in pairs errs by log2(n) / 2 roundings of float32 at most.
    np.testing.assert_allclose(norm_of(grads), exact_norm(grads), rtol=1e-5)
    for name, bad in itertools.product(SHAPES, (np.nan, np.inf)):
        changed = grads[name].copy()
        changed[(-1,) * changed.ndim] = bad
        assert not np.isfinite(norm_of(grads | {name: changed}))


@jax.jit
def clipped(grads, max_norm):
    """Returns gradients clipped by us and by optax."""
    kinds = clip_by_global_norm(max_norm), optax.clip_by_global_norm(max_norm)
    return [kind.update(grads, kind.init(grads))[0] for kind in kinds]


@pytest.mark.parametrize("size", [1e-3, 0.999, 1.001, 30.0])
@pytest.mark.parametrize("max_norm", [0.25, 10.0])
def test_only_gradients_above_the_norm_are_scaled_and_down_to_it(size, max_norm):
    factor = np.float32(size * max_norm / exact_norm(gradients()))
    grads = jax.tree.map(lambda x: x * factor, gradients())
    ours, theirs = clipped(grads, max_norm)
    expected = min(size, 1.0) * max_norm
    np.testing.assert_allclose(exact_norm(ours), expected, rtol=1e-5)
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5)
    if size < 1:
        chex.assert_trees_all_equal(ours, grads)
