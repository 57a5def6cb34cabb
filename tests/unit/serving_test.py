"""Weights prepared once: the same results, less to keep, nothing large repeated."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from loka_jax import nn
from loka_jax.fp8 import E4M3
from loka_jax.models import Dcnv2, Dlrm
from loka_jax.serving import Served, fold, serve
from loka_jax.site import Choice

ROWS = 64
# Without it, the two programs differ in roundings that fusions leave out.
EXACT = {"xla_allow_excess_precision": False}
MODELS = {
    "dlrm": Dlrm(bottom_mlp=(32,), top_mlp=(64, 32), recipe="fp8_rowwise"),
    "dlrm layer norm": Dlrm(
        bottom_mlp=(32,), top_mlp=(64, 32), recipe="fp8_tensorwise", norm="layer"
    ),
    "dlrm delayed": Dlrm(
        bottom_mlp=(32,), top_mlp=(64, 32), recipe="fp8_tensorwise_delayed"
    ),
    "dcnv2 batch norm": Dcnv2(
        num_cross_layers=1, deep_mlp=(32,), recipe="fp8_tensorwise", norm="batch"
    ),
    "dlrm bf16": Dlrm(bottom_mlp=(32,), top_mlp=(64, 32), recipe="bf16"),
}


def _inputs(rows=ROWS):
    keys = jax.random.split(jax.random.key(1))
    shapes = ((rows, 13), (rows, 4, 16))
    return tuple(jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_does_what_the_model_does(name):
    planned, inputs = nn.Planned(MODELS[name]), _inputs()
    variables = jax.jit(planned.init)(jax.random.key(0), *inputs)
    folded = fold(planned.apply, variables, *inputs)
    expected = jax.jit(planned.apply, compiler_options=EXACT)(variables, *inputs)
    got = jax.jit(folded.function, compiler_options=EXACT)(folded.ready, *inputs)
    chex.assert_trees_all_equal(got, expected)


def test_fp8_weights_are_kept_in_fp8_alone():
    model, inputs = MODELS["dlrm"], _inputs()
    variables = jax.jit(model.init)(jax.random.key(0), *inputs)
    served = serve(model, variables, *inputs)
    kernels = {x.shape: x.dtype for x in served.ready if x.ndim == 2 and x.size > 512}
    assert kernels == {(64, 32): E4M3, (32, 64): E4M3}  # top_mlp, K last
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(variables))
    assert served.num_bytes < 0.4 * num_bytes


def test_a_plan_decides_the_form_of_each_weight():
    inputs = _inputs()
    choices = (("top_mlp/dense_1", Choice.parse("xla fp8_rowwise")),)
    planned = nn.Planned(MODELS["dlrm bf16"], choices)
    variables = jax.jit(planned.init)(jax.random.key(0), *inputs)
    served = serve(planned, variables, *inputs)
    assert sum(x.dtype == E4M3 for x in served.ready) == 1
    assert any(x.dtype == jnp.bfloat16 and x.size > 512 for x in served.ready)


def test_rows_of_repeated_weights_are_not_kept():
    def function(bias, x):
        return x + jnp.broadcast_to(jnp.exp(bias)[None, :], x.shape)

    bias, x = jnp.arange(4.0), jnp.ones((1000, 4))
    folded = fold(function, bias, x)
    (ready,) = folded.ready
    np.testing.assert_allclose(ready.ravel(), np.exp(np.arange(4.0)), rtol=1e-6)
    chex.assert_trees_all_equal(folded.function(folded.ready, x), function(bias, x))


def test_a_weight_may_be_output_or_unused():
    def function(weights, x):
        return {"own": weights["a"], "both": weights["a"] * x, "none": jnp.zeros(2)}

    weights = {"a": jnp.arange(3.0), "unused": jnp.ones((5,))}
    folded = fold(function, weights, jnp.ones(3))
    assert len(folded.ready) == 1
    got = folded.function(folded.ready, 2 * jnp.ones(3))
    chex.assert_trees_all_equal(got, function(weights, 2 * jnp.ones(3)))


def test_other_shapes_are_refused():
    model, inputs = MODELS["dlrm bf16"], _inputs()
    served = serve(model, jax.jit(model.init)(jax.random.key(0), *inputs), *inputs)
    with pytest.raises(ValueError, match="prepare them for these shapes"):
        served(*_inputs(ROWS // 2))


@pytest.mark.parametrize("form", ["other keys", "arguments", "list"])
def test_inputs_of_another_structure_are_refused(form):
    def function(weight, x):
        return weight * x["ctr"] - x["price"]

    ctr, price = jnp.ones(3), jnp.zeros(3)
    folded = fold(function, jnp.ones(3), {"ctr": ctr, "price": price})
    served = Served([folded])
    chex.assert_trees_all_equal(served({"price": price, "ctr": ctr}), ctr)
    inputs = {
        "other keys": ({"Price": price, "ctr": ctr},),
        "arguments": (ctr, price),
        "list": ([ctr, price],),
    }[form]
    with pytest.raises(ValueError, match="'ctr': .*: give them in this structure"):
        served(*inputs)
    with pytest.raises(ValueError, match="give them in this structure"):
        folded.function(folded.ready, *inputs)


def test_inputs_that_are_no_arrays_are_refused():
    model, x = nn.Dense(32), jnp.ones((16, 48))
    variables = model.init(jax.random.key(0), x)
    for sizes in ((), (16,)):
        with pytest.raises(ValueError, match="False is no array: .* in a function"):
            serve(model, variables, x, False, batch_sizes=sizes)
    with pytest.raises(ValueError, match="1.0 is no array: give arrays"):
        serve(model, variables, x)(x.tolist())


class _Scaled(linen.Module):
    @linen.compact
    def __call__(self, x, factor, train=False):
        y = nn.Dense(32)(x).astype(x.dtype)
        return y if train else y * factor


def test_a_function_with_bound_arguments_is_served():
    model, x, two = _Scaled(), jnp.ones((16, 48)), jnp.asarray(2.0)
    variables = model.init(jax.random.key(0), x, two, False)
    bound = functools.partial(model.apply, train=False)
    served = Served([fold(bound, variables, x, two)])
    assert E4M3 in [weight.dtype for weight in served.ready]
    expected = jax.jit(bound)(variables, x, two)
    np.testing.assert_allclose(served(x, two), expected, rtol=0.01)


def test_an_nnx_model_is_served_by_a_function_of_its_state():
    x = jnp.ones((16, 48))
    model = nn.convert(nnx.Linear(48, 32, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    with pytest.raises(ValueError, match="Linear is no Linen model: .*for NNX"):
        inspect.unwrap(serve)(model, state, x)  # past the types that tests check
    served = Served([fold(lambda s, x: nnx.merge(graph, s)(x), state, x)])
    assert E4M3 in [weight.dtype for weight in served.ready]
    np.testing.assert_allclose(served(x), model(x), rtol=0.01)


def test_batch_sizes_leave_scalar_inputs_alone():
    model, x, two = _Scaled(), jnp.ones((16, 48)), jnp.asarray(2.0)
    variables = model.init(jax.random.key(0), x, two)
    served = serve(model, variables, x[:1], two, batch_sizes=(16,))
    expected = jax.jit(model.apply)(variables, x, two)
    np.testing.assert_allclose(served(x, two), expected, rtol=0.01)


def test_several_batch_sizes_share_their_weights():
    model, inputs = MODELS["dlrm"], _inputs()
    variables = jax.jit(model.init)(jax.random.key(0), *inputs)
    one, served = (
        serve(model, variables, *inputs, batch_sizes=sizes) for sizes in ((), (16, 64))
    )
    assert served.num_bytes == one.num_bytes
    for rows in (16, 64):
        inputs = _inputs(rows)
        expected = jax.jit(model.apply)(variables, *inputs)
        # XLA leaves roundings to bfloat16 out at other places.
        np.testing.assert_allclose(served(*inputs), expected, atol=0.05)
    with pytest.raises(ValueError, match=r"\(16, 13\).* or .*\(64, 13\)"):
        served(*_inputs(32))
