"""LoKA's Mods, each alone and all together, in every model: the equations hold."""

import functools

import jax
import pytest

from loka_jax.models import Dcnv2, Dlrm, Mmoe
from tests.support import slow_except
from tests.support.models import assert_follows, inputs
from tests.unit.models import models_test, stacked_test

MODS = {
    "no bias": {"bias": False},
    "block": {"norm": "block"},
    "hard_swish": {"activation": "hard_swish"},
}
MODS["all"] = MODS["no bias"] | MODS["block"] | MODS["hard_swish"]
# A norm of its own, with a shift to leave out, for models that have none by default.
MODS["no bias, layer"] = MODS["no bias"] | {"norm": "layer"}

MODELS = {
    "dlrm": (
        models_test.make_dlrm,
        functools.partial(models_test.dlrm, interaction="dot"),
    ),
    "dcnv2": (
        functools.partial(models_test.make_dcnv2, cross_rank=16),
        functools.partial(models_test.dcnv2, structure="parallel"),
    ),
    "mmoe": (
        models_test.make_mmoe,
        functools.partial(models_test.mmoe, experts=3, tasks=2),
    ),
    "wukong": (
        functools.partial(stacked_test.make_wukong, attention_mlp=(16,)),
        functools.partial(stacked_test.stacked, layer=stacked_test.wukong_layer),
    ),
    "dhen": (
        stacked_test.make_dhen,
        functools.partial(stacked_test.stacked, layer=stacked_test.dhen_layer),
    ),
    "mix": (
        stacked_test.make_mix,
        functools.partial(
            stacked_test.stacked,
            layer=stacked_test.dhen_layer,
            features=stacked_test.mixed,
        ),
    ),
}


@pytest.mark.parametrize("mod", slow_except(MODS, "all"))
@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_mods_follows_its_equations(name, mod):
    make, reference = MODELS[name]
    assert_follows(make(recipe="f32", **MODS[mod]), reference, inputs())


@pytest.mark.parametrize("name", MODELS)
def test_without_biases_only_heads_have_one(name):
    make, _ = MODELS[name]
    for norm in ("layer", "batch", "none"):
        model = make(bias=False, norm=norm)
        params = jax.eval_shape(model.init, jax.random.key(0), *inputs())["params"]
        paths = ["/".join(str(key.key) for key in path) for path, _ in leaves(params)]
        biases = [path for path in paths if path.endswith("bias")]
        assert biases and all(path.startswith("head") for path in biases)


def leaves(params):
    return jax.tree_util.tree_leaves_with_path(params)


def test_mods_are_off_by_default():
    assert all(model().bias for model in (Dlrm, Dcnv2, Mmoe))
