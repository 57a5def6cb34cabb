"""A step of microbatches of the examples does what it says.

That examples learn is in tests/whole.
"""

import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from loka_jax import nn
from tests.support.nn import rounded

FOLDER = pathlib.Path(__file__).parents[3] / "examples"


pytestmark = pytest.mark.usefixtures("as_users_do")


def load(name):
    """Returns what an example defines."""
    return runpy.run_path(str(FOLDER / f"{name}.py"))


class Bilinear:
    """A retriever whose scores are `user W item`."""

    def apply(self, variables, user, item):
        return user @ variables["w"] @ item.T


def test_a_step_of_microbatches_follows_the_mean_of_their_gradients():
    example = load("linen_by_hand")
    step, optimizer = example["train_step"], nn.overwriting(optax.sgd(0.5))
    step.__wrapped__.__globals__.update(TX=optimizer)
    users, items = rounded(3, 4, 6), rounded(3, 4, 5, seed=1)
    variables = {"w": rounded(6, 5, seed=2, scale=0.1)}
    after, _ = step(Bilinear(), variables, optimizer.init(variables), users, items)

    def cross_entropy(w, user, item):
        scores = user @ w @ item.T
        return jnp.mean(jax.nn.logsumexp(scores, axis=1) - jnp.diagonal(scores))

    gradient = jax.jit(jax.vmap(jax.grad(cross_entropy), (None, 0, 0)))
    expected = variables["w"] - 0.5 * gradient(variables["w"], users, items).mean(0)
    np.testing.assert_allclose(after["w"], expected, rtol=1e-4, atol=1e-5)
