"""What a head reads keeps the gradient that it hands on out of FP8."""

import flax.linen as linen
import jax
import pytest

from loka_jax import nn
from loka_jax.dispatch.first_use import as_if_accurate
from loka_jax.dispatch.heads import BELOW_HEAD, below_heads
from loka_jax.dispatch.plan import make_plan
from loka_jax.models import Dcnv2, Dlrm, Mmoe, RankingModel
from loka_jax.recipe import ROLES
from tests.support.dispatch import model_of

TIMES = {"xla bf16": 9.0, "xla fp8_rowwise/bf16/bf16": 2.0, "xla fp8_rowwise": 1.0}


def layers(*features, norm=None):
    parts = [
        [linen.Dense(n), *([norm()] if norm else []), jax.nn.relu] for n in features
    ]
    return sum(parts, [])


class Towers(linen.Module):
    """Two towers, and their heads after both."""

    @linen.compact
    def __call__(self, x):
        towers = [linen.Sequential(layers(128, 32))(x) for _ in range(2)]
        return [linen.Dense(1, name=f"head_{i}")(y) for i, y in enumerate(towers)]


def converted(*features, **options):
    model = linen.Sequential([*layers(*features, **options), linen.Dense(1)])
    return nn.convert(model, recipe="fp8_rowwise")


def skipped(*features):
    model = linen.Sequential([*layers(*features), linen.Dense(1)])
    return nn.convert(model, recipe="fp8_rowwise", skip="layers_4")


def sites_of(model):
    is_ranking = isinstance(model, RankingModel)
    shapes = [(64, 13), (64, 4, 16)] if is_ranking else [(64, 96)]
    return nn.list_sites(model, *(jax.ShapeDtypeStruct(x, "float32") for x in shapes))


@pytest.mark.parametrize(
    "model, below",
    [
        (converted(64, 64), {"layers_2": False}),
        (converted(512, 256, 32), {"layers_4": True}),
        (converted(64, 64, norm=linen.LayerNorm), {}),
        (skipped(64, 64), {"layers_2": False}),
        (nn.convert(Towers()), {"Dense_1": False, "Dense_3": False}),
        (Dlrm(top_mlp=(64, 32)), {"top_mlp/dense_1": True}),
        (Dlrm(top_mlp=(64, 32), norm="layer"), {}),
        (Dcnv2(deep_mlp=(64, 32)), {"deep_mlp/dense_1": False}),
        (
            Mmoe(expert_mlp=(64,), tower_mlp=(32,), num_tasks=2),
            {"tower_0/dense_0": True, "tower_1/dense_0": True},
        ),
    ],
)
def test_what_a_head_reads_is_found_by_sizes(model, below):
    assert below_heads(sites_of(model)) == below


@pytest.mark.parametrize(
    "last, choice", [(64, "xla fp8_rowwise/bf16/bf16"), (16, "xla bf16")]
)
def test_it_has_no_fp8_gradient_in_training_and_none_at_all_if_small(last, choice):
    sites = sites_of(converted(256, 256, last))
    performance, errors = model_of(sites, TIMES), as_if_accurate(sites)
    decisions = dict(make_plan(sites, performance, errors=errors).decisions)
    names = [decisions[f"layers_{i}"].choice.name for i in (0, 2, 4)]
    assert names == ["xla fp8_rowwise", "xla fp8_rowwise", choice]
    assert BELOW_HEAD in (decisions["layers_4"].runner_up or "")
    scoring = model_of(sites, TIMES, "inference")
    scored = make_plan(sites, scoring, errors=errors, roles=ROLES[:1])
    assert all(choice.is_fp8 for path, choice in scored.choices if path != "layers_6")
