"""Models that training cannot call, and products of very large numbers."""

import jax
import numpy as np
import pytest
from flax import linen, nnx

from loka_jax import nn
from loka_jax.ops.device import local_device
from loka_jax.ops.matmul import matmul
from loka_jax.ops.plan import resolve
from loka_jax.site import Choice, SiteSpec
from loka_jax.train.config import DlrmConfig
from tests.support.nn import rounded

X = rounded(32, 64)


# As the model of `--config FILE.py:f`.


class Untrained(linen.Module):
    recipe: str = "bf16"

    def __call__(self, dense_features, embeddings):
        return dense_features


class Trained(Untrained):
    def __call__(self, dense_features, embeddings, *, train=False):
        return dense_features


class Nameless(linen.Module):
    def __call__(self, dense_features, embeddings, *, train=False):
        return dense_features


@pytest.mark.parametrize(
    "model, said",
    [
        (Untrained(), "a Untrained, .*train=True, which its __call__ does not take"),
        (Nameless(), "a Nameless, has no field `recipe`"),
        (nn.convert(Trained()), "is a Converted, and must be a Flax Linen module"),
        (nnx.Dropout(0.5), "is a Dropout, and must be a Flax Linen"),
    ],
    ids=range(4),
)
def test_a_model_that_training_cannot_call_is_refused(model, said):
    assert DlrmConfig(name="mine", model=Trained()).model == Trained()
    with pytest.raises(ValueError, match=said):
        DlrmConfig(name="mine", model=model)


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_rowwise"])
def test_products_are_finite_where_float32_is(recipe):
    x, w = 1e36 * X, rounded(64, 32, seed=1)
    plan = resolve(
        SiteSpec(m=32, k=64, n=32), Choice.parse(f"xla {recipe}"), local_device()
    )
    run = jax.jit(jax.grad(lambda x, w: matmul(x, w, plan=plan).sum(), argnums=(0, 1)))
    assert np.isfinite(matmul(x, w, plan=plan)).all()
    assert np.isfinite(run(x, w)[1]).all()
    half = [v.astype(np.float16) for v in (np.abs(X) / 8, np.abs(w) / 8)]
    for found, exact in zip(run(*half), run(*map(np.float32, half)), strict=True):
        assert found.dtype == np.float16
        np.testing.assert_allclose(found, exact, rtol=0.02)
