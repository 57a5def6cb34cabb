"""Weights prepared once: the same results, less to keep, nothing large repeated."""

import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from loka_jax import nn, serving
from loka_jax.fp8 import E4M3
from loka_jax.serving import Served, fold, serve
from tests.support import normal

# Without it, the two programs differ in roundings that fusions leave out.
EXACT = {"xla_allow_excess_precision": False}
MODEL = nn.Dense(32, recipe="fp8_rowwise")
VARIABLES = {"params": {"kernel": normal(48, 32), "bias": normal(32, seed=1)}}
X = normal(32, 48, seed=2)


@pytest.fixture(scope="module")
def served():
    """The dense layer for two batch sizes."""
    return serve(MODEL, VARIABLES, X[:1], batch_sizes=(32, 16))


def test_a_layer_does_what_it_did(served):
    apply = jax.jit(MODEL.apply, compiler_options=EXACT)
    folded = fold(MODEL.apply, VARIABLES, X)
    got = jax.jit(folded.function, compiler_options=EXACT)(folded.ready, X)
    expected = apply(VARIABLES, X)
    chex.assert_trees_all_equal(got, expected)
    # A rounding to bfloat16 left out can flip a code of FP8, 1/8 of a product.
    kernel = VARIABLES["params"]["kernel"]
    flipped = float(np.max(np.abs(X)) * np.max(np.abs(kernel))) / 8
    for rows in (32, 16):
        out = served(X[:rows])
        np.testing.assert_allclose(out, expected[:rows], rtol=2**-7, atol=flipped)


def test_fp8_weights_are_kept_in_fp8_alone_and_once_for_all_sizes(served):
    kernels = [x for x in served.ready if x.ndim == 2 and x.size > 48]
    assert [(x.shape, x.dtype) for x in kernels] == [((32, 48), E4M3)]  # K last
    one = fold(MODEL.apply, VARIABLES, X)
    assert served.num_bytes == sum(x.nbytes for x in one.ready) < 2 * 48 * 32


def test_weights_are_shared_by_value_shape_and_dtype():
    def function(weights, x):
        return [w * x.astype(w.dtype) for w in weights]

    x, ones = jnp.ones(()), jnp.ones(3)
    weights = ones, ones[None], ones.astype(int), ones
    served = Served([fold(function, weights, x), fold(function, (2 * ones,), x)])
    assert len(served.ready) == 4  # the last of these equals the first
    assert [w.dtype for w in served.ready].count(jnp.int32) == 1
    assert served.num_bytes == 4 * 4 * 3


def test_rows_of_repeated_weights_are_not_kept():
    def function(bias, x):
        return x + jnp.broadcast_to(jnp.exp(bias)[None, :], x.shape)

    bias, x = jnp.arange(4.0), jnp.ones((1000, 4))
    folded = fold(function, bias, x)
    (ready,) = folded.ready
    np.testing.assert_allclose(ready.ravel(), np.exp(np.arange(4.0)), rtol=1e-6)
    chex.assert_trees_all_equal(folded.function(folded.ready, x), function(bias, x))


def test_inputs_of_another_shape_kind_or_structure_are_refused(served):
    for x in (X[:8], X.astype(jnp.bfloat16)):
        with pytest.raises(ValueError, match=r"\(32, 48.* or .*\(16, 48.*: prepare"):
            served(x)
    with pytest.raises(ValueError, match="1.0 is no array: give arrays"):
        served(np.ones((32, 48)).tolist())
    with pytest.raises(ValueError, match="False is no array: .* in a function"):
        serve(MODEL, VARIABLES, X, False, batch_sizes=(16,))

    def function(weight, x):
        return weight * x["ctr"] - x["price"]

    ctr, price = jnp.ones(3), jnp.zeros(3)
    folded = fold(function, jnp.ones(3), {"ctr": ctr, "price": price})
    assert jnp.array_equal(Served([folded])({"price": price, "ctr": ctr}), ctr)
    for inputs in (({"Price": price, "ctr": ctr},), (ctr, price), ([ctr, price],)):
        for call in (Served([folded]), lambda *x: folded.function(folded.ready, *x)):
            with pytest.raises(ValueError, match="give them in this structure"):
                call(*inputs)


def test_an_nnx_model_is_served_by_a_function_of_its_state():
    x = jnp.ones((16, 48))
    linear = nnx.Linear(48, 32, rngs=nnx.Rngs(0))
    model = nn.convert(linear, recipe="fp8_tensorwise")
    graph, state = nnx.split(model)
    with pytest.raises(ValueError, match="Linear is no Linen model: .*for NNX"):
        inspect.unwrap(serve)(model, state, x)  # past the types that tests check
    served = Served([fold(lambda s, x: nnx.merge(graph, s)(x), state, x)])
    assert E4M3 in [weight.dtype for weight in served.ready]
    np.testing.assert_allclose(served(x), model(x), rtol=0.01)


def test_scales_are_checked_before_anything_is_prepared(monkeypatch):
    def refuse(variables):
        assert variables is VARIABLES
        raise ValueError("no power of two")

    monkeypatch.setattr(serving, "check_scales", refuse)
    with pytest.raises(ValueError, match="no power of two"):
        serve(MODEL, VARIABLES, X)


def test_only_weights_of_one_shape_and_dtype_are_kept_once():
    """All of these have the same bytes."""
    ones = jnp.ones(()), jnp.ones((1,)), jnp.ones((1, 1)), jnp.full((), 0x3F800000)
    matrices, kept = (jnp.ones((2, 3)), jnp.ones((3, 2))), []
    for place, weight in [*enumerate((*ones, *matrices))] * 2:
        assert serving.keep(kept, weight) == place
    chex.assert_trees_all_equal(kept, [*ones, *matrices])
