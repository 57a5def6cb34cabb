"""Every activation of the kernels, and of the reference, against XLA's."""

from typing import get_args

import jax
import numpy as np
import pytest

from loka_jax.measure import reference
from loka_jax.normed import NO_VECTORS, ActivationName, Epilogue
from loka_jax.pallas.activations import (
    activate_scaled,
    input_scale,
    slope_scaled,
    why_not,
)
from loka_jax.xla import ACTIVATIONS

NAMES = [name for name in get_args(ActivationName) if why_not(name) is None]
# Both sides of every kink, and far into the tails.
U = np.concatenate([np.linspace(-8, 8, 4001), [-100, -30, 30, 100]]).astype(np.float32)
# A few roundings in float32, whose cancellations grow with |u|.
TOLERANCE = 16 * np.finfo(np.float32).eps * (1 + np.abs(U))


@pytest.mark.parametrize("name", NAMES)
def test_values_and_slopes_are_those_of_xla(name):
    @jax.jit
    def compute(u):
        slope = jax.vmap(jax.grad(lambda x: ACTIVATIONS[name](x)))
        scaled, epilogue = input_scale(name) * u, Epilogue("none", name)
        theirs = reference.norm_activation(u[None], NO_VECTORS, epilogue)[0]
        ours = activate_scaled(name, scaled), slope_scaled(name, scaled)
        return theirs, ACTIVATIONS[name](u), slope(u), *ours

    of_reference, values, derivatives, ours, slopes = map(np.asarray, compute(U))
    assert np.all(np.abs(ours - values) <= TOLERANCE)
    assert np.all(np.abs(of_reference - values) <= TOLERANCE)
    smooth = np.min(np.abs(U[:, None] - [[-3, 0, 3]]), axis=1) > 1e-6
    error = np.abs(slopes - derivatives)[smooth]
    assert np.all(error <= (TOLERANCE * (1 + np.abs(U)))[smooth])
