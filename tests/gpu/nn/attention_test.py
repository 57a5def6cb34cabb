"""Softmax attention of converted models on a GPU, by cuDNN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from loka_jax import nn
from tests.support.nn import rounded

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "rows, keys, columns", [(196, 196, 64), (130, 334, 128), (100, 96, 64)]
)
@pytest.mark.parametrize("is_masked", [False, True])
def test_values_and_gradients_are_near_those_in_float32(rows, keys, columns, is_masked):
    q, k, v = (
        rounded(3, n, 4, columns, seed=i) for i, n in enumerate((rows, keys, keys))
    )
    seen = rounded(3, 1, rows, keys, seed=3) > -1 if is_masked else None

    def attention(parameters, q, k, v):
        own = linen.dot_product_attention(q @ parameters["w"], k, v, mask=seen)
        return own @ parameters["o"]

    parameters = {
        name: rounded(columns, columns, seed=i) / 8 for i, name in enumerate("wo")
    }

    def of(f):
        loss = lambda p, *x: jnp.mean(f(p, *x).astype(jnp.float32) ** 2)  # noqa: E731
        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3))

    model = nn.convert(attention, recipe="bf16")
    sites = nn.list_sites(model, parameters, q, k, v)
    assert [x.runs_by for x in sites if x.batch] == ["cudnn attention"] * 2
    with jax.default_matmul_precision("float32"):
        exact = jax.jit(of(attention))(parameters, q, k, v)
    ours = jax.jit(of(model))(parameters, q, k, v)
    for x, y in zip(*map(jax.tree.leaves, (exact, ours)), strict=True):
        assert np.linalg.norm(x - y) < 2.0**-6 * np.linalg.norm(x)
