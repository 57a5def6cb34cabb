"""What lies beyond public APIs does on a GPU what it is said to do."""

import jax
import numpy as np
import pytest

from loka_jax import compat

pytestmark = pytest.mark.gpu


def test_random_bits_of_the_kernel_are_those_of_any_other_program():
    def bits():
        return jax.jit(lambda key: jax.random.bits(key, (1000, 33)))(jax.random.key(7))

    with compat.random_bits_by_kernel():
        by_kernel = np.asarray(bits())
    np.testing.assert_array_equal(by_kernel, np.asarray(bits()))
    assert len(np.unique(by_kernel)) > 32_000
