"""Every activation of the kernels and of the reference against XLA's."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.measure import reference
from loka_jax.normed import NO_VECTORS, ActivationName, Epilogue
from loka_jax.pallas.activations import activate_scaled, input_scale, slope_scaled
from loka_jax.xla import ACTIVATIONS

# Both sides of every kink, and far into the tails.
U = np.concatenate([np.linspace(-8, 8, 4001), [-100, -30, 30, 100]]).astype(np.float32)
# A few roundings in float32, whose cancellations grow with |u|.
TOLERANCE = 16 * np.finfo(np.float32).eps * (1 + np.abs(U))


@pytest.mark.parametrize("name", get_args(ActivationName))
def test_the_value_is_that_of_xla(name):
    values = activate_scaled(name, jnp.asarray(input_scale(name) * U))
    assert np.all(np.abs(values - ACTIVATIONS[name](jnp.asarray(U))) <= TOLERANCE)


@pytest.mark.parametrize("name", get_args(ActivationName))
def test_the_slope_is_the_derivative(name):
    smooth = U[np.min(np.abs(U[:, None] - [[-3, 0, 3]]), axis=1) > 1e-6]
    slopes = slope_scaled(name, jnp.asarray(input_scale(name) * smooth))
    derivative = jax.vmap(jax.grad(lambda u: ACTIVATIONS[name](u)))
    error = np.abs(slopes - derivative(jnp.asarray(smooth)))
    assert np.all(error <= 16 * np.finfo(np.float32).eps * (1 + np.abs(smooth)) ** 2)


@pytest.mark.parametrize("name", get_args(ActivationName))
def test_the_reference_has_it(name):
    values = reference.norm_activation(
        jnp.asarray(U)[None], NO_VECTORS, Epilogue("none", name)
    )
    assert np.all(np.abs(values[0] - ACTIVATIONS[name](jnp.asarray(U))) <= TOLERANCE)
