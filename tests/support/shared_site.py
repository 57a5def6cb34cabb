"""A layer whose state serves several parts of a batch, and one call with all of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

from loka_jax.nn import OVERWRITE_WITH_GRADIENT, Dense
from tests.support.nn import DELAYED, initialized, rounded, scales_of

STEPS, PARTS, ROWS, K, N = 6, 4, 32, 64, 32
LAYER: linen.Module = Dense(N, recipe=DELAYED, use_bias=False)


def batch(step):
    """Returns rows and factors of the loss, in parts of very different sizes."""
    rng = np.random.default_rng(step)
    sizes = np.float32(4.0) ** rng.integers(-2, 3, (PARTS, 1, 1)).astype(np.float32)
    x = rounded(PARTS, ROWS, K, seed=2 * step) * sizes
    return x, rounded(PARTS, ROWS, N, seed=2 * step + 1) / sizes


def loss(variables, x, factors, layer: linen.Module = LAYER):
    # Linear, so that gradients do not depend on the scales of the first step.
    return jnp.sum(jnp.asarray(layer.apply(variables, x), jnp.float32) * factors)


def whole(variables, x, factors, layer: linen.Module = LAYER):
    return loss(variables, x.reshape(-1, K), factors.reshape(-1, N), layer)


def next_state(loss):
    """Returns a function that returns the next state of a loss's sites."""
    return lambda *args: jax.grad(loss)(*args)[OVERWRITE_WITH_GRADIENT]


def tables(next_state, variables):
    """Returns the scales after each of the steps."""
    run, tables = jax.jit(next_state), []
    for step in range(STEPS):
        state = run(variables, *batch(step))
        variables = {**variables, OVERWRITE_WITH_GRADIENT: state}
        tables.append(np.concatenate(list(map(scales_of, jax.tree.leaves(state)))))
    return np.stack(tables)


@functools.cache
def one_call():
    """Returns the variables and the tables of one call with the whole batch."""
    variables = initialized(LAYER, batch(0)[0][0])
    return variables, tables(next_state(whole), variables)


def assert_as_in_one_call(next_state):
    variables, expected = one_call()
    np.testing.assert_array_equal(tables(next_state, variables), expected)
    assert np.all(np.isfinite(expected)) and np.all(expected[:, :, 1] > 0)


# Splits within a differentiated function.


def calls(variables, x, factors, loss=loss):
    return sum(loss(variables, *part) for part in zip(x, factors, strict=True))


def vmap(variables, x, factors):
    return jnp.sum(jax.vmap(loss, (None, 0, 0))(variables, x, factors))


def vmap_with_a_named_axis(variables, x, factors):
    part = functools.partial(loss, variables, layer=LAYER.clone(axis_names=("parts",)))
    return jnp.sum(jax.vmap(part, axis_name="parts")(x, factors))


def scan(variables, x, factors, loss=loss):
    def add(total, part):
        return total + loss(variables, *part), None

    return jax.lax.scan(add, jnp.zeros(()), (x, factors))[0]


def checkpointed_scan(variables, x, factors):
    return scan(variables, x, factors, jax.checkpoint(loss))
