"""The gated norm of an HSTU layer by XLA."""

import functools

import jax
import jax.numpy as jnp
import pytest

from loka_jax.ops.gated_norm import gated_norm
from tests.support import gated


@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_it_follows_its_equations(rate):
    run = jax.jit(functools.partial(gated.results, rate=rate))
    gated.assert_is_gated_norm(24, rate, dtype=jnp.float32, limit=1e-5, run=run)


def test_what_does_not_fit_is_refused():
    u, x, *_ = gated.operands(8, jnp.float32)
    with pytest.raises(ValueError, match=r"float32 \(37, 7\), must begin with"):
        gated_norm(u[:, :7], x)
    with pytest.raises(ValueError, match="float32 is not bfloat16"):
        gated_norm(u, x, implementation="triton")
