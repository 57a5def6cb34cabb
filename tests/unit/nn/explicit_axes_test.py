"""How results of sites are sharded on a mesh with Explicit axes, by types alone.

A mesh of one device has the same types as a larger one.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from loka_jax import nn
from tests.support.nn import DELAYED, initialized

M, K, N = 32, 48, 16
LAYER = nn.Dense(N, recipe="fp8_rowwise", use_bias=False)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((1, 1), ("data", "model"))  # Explicit by default


def spread(mesh, x, *spec):
    """Returns the type of an array that is spread over a mesh."""
    return jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, P(*spec))
    )


def types(mesh, layer, x_spec, kernel_spec, shape):
    """Returns how y, dx and dW of a layer are sharded."""
    x = jnp.zeros(shape)
    variables = jax.tree.map(lambda p: spread(mesh, p), initialized(layer, x))
    kernel = variables["params"]["kernel"]
    variables["params"]["kernel"] = spread(mesh, kernel, *kernel_spec)

    def loss(variables, x):
        y = layer.apply(variables, x)
        return jnp.sum(y.astype(jnp.float32)), y

    with jax.set_mesh(mesh):
        grad = jax.grad(loss, argnums=(0, 1), has_aux=True)
        found = jax.eval_shape(grad, variables, spread(mesh, x, *x_spec))
    (dvariables, dx), y = found
    return [a.sharding.spec for a in (y, dx, dvariables["params"]["kernel"])]


DELAYED_LAYER = LAYER.clone(recipe=DELAYED)


@pytest.mark.parametrize(
    "layer, shape, x_spec, kernel_spec, y_spec",
    [
        (LAYER, (M, K), ["data", None], [None, "model"], P("data", "model")),
        (LAYER, (M, K), [None, None], [None, "model"], P(None, "model")),
        # A mesh axis shards one dim only: rows keep it.
        (LAYER, (M, K), ["data", None], [None, "data"], P("data", None)),
        (
            *(LAYER, (M, K), [("data", "model"), None], [None, "model"]),
            P(("data", "model"), None),
        ),
        (
            *(DELAYED_LAYER, (8, 4, K), ["data", None, None], [None, "model"]),
            P("data", None, "model"),
        ),
    ],
    ids=range(5),
)
def test_rows_stay_where_those_of_x_are_and_columns_where_the_kernels_are(
    mesh, layer, shape, x_spec, kernel_spec, y_spec
):
    found = types(mesh, layer, x_spec, kernel_spec, shape)
    assert found == [y_spec, P(*x_spec), P(*kernel_spec)]
