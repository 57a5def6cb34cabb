"""`dot_features` against numpy in float64."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.ops.interaction import dot_features, join_features, padded
from tests import support


def operands(batch, fields, dim, has_bottom, dtype=jnp.float32):
    """Returns the bottom vector, if there is one, and the embeddings."""
    bottom = support.normal(batch, dim, dtype=dtype) if has_bottom else None
    return bottom, support.normal(batch, fields, dim, seed=1, dtype=dtype)


def indices(n, pairs):
    """Returns i and j of each pair, row by row."""
    kept = [(i, j) for i in range(n) for j in range(n) if eval(pairs)]
    return tuple(np.array(kept, int).reshape(-1, 2).T)


def plain(bottom, embeddings, multiple, pairs):
    """Returns the vectors of each example, and the features, in float64."""
    z = embeddings if bottom is None else np.hstack([bottom[:, None], embeddings])
    z = np.asarray(z, np.float64)
    rows, cols = indices(z.shape[1], pairs)
    products = (z @ z.swapaxes(1, 2))[:, rows, cols]
    features = products if bottom is None else np.hstack([z[:, 0], products])
    return z, np.pad(features, ((0, 0), (0, -features.shape[1] % multiple)))


def plain_gradients(bottom, embeddings, g, pairs):
    """Returns the gradients in float64."""
    z, _ = plain(bottom, embeddings, 1, pairs)
    rows, cols = indices(z.shape[1], pairs)
    lead = 0 if bottom is None else z.shape[2]
    of_pairs = np.zeros((len(z), z.shape[1], z.shape[1]))
    g = np.asarray(g, np.float64)
    of_pairs[:, rows, cols] = g[:, lead : lead + len(rows)]
    dz = (of_pairs + of_pairs.swapaxes(1, 2)) @ z
    return (None, dz) if bottom is None else (dz[:, 0] + g[:, :lead], dz[:, 1:])


def assert_close(x, exact, magnitude, terms):
    """Asserts equality up to sums of `terms` products, then at most two casts."""
    cast = 2.0**-8 if x.dtype == jnp.bfloat16 else 2.0**-24
    bound = support.sum_error(terms, magnitude) + 2 * cast * magnitude
    assert np.all(np.abs(np.asarray(x, np.float64) - exact) <= bound)


@pytest.mark.parametrize(
    "sizes, has_bottom, dtype, multiple, pairs",
    [
        ((4, 1, 8), False, jnp.float32, 1, "i > j"),  # no pairs
        ((4, 1, 8), True, jnp.bfloat16, 16, "i > j"),
        ((3, 6, 5), True, jnp.float32, 1, "i > j"),
        ((5, 26, 16), False, jnp.bfloat16, 16, "i > j"),
        ((3, 6, 5), True, jnp.float32, 1, "i >= j"),
        ((3, 6, 5), False, jnp.float32, 1, "i < j"),
        ((4, 1, 8), False, jnp.float32, 1, "i <= j"),
        ((5, 26, 16), False, jnp.bfloat16, 16, "i <= j"),
    ],
)
def test_features_and_gradients_are_those_of_the_pairs(
    sizes, has_bottom, dtype, multiple, pairs
):
    args = operands(*sizes, has_bottom, dtype)
    exact = plain(*args, multiple, pairs)[1]
    g = support.normal(*exact.shape, seed=2, dtype=dtype)

    @jax.jit
    def both_ways(args, g):
        run = functools.partial(dot_features, multiple=multiple, pairs=pairs)
        out, vjp = jax.vjp(run, *args)
        return out, vjp(g)

    out, gradients = both_ways(args, g)
    chex.assert_shape(out, exact.shape)
    magnitudes = jax.tree.map(np.abs, (*args, g))
    assert_close(out, exact, plain(*magnitudes[:2], multiple, pairs)[1], terms=sizes[2])
    exact, bounds = (
        plain_gradients(*args, g, pairs),
        plain_gradients(*magnitudes, pairs),
    )
    for gradient, wanted, bound in zip(gradients, exact, bounds, strict=True):
        if wanted is not None:
            chex.assert_type([out, gradient], dtype)
            assert_close(gradient, wanted, bound, terms=sizes[1] + 1)


def test_features_are_padded_to_64_where_at_most_an_eighth_is_zeros():
    assert [padded(n) for n in (55, 56, 64, 65, 111, 112)] == [64, 64, 64, 80, 112, 128]
    assert padded(65, 8) == 72
    first, second = np.ones((1, 3), np.float32), np.full((1, 4), 2, np.float32)
    found = join_features(first, second, 8), join_features(None, second, 3)
    assert [x.tolist() for x in found] == [
        [[1] * 3 + [2] * 4 + [0]],
        [[2] * 4 + [0] * 2],
    ]
