import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import nn
from tests import support


@pytest.mark.parametrize("heads, use_bias", [(1, False), (4, True)])
def test_attention_follows_its_equation(heads, use_bias):
    module = nn.SelfAttention(heads, recipe="f32", use_bias=use_bias)
    x = support.normal(3, 5, 16)
    variables = module.init(jax.random.key(0), x)
    params = jax.tree.map(
        lambda p: support.normal(*p.shape, seed=p.size) / 4, variables["params"]
    )
    y = module.apply({"params": params}, x)

    def dense(layer, x):
        kernel = np.asarray(layer["kernel"], np.float64)
        assert ("bias" in layer) == use_bias
        return x @ kernel + np.asarray(layer.get("bias", 0.0), np.float64)

    expected = []
    for x_i in np.asarray(x, np.float64):
        q, k, v = np.split(dense(params["qkv"], x_i), 3, axis=1)
        seen = []
        parts = (np.split(a, heads, axis=1) for a in (q, k, v))
        for q_h, k_h, v_h in zip(*parts, strict=True):
            shares = np.exp(q_h @ k_h.T / np.sqrt(16 / heads))
            seen.append(shares / shares.sum(1, keepdims=True) @ v_h)
        expected.append(dense(params["out"], np.concatenate(seen, axis=1)))
    chex.assert_trees_all_close(y, np.float32(expected), rtol=1e-4, atol=1e-4)


def test_dense_layers_are_sites_with_a_choice_and_heads_without():
    x = jax.ShapeDtypeStruct((4, 5, 16), jnp.bfloat16)
    sites = nn.list_sites(nn.SelfAttention(4), x)
    assert [(s.path, s.spec.m, s.spec.k, s.spec.n, s.batch) for s in sites] == [
        ("qkv", 20, 16, 48, None),
        ("scores", 5, 4, 5, 16),
        ("values", 5, 5, 4, 16),
        ("out", 20, 16, 16, None),
    ]


def test_attention_takes_an_empty_batch():
    model, x = nn.SelfAttention(2), jnp.ones((4, 5, 16), jnp.bfloat16)
    variables = model.init(jax.random.key(0), x)
    assert model.apply(variables, x[:0]).shape == (0, 5, 16)
    sites = nn.list_sites(model, x[:0])
    sizes = [(s.spec.m, s.spec.k, s.spec.n, s.batch) for s in sites[1:3]]
    assert sizes == [(5, 8, 5, 0), (5, 5, 8, 0)]


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="3 heads do not divide vectors of 16"):
        nn.SelfAttention(3).init(jax.random.key(0), support.normal(1, 2, 16))
