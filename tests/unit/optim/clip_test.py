import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from loka_jax.optim.clip import clip_by_global_norm, global_norm
from tests.support import hopper

SHAPES = {"bias": (30,), "small": (64, 3), "large": (300, 1000), "scalar": ()}


def gradients(scale=1.0):
    rng = np.random.default_rng(0)
    draw = {name: rng.normal(0, scale, shape) for name, shape in SHAPES.items()}
    return {name: jnp.asarray(x, jnp.float32) for name, x in draw.items()}


def norm_of(tree):
    leaves = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]
    return np.linalg.norm(np.concatenate(leaves))


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_the_norm_is_that_of_all_elements(scale):
    grads = gradients(scale)
    # A sum of squares in pairs errs by log2(n) / 2 roundings of float32 at most.
    np.testing.assert_allclose(global_norm(grads), norm_of(grads), rtol=1e-5)


def test_no_arrays_have_the_norm_zero():
    assert global_norm({}) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", SHAPES)
def test_a_number_that_is_not_finite_shows(name, bad):
    grads = gradients()
    grads[name] = grads[name].at[(-1,) * grads[name].ndim].set(bad)
    assert not np.isfinite(global_norm(grads))


@pytest.mark.parametrize("max_norm", [1.0, 1e4])
def test_it_clips_as_optax_does(max_norm):
    grads = gradients()
    ours, theirs = clip_by_global_norm(max_norm), optax.clip_by_global_norm(max_norm)
    clipped, _ = ours.update(grads, ours.init(grads))
    expected, _ = theirs.update(grads, theirs.init(grads))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), clipped, expected
    )
    assert norm_of(clipped) <= max_norm * 1.00001
    if max_norm > norm_of(grads):
        jax.tree.map(np.testing.assert_array_equal, clipped, grads)


def test_many_small_arrays_cost_no_more_kernels_than_one():
    arrays = {"matrix": jax.ShapeDtypeStruct((1024, 1024), "float32")}
    kernels = []
    for size in (3, 5, 7, 1024):
        arrays[str(size)] = jax.ShapeDtypeStruct((size,), "float32")
        kernels.append(len(hopper.kernels(hopper.compiled(global_norm, arrays))))
    assert set(kernels) == {kernels[0]}
