import chex
import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest

from loka_jax import nn
from tests import support


def plain_interaction(x):
    """Returns the dot products of all pairs i > j, one after the other."""
    n = x.shape[1]
    pairs = [jnp.sum(x[:, i] * x[:, j], axis=1) for i in range(n) for j in range(i)]
    return jnp.stack(pairs, axis=1)


@pytest.mark.parametrize("n", [2, 3, 7])
def test_dot_interaction_is_the_products_of_all_pairs(n):
    x = support.normal(4, n, 8)
    expected = plain_interaction(x)
    chex.assert_shape(expected, (4, n * (n - 1) // 2))
    chex.assert_trees_all_close(nn.dot_interaction(x), expected, rtol=1e-5, atol=1e-5)


def test_a_single_vector_has_no_pairs():
    chex.assert_shape(nn.dot_interaction(jnp.ones((4, 1, 8))), (4, 0))
    gradient = jax.grad(lambda x: jnp.sum(nn.dot_interaction(x)))(jnp.ones((4, 1, 8)))
    chex.assert_trees_all_equal(gradient, jnp.zeros((4, 1, 8)))


@pytest.mark.parametrize("n", [2, 5])
def test_gradient_of_dot_interaction_is_that_of_the_plain_sum(n):
    x = support.normal(4, n, 8)
    g = support.normal(4, n * (n - 1) // 2, seed=1)
    (ours,) = jax.vjp(nn.dot_interaction, x)[1](g)
    (plain,) = jax.vjp(plain_interaction, x)[1](g)
    chex.assert_trees_all_close(ours, plain, rtol=1e-5, atol=1e-5)


def test_gradient_of_dot_interaction_agrees_with_differences():
    x = support.normal(2, 4, 3)
    f = lambda x: nn.dot_interaction(jnp.asarray(x))  # noqa: E731
    jax.test_util.check_grads(f, (x,), 1, modes=["rev"], rtol=1e-2)


def test_dot_interaction_keeps_bfloat16():
    x = support.normal(4, 3, 8, dtype=jnp.bfloat16)
    y, vjp = jax.vjp(nn.dot_interaction, x)
    assert y.dtype == vjp(y)[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("k, padded", [(16, 16), (17, 32), (1, 16), (31, 32)])
def test_features_are_padded_with_zeros_to_a_multiple_of_16(k, padded):
    x = support.normal(3, k)
    y = nn.pad_features(x)
    chex.assert_shape(y, (3, padded))
    chex.assert_trees_all_equal(y[:, :k], x)
    chex.assert_trees_all_equal(y[:, k:], jnp.zeros((3, padded - k)))


@pytest.mark.parametrize("rank", [None, 4])
def test_cross_net_follows_the_equation_of_dcn_v2(rank):
    module = nn.CrossNet(3, rank=rank, recipe="f32")
    x0 = support.normal(5, 16)
    variables = module.init(jax.random.key(0), x0)
    params = jax.tree.map(
        lambda p: np.asarray(support.normal(*p.shape, seed=3), np.float64) / 4,
        variables["params"],
    )
    x = first = np.asarray(x0, np.float64)
    for i in range(3):
        hidden = x if rank is None else x @ params[f"v_{i}"]["kernel"]
        u = params[f"u_{i}"]
        x = first * (hidden @ u["kernel"] + u["bias"]) + x
    params = jax.tree.map(jnp.float32, params)
    y = module.apply({"params": params}, x0)
    chex.assert_trees_all_close(y, x.astype(np.float32), rtol=1e-4, atol=1e-4)
