"""The norm of joined embeddings by Triton, and in models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.models import Dhen, Wukong
from tests import support
from tests.support import joined
from tests.support.triton import anywhere, interpreted, on_gpu

__all__ = ["anywhere", "interpreted", "on_gpu"]


# Embeddings of the parts, and d: of one tile of columns, of part of one, and of two.
@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(
    "counts, d, in_parts, norm",
    [
        ((3, 5), 16, False, "block"),
        ((7,), 40, True, "layer"),
        ((5, 4), 128, False, "rms"),
        ((2, 3, 4), 160, True, "block"),
        ((2, 3, 4), 160, False, "layer"),
    ],
    ids=str,
)
def test_triton_gives_the_norm(counts, d, in_parts, norm):
    run = functools.partial(joined.results, norm=norm, in_parts=in_parts)
    run = functools.partial(run, provider="triton")
    options = dict(dtype=jnp.bfloat16, limit=2.0**-8, run=run)
    joined.assert_is_a_norm(counts, d, norm, **options)


MODELS = [
    Wukong(num_layers=2, fmb_mlp=(32,)),
    Dhen(num_layers=1, dot_mlp=(32,), dot=16, cross=16, linear=16, ensemble="sum"),
]


@pytest.mark.parametrize("norm", ["block", "layer"])
@pytest.mark.parametrize("model", MODELS, ids=lambda m: type(m).__name__)
def test_models_give_the_same_by_it(model, norm):
    model = model.clone(recipe="f32", norm=norm)
    features = support.normal(16, 13), support.normal(16, 11, 16, seed=1)
    variables = jax.jit(model.init)(jax.random.key(0), *features)

    def run(model):
        def loss(variables):
            return jnp.mean(model.apply(variables, *features) ** 2)

        return jax.jit(jax.value_and_grad(loss))(variables)

    both = run(model.clone(implementation="group")), run(model)
    for ours, theirs in zip(*map(jax.tree.leaves, both), strict=True):
        error = np.linalg.norm(np.asarray(ours - theirs, np.float64))
        assert error <= 1e-4 * np.linalg.norm(theirs)
