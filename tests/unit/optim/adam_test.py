"""Adam and updates that a step may refuse, by XLA: what optax gives, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from loka_jax import nn, optim, xla
from loka_jax.fp8 import E4M3
from loka_jax.ops.group_sites import cast
from loka_jax.optim.clip import clip_by_global_norm
from loka_jax.tails import Forms, Scale, Scaled
from loka_jax.triton.adam import Copy
from tests import support

SHAPES = {"w": (32, 20), "b": (7,)}
RATES = {"constant": 0.1, "schedule": optax.linear_schedule(0.1, 0.0, 5)}


def tree(seed):
    """Returns an array of each shape."""
    return {k: support.normal(*shape, seed=seed) for k, shape in SHAPES.items()}


def run(optimizer, steps=3, **how):
    """Returns the parameters and the state after some steps."""

    @jax.jit
    def step(params, state, grads):
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(grads, state, params, **how)
        return optax.apply_updates(params, updates), state

    params = tree(0)
    state = optimizer.init(params)
    for i in range(steps):
        params, state = step(params, state, tree(i + 1))
    return params, state


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("rate", RATES.values(), ids=RATES)
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_updates_and_states_are_those_of_optax(rate, max_norm):
    plain = optax.adam(rate)
    if max_norm is not None:
        plain = optax.chain(clip_by_global_norm(max_norm), plain)
    assert_same(run(optim.adam(rate, max_norm=max_norm)), run(plain))
    accepted = run(optim.adam(rate, max_norm=max_norm), accept=jnp.asarray(True))
    assert_same(accepted, run(plain))


@pytest.mark.parametrize(
    "optimizer", [optim.adam(0.1), optim.skipping(optax.sgd(0.1, momentum=0.9))]
)
def test_a_refused_update_changes_nothing(optimizer):
    params = tree(0)
    found = run(optimizer, accept=jnp.asarray(False))
    assert_same(found, (params, optimizer.init(params)))


def test_a_factor_on_the_rate_scales_updates():
    ours = optim.skipping(optax.sgd(0.1))
    assert optim.skipping(ours) is ours
    for how in ({}, dict(accept=jnp.asarray(True))):
        found = run(ours, lr_scale=jnp.float32(0.25), **how)
        expected = run(optax.sgd(0.1 * 0.25))
        for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)


def test_copies_are_casts_of_the_values_beside_them():
    params, optimizer = tree(0), optim.adam(0.1)
    forms = Forms(bf16=False, fp8=E4M3, transposed=True, amax=True, padded=True)
    copy = Copy(forms, Scale.of(jnp.float32(0.01)))
    how = dict(copies={"w": copy, "b": None})
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimizer.update(tree(1), optimizer.init(params), params, **how)
    values = optax.apply_updates(params, updates)
    expected = cast(xla.tails, Scaled(values["w"]), forms, copy.scale_inv)
    assert updates["b"].copy is None and updates["w"].copy.fp8_t.shape == (32, 32)
    assert_same(updates["w"].copy, expected)
    assert not np.array_equal(values["w"], params["w"])


def test_updates_that_replace_pass_the_overwriting_of_fp8_state():
    optimizer = nn.overwriting(optim.adam(0.1))
    variables, grads = {"params": tree(0)}, {"params": tree(1)}
    state = optimizer.init(variables)
    found = []
    for how in ({}, dict(accept=jnp.asarray(True)), dict(accept=jnp.asarray(False))):
        with jax.numpy_dtype_promotion("standard"):
            updates, _ = optimizer.update(grads, state, variables, **how)
        found.append(optax.apply_updates(variables, updates))
    assert_same(found[1], found[0])
    assert_same(found[2], variables)
