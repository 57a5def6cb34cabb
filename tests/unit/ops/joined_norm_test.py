"""The norm of joined embeddings plus a residual, whole or in parts."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest

from loka_jax.ops.joined_norm import joined_norm
from tests.support import joined


@pytest.mark.parametrize("norm", ["block", "layer", "rms"])
def test_it_is_a_norm_of_the_sum(norm):
    joined.assert_is_a_norm((2, 3, 4), 24, norm, dtype=jnp.float32, limit=1e-5)


def test_a_residual_in_parts_has_the_same_gradient():
    operands = joined.operands((3, 5), 16, jnp.bfloat16, "layer")

    @jax.jit
    def both(*args):
        run = functools.partial(joined.results, *args, norm="layer")
        return [run(in_parts=is_cut) for is_cut in (True, False)]

    chex.assert_trees_all_equal(*both(*operands))


def test_what_does_not_fit_is_refused():
    parts, x, *_ = joined.operands((3, 5), 16, jnp.float32)
    with pytest.raises(ValueError, match="do not make up x"):
        joined_norm(parts[:1], x)
    with pytest.raises(ValueError, match="float32 is not bfloat16"):
        joined_norm(parts, x, implementation="triton")
