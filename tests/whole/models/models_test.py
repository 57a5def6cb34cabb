"""More options of each model against its equations, and recipes beside float32."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest

from loka_jax.models import Dcnv2, Dlrm, Mmoe, Wukong
from loka_jax.recipe import RECIPES
from tests import support
from tests.support.models import assert_follows, inputs
from tests.support.nn import initialized


@pytest.mark.parametrize(
    "name, options",
    [
        ("mmoe", {"num_experts": 2, "num_tasks": 1}),
        ("dhen", {"dot": None, "attention": 3, "num_heads": 2, "norm": "block"}),
        ("mix", {"attention": 1, "num_heads": 3, "num_dense": 0}),
    ],
)
def test_a_model_with_other_options_follows_its_equations(name, options):
    assert_follows(name, **options)


STACK = dict(bottom_mlp=(), dense_embeddings=5, num_layers=1, top_mlp=(32,))
MODELS = (
    Dlrm(bottom_mlp=(), top_mlp=(32,)),
    Dcnv2(num_cross_layers=1, deep_mlp=(32,)),
    Mmoe(bottom_mlp=(), expert_mlp=(32,), tower_mlp=(16,)),
    Wukong(**STACK, fm_embeddings=4, lcb_embeddings=4, k=4, fmb_mlp=(32,)),
)
RECIPE_AND_MODEL = [(x, MODELS[i % len(MODELS)]) for i, x in enumerate(RECIPES)]


@pytest.mark.parametrize("recipe, model", RECIPE_AND_MODEL, ids=list(RECIPES))
def test_in_any_recipe_loss_and_gradients_are_close_to_those_in_float32(recipe, model):
    model, args = model.clone(activation="swish"), inputs(batch=32, dim=16)

    @functools.partial(jax.jit, static_argnums=0)
    def loss_and_gradient(model, variables, dense, embeddings):
        def loss(embeddings):
            logits = model.apply(variables, dense, embeddings)
            return jnp.mean(jax.nn.softplus(logits) - logits / 3)

        return jax.value_and_grad(loss)(embeddings)  # went through every site

    variables = initialized(model.clone(recipe=recipe), *args)
    loss, found = loss_and_gradient(model.clone(recipe=recipe), variables, *args)
    params = {"params": variables["params"]}
    exact, expected = loss_and_gradient(model.clone(recipe="f32"), params, *args)
    chex.assert_tree_all_finite(found)
    tolerance = {"f32": 0.0, "bf16": 1e-2}.get(recipe, 3e-2)
    assert loss == pytest.approx(float(exact), rel=tolerance)
    floor = {"f32": 200.0, "bf16": 35.0}.get(recipe, 15.0)
    assert support.sqnr_db(expected, found) > floor
