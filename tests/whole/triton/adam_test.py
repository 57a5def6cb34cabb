"""The update of dense parameters, interpreted and on a GPU, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from loka_jax import triton, xla
from loka_jax.fp8 import E4M3, E5M2
from loka_jax.ops.group_sites import cast
from loka_jax.optim.adam import adam
from loka_jax.tails import Forms, Scale, Scaled
from loka_jax.triton import tails
from loka_jax.triton.adam import Copy
from tests import support
from tests.support.triton import anywhere, interpreted, on_gpu, skip_without_triton

__all__ = ["anywhere", "interpreted", "on_gpu"]

skip_without_triton()

anywhere_ = pytest.mark.usefixtures("anywhere")
SHAPES = dict(odd=(100, 70), bias=(7,), long=(5000,), cube=(3, 4, 5), w=(16, 64))


def trees(scale=1.0):
    """Returns parameters and gradients of three steps."""

    def tree(seed):
        return {
            name: support.normal(*shape, seed=seed + i) * scale
            for i, (name, shape) in enumerate(SHAPES.items())
        }

    return tree(0), [tree(10 * step) for step in (1, 2, 3)]


def run(optimizer, params, gradients, **how):
    """Returns the last updates, the parameters and the state after some steps."""
    state, updates = optimizer.init(params), None
    for grads in gradients:
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(grads, state, params, **how)
        params = optax.apply_updates(params, updates)
    return updates, params, state


def exact(params, gradients, *, lr, max_norm):
    """Returns parameters and moments in float64."""
    w, *steps = (
        {name: np.asarray(x, np.float64) for name, x in tree.items()}
        for tree in (params, *gradients)
    )
    mu, nu = ({name: np.zeros_like(x) for name, x in w.items()} for _ in range(2))
    for t, grads in enumerate(steps, 1):
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        for name, g in grads.items():
            g = g * min(1, max_norm / norm)
            mu[name] = 0.9 * mu[name] + (1 - 0.9) * g
            nu[name] = 0.999 * nu[name] + (1 - 0.999) * g**2
            root = np.sqrt(nu[name] / (1 - 0.999**t)) + 1e-8
            w[name] = w[name] - lr * mu[name] / (1 - 0.9**t) / root
    return w, mu, nu


@anywhere_
@pytest.mark.parametrize("max_norm", [1.0, 1e6])
def test_three_updates_are_those_of_the_equations(max_norm):
    params, gradients = trees()
    optimizer = adam(0.1, max_norm=max_norm, implementation="triton")
    _, found, (_, (state, _)) = run(optimizer, params, gradients, accept=True)
    expected = exact(params, gradients, lr=0.1, max_norm=max_norm)
    assert int(state.count) == 3
    # 1 - 0.999^t loses 10 bits in float32: each step, of 0.1, is 2^-15 off at most.
    for ours, theirs in zip((found, state.mu, state.nu), expected, strict=True):
        for name, x in theirs.items():
            np.testing.assert_allclose(ours[name], x, rtol=2e-6, atol=5e-6)


@anywhere_
def test_schedules_and_states_are_those_of_optax():
    params, gradients = trees()
    schedule = optax.linear_schedule(0.1, 0.0, 4)
    plain = optax.chain(optax.clip_by_global_norm(2.0), optax.adam(schedule))
    ours = adam(schedule, max_norm=2.0, implementation="triton")
    _, found, state = run(ours, params, gradients, accept=True)
    _, expected, theirs = run(plain, params, gradients)
    assert jax.tree.structure(state) == jax.tree.structure(theirs)
    leaves = map(jax.tree.leaves, ((found, state), (expected, theirs)))
    for x, y in zip(*leaves, strict=True):
        np.testing.assert_allclose(x, y, rtol=3e-6, atol=1e-6)


@anywhere_
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("accept", [True, False])
def test_copies_are_casts_of_the_values_that_are_written(dtype, accept):
    params, gradients = trees()
    forms = Forms(bf16=True, fp8=dtype, transposed=True, amax=True, padded=True)
    # Some values saturate.
    scales = jnp.asarray([np.nan, 0.003 if dtype == E4M3 else 3e-5], jnp.float32)
    scale = Scale(scales, 1)
    copies = {name: None for name in SHAPES} | {"odd": Copy(forms, scale)}
    copies["w"] = Copy(Forms(bf16=False, fp8=E4M3), scale)
    optimizer = adam(0.1, implementation="triton")
    how = dict(accept=jnp.asarray(accept), copies=copies)
    updates, found, state = run(optimizer, params, gradients, **how)
    for name in ("odd", "w"):
        want = copies[name].forms
        casts = [cast(x, Scaled(found[name]), want, scale) for x in (tails, xla.tails)]
        for expected in casts:
            for x, y in zip(updates[name].copy[:3], expected[:3], strict=True):
                assert (x is None) == (y is None)
                assert x is None or np.array_equal(
                    np.asarray(x, np.float32), np.asarray(y, np.float32)
                )
    assert updates["w"].copy.fp8_t is None and updates["bias"].copy is None
    assert float(updates["odd"].copy.amaxes.max()) == np.abs(found["odd"]).max()
    if not accept:
        old = params, optimizer.init(params)
        jax.tree.map(np.testing.assert_array_equal, (found, state), old)
    else:
        assert not np.array_equal(found["odd"], params["odd"])


@anywhere_
def test_what_is_not_finite_stays_out_of_a_refused_update():
    params, (grads, *_) = trees()
    grads = jax.tree.map(lambda g: g.at[(0,) * g.ndim].set(jnp.nan), grads)
    optimizer = adam(0.1, max_norm=1.0, implementation="triton")
    for accept in (False, True):
        _, found, _ = run(optimizer, params, [grads], accept=jnp.asarray(accept))
        same = jax.tree.map(np.array_equal, found, params)
        assert all(same.values()) == (not accept)
        assert np.isnan(found["w"]).any() == accept


def test_the_kernels_are_required_by_name_only_where_they_serve():
    assert triton.why_not_installed() is None
    params = {"w": jnp.zeros((4, 4), jnp.bfloat16)}
    with pytest.raises(ValueError, match="an array is bfloat16, not float32"):
        run(adam(0.1, implementation="triton"), params, [params], accept=True)
