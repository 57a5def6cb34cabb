"""What launches add to the operands of kernels."""

import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.normed import NormVectors
from loka_jax.ops.kernels import with_affine


@pytest.mark.parametrize("has_gamma, has_beta", [(True, False), (False, True)])
def test_a_missing_factor_is_one_and_a_missing_summand_zero(has_gamma, has_beta):
    gamma = jnp.full(3, 5.0) if has_gamma else None
    beta = jnp.full(3, 7.0) if has_beta else None
    found = with_affine(NormVectors(None, gamma, beta))
    assert found.bias is None
    np.testing.assert_array_equal(found.gamma, 5 if has_gamma else 1)
    np.testing.assert_array_equal(found.beta, 7 if has_beta else 0)
