import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import nn
from tests import support


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
