"""The gated norm of an HSTU layer by Triton, interpreted and on a GPU."""

import functools

import jax.numpy as jnp
import pytest

from tests.support import gated
from tests.support.triton import anywhere, interpreted, on_gpu

__all__ = ["anywhere", "interpreted", "on_gpu"]


# Several rows in a tile, columns that are no power of two, and a row as long as a tile.
@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("n, rate", [(16, 0.0), (200, 0.2), (1030, 0.5)])
def test_triton_follows_the_equations(n, rate):
    run = functools.partial(gated.results, rate=rate, provider="triton")
    options = dict(dtype=jnp.bfloat16, limit=2.0**-8, run=run)
    gated.assert_is_gated_norm(n, rate, **options)
