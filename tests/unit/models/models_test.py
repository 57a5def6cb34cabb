"""The models against their papers' equations in numpy, and what they share."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import configs
from loka_jax import nn
from loka_jax.models import Dcnv2, Dhen, DhenDlrm, Dlrm, Mmoe, Wukong
from loka_jax.recipe import RECIPES
from tests import support
from tests.support.models import (
    DENSE,
    B,
    assert_follows,
    initialized,
    inputs,
    padded,
    pairs,
)

make_dlrm = functools.partial(Dlrm, bottom_mlp=(32,), top_mlp=(48, 32))
make_dcnv2 = functools.partial(Dcnv2, num_cross_layers=2, deep_mlp=(48, 32))
make_mmoe = functools.partial(
    Mmoe, bottom_mlp=(32,), expert_mlp=(48, 32), tower_mlp=(16,), num_experts=3
)


# The equations.


def dlrm(eq, params, dense, embeddings, interaction):
    z, features = embeddings, []
    if dense.shape[1]:
        bottom = eq.mlp(params["bottom_mlp"], dense)
        z = np.concatenate([bottom[:, None], embeddings], axis=1)
        features = [bottom]
    if interaction == "cat":
        features = z.reshape(len(z), -1)
    else:
        features = np.concatenate([*features, pairs(z)], axis=1)
    return eq.head(params["head"], eq.mlp(params["top_mlp"], padded(features)))


def mmoe(eq, params, dense, embeddings, experts, tasks):
    bottom = eq.mlp(params["bottom_mlp"], dense)
    z = np.concatenate([bottom[:, None], embeddings], axis=1)
    x = padded(np.concatenate([bottom, pairs(z)], axis=1))
    f = [eq.mlp(params[f"expert_{i}"], x) for i in range(experts)]
    logits = []
    for t in range(tasks):
        gate = np.ones((len(x), 1))
        if experts > 1:
            columns = slice(t * experts, (t + 1) * experts)
            gate = np.exp(x @ params["gates"]["kernel"][:, columns])
            gate /= gate.sum(axis=1, keepdims=True)
        mixed = sum(gate[:, i : i + 1] * f[i] for i in range(experts))
        logits.append(eq.head(params[f"head_{t}"], eq.mlp(params[f"tower_{t}"], mixed)))
    return np.stack(logits, axis=1) if tasks > 1 else logits[0]


def dcnv2(eq, params, dense, embeddings, structure):
    if "bottom_mlp" in params:
        dense = eq.mlp(params["bottom_mlp"], dense)
    x0 = padded(np.concatenate([embeddings.reshape(len(dense), -1), dense], axis=1))
    crossed = eq.cross_net(params["cross"], x0)
    if structure == "stacked":
        return eq.head(params["head"], eq.mlp(params["deep_mlp"], crossed))
    deep = eq.mlp(params["deep_mlp"], x0)
    return eq.head(params["head"], np.concatenate([crossed, deep], axis=1))


@pytest.mark.parametrize("interaction", ["dot", "cat"])
@pytest.mark.parametrize("num_dense", [DENSE, 0])
def test_dlrm_follows_its_equations(interaction, num_dense):
    model = make_dlrm(recipe="f32", interaction=interaction)
    assert_follows(model, dlrm, inputs(num_dense), interaction=interaction)


@pytest.mark.parametrize("structure", ["parallel", "stacked"])
@pytest.mark.parametrize("num_dense, rank", [(DENSE, None), (0, None), (DENSE, 16)])
def test_dcnv2_follows_its_equations(structure, num_dense, rank):
    model = make_dcnv2(recipe="f32", structure=structure, cross_rank=rank)
    assert_follows(model, dcnv2, inputs(num_dense), structure=structure)


@pytest.mark.parametrize("num_dense", [DENSE, 0])
def test_dcnv2_with_a_bottom_mlp_follows_its_equations(num_dense):
    model = make_dcnv2(recipe="f32", bottom_mlp=(32,), structure="stacked")
    assert_follows(model, dcnv2, inputs(num_dense), structure="stacked")


@pytest.mark.parametrize("experts, tasks", [(3, 2), (1, 2), (2, 1)])
def test_mmoe_follows_its_equations(experts, tasks):
    model = make_mmoe(recipe="f32", num_experts=experts, num_tasks=tasks)
    assert_follows(model, mmoe, inputs(), experts=experts, tasks=tasks)


# Recipes.

tiny_dlrm = functools.partial(Dlrm, bottom_mlp=(), top_mlp=(32,), activation="swish")
tiny_dcnv2 = functools.partial(
    Dcnv2, num_cross_layers=1, deep_mlp=(32,), activation="swish"
)
tiny_mmoe = functools.partial(
    Mmoe, bottom_mlp=(), expert_mlp=(32,), tower_mlp=(16,), activation="swish"
)
tiny_stack = dict(
    bottom_mlp=(), dense_embeddings=5, num_layers=1, top_mlp=(32,), activation="swish"
)
tiny_wukong = functools.partial(
    Wukong, **tiny_stack, fm_embeddings=4, lcb_embeddings=4, k=4, fmb_mlp=(32,)
)
tiny_dhen = functools.partial(
    Dhen, **tiny_stack, dot=2, cross=2, linear=2, attention=2, dot_mlp=(32,)
)
TINY = [tiny_dlrm, tiny_dcnv2, tiny_mmoe, tiny_wukong, tiny_dhen]


@functools.partial(jax.jit, static_argnames="model")
def loss_and_gradients(model, variables, *args):
    labels = (jnp.arange(B) % 3 == 0).astype(jnp.float32)

    def loss_of(variables, *args):
        logits = model.apply(variables, *args).reshape(B, -1)  # of all tasks
        losses = optax.sigmoid_binary_cross_entropy(logits, labels[:, None])
        return jnp.mean(losses)

    return jax.value_and_grad(loss_of, argnums=(0, 1, 2))(variables, *args)


@pytest.mark.parametrize(
    "recipe",
    support.slow_except(RECIPES, "fp8_tensorwise_delayed", "fp8_rowwise"),
)
@pytest.mark.parametrize("make", TINY)
def test_a_loss_in_any_recipe_is_close_and_its_gradients_finite(make, recipe):
    args = inputs()
    model = make(recipe=recipe)
    variables = initialized(model, *args)
    loss, gradients = loss_and_gradients(model, variables, *args)
    chex.assert_tree_all_finite(gradients)
    f32 = {"params": variables["params"]}
    exact, exact_gradients = loss_and_gradients(make(recipe="f32"), f32, *args)
    tolerance = {"f32": 0.0, "bf16": 1e-3}.get(recipe, 1e-2)
    assert loss == pytest.approx(float(exact), rel=tolerance)
    # The gradients of the embeddings went through every site.
    floor = {"f32": 200.0, "bf16": 38.0}.get(recipe, 18.0)
    assert support.sqnr_db(exact_gradients[2], gradients[2]) > floor


@pytest.mark.parametrize(
    "model",
    [
        tiny_dlrm(),
        tiny_dlrm(interaction="cat"),
        tiny_dcnv2(),
        tiny_dcnv2(structure="stacked"),
        tiny_mmoe(),
        tiny_wukong(),
        tiny_wukong(norm="block"),
        tiny_wukong(attention_mlp=(16,)),
        tiny_dhen(),
        DhenDlrm(**tiny_stack, dot=2, cross=None, linear=2, dot_mlp=(32,)),
    ],
)
def test_an_empty_batch_gives_no_logits(model):
    variables = initialized(model, *inputs())
    logits = model.apply(variables, *inputs(batch=0))
    assert (logits.shape[0], logits.dtype) == (0, jnp.float32)


@pytest.mark.parametrize(
    ("make", "option"),
    [
        *((make, "dropout_rate") for make in (tiny_dlrm, tiny_dcnv2, tiny_wukong)),
        *((make, "layer_dropout_rate") for make in (tiny_wukong, tiny_dhen)),
    ],
)
def test_dropout_acts_in_training_only(make, option):
    args = inputs()
    model = make(recipe="f32", **{option: 0.5})
    variables = initialized(model, *args)
    apply = jax.jit(model.apply, static_argnames="train")
    rngs = {"dropout": jax.random.key(1)}
    evaluated = apply(variables, *args)
    assert jnp.any(apply(variables, *args, train=True, rngs=rngs) != evaluated)
    plain = jax.jit(make(recipe="f32").apply)(variables, *args)
    chex.assert_trees_all_equal(evaluated, plain)


# Sites.


def listed(model, batch=64):
    avals = jax.eval_shape(functools.partial(inputs, batch=batch))
    return [
        (s.path, (s.spec.m, s.spec.k, s.spec.n), s.is_fp8)
        for s in nn.list_sites(model, *avals)
    ]


def test_sites_of_dlrm():
    assert listed(make_dlrm()) == [
        ("bottom_mlp/dense_0", (64, 5, 32), False),  # as many as there are dense
        ("bottom_mlp/dense_1", (64, 32, 16), True),
        ("top_mlp/dense_0", (64, 32, 48), True),  # 16 + 6 pairs, padded
        ("top_mlp/dense_1", (64, 48, 32), True),
        ("head", (64, 32, 1), False),
    ]


def test_sites_of_dcnv2():
    assert listed(make_dcnv2(cross_rank=16)) == [
        ("cross/v_0", (64, 64, 16), True),  # 5 + 48 features, padded
        ("cross/u_0", (64, 16, 64), True),
        ("cross/v_1", (64, 64, 16), True),
        ("cross/u_1", (64, 16, 64), True),
        ("deep_mlp/dense_0", (64, 64, 48), True),
        ("deep_mlp/dense_1", (64, 48, 32), True),
        ("head", (64, 96, 1), False),
    ]


def test_sites_of_dcnv2_of_mlperf():
    model = configs.get_config("fp8_mlperf_dcnv2").model
    avals = (
        jax.ShapeDtypeStruct((64, 13), "f4"),
        jax.ShapeDtypeStruct((64, 26, 128), "f4"),
    )
    shapes = {s.path: (s.spec.k, s.spec.n) for s in nn.list_sites(model, *avals)}
    assert shapes == {
        "bottom_mlp/dense_0": (13, 512),
        "bottom_mlp/dense_1": (512, 256),
        "bottom_mlp/dense_2": (256, 128),
        **{f"cross/v_{i}": (3456, 512) for i in range(3)},
        **{f"cross/u_{i}": (512, 3456) for i in range(3)},
        "deep_mlp/dense_0": (3456, 1024),
        "deep_mlp/dense_1": (1024, 1024),
        "deep_mlp/dense_2": (1024, 512),
        "deep_mlp/dense_3": (512, 256),
        "head": (256, 1),
    }


def test_sites_of_mmoe():
    experts = [
        (f"expert_{i}/dense_{j}", (64, k, n), True)
        for i in range(3)
        for j, (k, n) in enumerate([(32, 48), (48, 32)])
    ]
    gates = ("gates", (64, 32, 6), False)
    towers = [
        site
        for t in range(2)
        for site in (
            (f"tower_{t}/dense_0", (64, 32, 16), True),
            (f"head_{t}", (64, 16, 1), False),
        )
    ]
    assert listed(make_mmoe())[2:] == [*experts, gates, *towers]


def test_a_shared_bottom_has_no_gates():
    paths = [path for path, *_ in listed(make_mmoe(num_experts=1))]
    assert "expert_0/dense_0" in paths and "gates" not in paths
