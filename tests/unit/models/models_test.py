"""The models against their papers' equations in numpy, their sites, and dropout.

All options of each model are in tests/whole; here each is on in one case.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen, traverse_util

from loka_jax import nn
from loka_jax.models import Dcnv2, Dhen, Dlrm, Wukong
from loka_jax.nn import embeddings
from loka_jax.nn import group as groups
from loka_jax.nn import interaction as interaction_lib
from loka_jax.nn import mlp as mlp_lib
from tests.support import stand_ins
from tests.support.models import MODELS, assert_follows, inputs
from tests.support.nn import initialized, listed, record_calls

MODS = {"bias": False, "norm": "block", "activation": "hard_swish"}
BATCH = {"norm": "batch", "train": True}
ONE = {"num_layers": 1}
SUM = dict.fromkeys(("dot", "cross", "linear"), 3) | {"ensemble": "sum"}


@pytest.mark.parametrize(
    "name, options",
    [
        ("dlrm", BATCH),
        ("dlrm", {"interaction": "cat", "norm": "layer", "activation": "swish"}),
        ("dlrm", {"num_dense": 0}),
        ("dcnv2", {"cross_rank": 16, "norm": "layer"}),
        ("dcnv2", {"structure": "stacked", "bottom_mlp": (32,), **BATCH}),
        ("dcnv2", {"bottom_mlp": (32,), "num_dense": 0, **MODS}),
        ("mmoe", BATCH),
        ("mmoe", {"num_experts": 1, "norm": "layer", "interaction": "cat"}),
        ("wukong", {"embeddings_per_field": 2, **BATCH}),
        # 300 columns and more, normalized as one; as many embeddings as before.
        ("wukong", {"k": 60, "fm_embeddings": 2, **ONE, **MODS}),
        ("wukong", {"attention_mlp": (16,), "num_dense": 0, **ONE}),
        ("dhen", {"cross_rank": 16, "attention": 3, "num_heads": 2, **ONE, **BATCH}),
        ("dhen", SUM | ONE),
        ("mix", {"num_cross_layers": 1, **ONE, **BATCH}),
    ],
)
def test_a_model_follows_its_equations(name, options):
    assert_follows(name, **options)


def test_a_layer_without_a_change_of_their_number_has_no_map_of_embeddings():
    wukong = MODELS["wukong"][0].clone(fm_embeddings=2, **ONE)
    params = jax.eval_shape(wukong.init, jax.random.key(0), *inputs())["params"]
    assert "residual" not in params["layer_0"]


@pytest.mark.parametrize("name", MODELS)
def test_without_biases_only_heads_have_one_and_heads_and_gates_are_float32(name):
    model = MODELS[name][0].clone(bias=False, norm="layer", recipe="fp8_rowwise")
    params = jax.eval_shape(model.init, jax.random.key(0), *inputs())["params"]
    paths = traverse_util.flatten_dict(params, sep="/")
    biases = [path for path in paths if path.endswith("bias")]
    assert biases and all(path.startswith("head") for path in biases)
    for path, site in listed(model, *inputs(batch=64)).items():
        is_high = path.startswith(("head", "gates"))
        assert is_high == (site.recipe == "f32")


# By model: the rates of the MLPs that drop.
DROPS = {
    "dlrm": {"top_mlp": 0.25},
    "dcnv2": {"deep_mlp": 0.25},
    "mmoe": {"tower_0": 0.25, "tower_1": 0.25},
    "wukong": {"top_mlp": 0.25, "layer_0/fmb": 0.125},
    "dhen": {"top_mlp": 0.25, "layer_0/dot_mlp": 0.125, "layer_0/ffn": 0.125},
}


@pytest.mark.parametrize("name", DROPS)
def test_mlps_drop_at_their_rates_in_training_only(name):
    options = ONE | {"layer_dropout_rate": 0.125} if name in ("wukong", "dhen") else {}
    options |= {"attention": 1} if name == "dhen" else {}
    model = MODELS[name][0].clone(dropout_rate=0.25, **options)
    variables, found = initialized(model, *inputs()), {}

    def record(call, args, kwargs, context):
        if isinstance(context.module, nn.Dropout):
            found["/".join(context.module.path[:-1])] = context.module.rate
        return call(*args, **kwargs)

    rngs = {"dropout": jax.random.key(1)}
    with linen.intercept_methods(record):
        jax.eval_shape(model.apply, variables, *inputs())
        assert not found
        train = functools.partial(model.apply, train=True, rngs=rngs)
        jax.eval_shape(train, variables, *inputs())
    assert found == DROPS[name]


# Sites.


def test_both_networks_of_a_parallel_dcnv2_have_products_of_their_own():
    model = MODELS["dcnv2"][0]
    for structure, barriers in (("parallel", 1), ("stacked", 0)):
        own = model.clone(recipe="bf16", structure=structure)
        run = functools.partial(own.apply, initialized(own, *inputs()))
        program = str(jax.make_jaxpr(run)(*inputs()))
        assert program.count("optimization_barrier") == barriers


def test_sites_of_dhen():
    model = MODELS["dhen"][0].clone(num_layers=1, attention=1, num_heads=2)
    model = model.clone(cross_rank=16, recipe="fp8_rowwise")
    sites = listed(model, *inputs(batch=64))
    found = {path: (s.spec.m, s.spec.k, s.spec.n, s.batch) for path, s in sites.items()}
    in_layer = {
        "dot_mlp/dense_0": (64, 16, 24, None),  # 10 pairs, padded
        "dot_mlp/dense_1": (64, 24, 48, None),
        "cross_net/v_0": (64, 60, 16, None),
        "cross_net/u_0": (64, 16, 60, None),
        "cross/compress": (12, 5, 2, 64),
        "linear/compress": (12, 5, 3, 64),
        "self_attention/qkv": (320, 12, 36, None),
        "self_attention/scores": (5, 6, 5, 128),
        "self_attention/values": (5, 5, 6, 128),
        "self_attention/out": (320, 12, 12, None),
        "ffn/dense_0": (320, 12, 24, None),
        "ffn/dense_1": (320, 24, 12, None),
        "attention/compress": (12, 5, 1, 64),
        "residual/compress": (12, 5, 10, 64),
    }
    assert [*found.items()][2:-2] == [(f"layer_0/{k}", v) for k, v in in_layer.items()]


# Options that decide what runs.

WIDE = {
    "wukong": (Wukong(fmb_mlp=(1024, 32), num_layers=1), 1),
    "dhen": (Dhen(dot_mlp=(1024,), num_layers=1), 2),  # the top MLP reads 64 x 16
    "dcnv2": (Dcnv2(num_cross_layers=1, deep_mlp=(1024, 32)), 1),
    "dlrm": (Dlrm(top_mlp=(1024, 32)), 1),
}


@pytest.mark.parametrize("name", WIDE)
def test_wide_layers_of_models_run_in_groups(name, monkeypatch):
    calls = record_calls(
        monkeypatch, (mlp_lib, "run_group"), (interaction_lib, "run_group")
    )
    model, count = WIDE[name]
    monkeypatch.setattr(groups.triton, "why_not_installed", lambda: None)
    model = model.clone(recipe="bf16", norm="block")
    features = jnp.zeros((32, 16)), jnp.zeros((32, 16, 16))
    with nn.site_context(device=stand_ins.HOPPER):
        for implementation in (None, "xla"):
            own = model.clone(implementation=implementation)
            jax.eval_shape(own.init, jax.random.key(0), *features)
            assert len(calls) == count


@pytest.mark.parametrize(
    "name, changes, joined",
    [
        ("wukong", {}, [[4, 3]]),
        ("wukong", {"implementation": None}, []),
        ("wukong", {"norm": "layer"}, [[4, 3]]),
        ("wukong", {"norm": "batch"}, []),
        ("wukong", {"implementation": "xla"}, []),
        ("dhen", {}, [[4, 2, 3]]),
    ],
)
def test_norms_of_joined_embeddings_are_one_operation_if_asked(
    name, changes, joined, monkeypatch
):
    calls = record_calls(monkeypatch, (embeddings, "joined_norm"))
    options = dict(recipe="bf16", norm="block", implementation="group") | ONE | changes
    model = MODELS[name][0].clone(**options)
    jax.eval_shape(model.init, jax.random.key(0), *inputs())
    widths = [[part.shape[1] for part in parts] for _, (parts, *_) in calls]
    assert widths == joined


def test_implementation_reaches_every_site():
    model = MODELS["wukong"][0].clone(norm="layer", recipe="bf16", **ONE)
    with nn.site_context(device=stand_ins.HOPPER):
        for implementation in ("xla", None):
            own = model.clone(implementation=implementation)
            sites = listed(own, *inputs(batch=64)).values()
            has_kernels = "pallas" in {site.plan.choice.provider for site in sites}
            assert has_kernels == (implementation is None)


# Errors that a user can mend.


EMBEDDINGS = "--embedding.dim 12 must be a multiple of --embeddings-per-field 5"
DIFFER = r"--ensemble sum of modules that make \[4, 2, 3\] embeddings"


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("wukong", {"embeddings_per_field": 5}, EMBEDDINGS),
        ("dhen", dict.fromkeys(("dot", "cross", "linear")), "set --dot, --cross"),
        ("dhen", {"ensemble": "sum"}, DIFFER),
    ],
)
def test_options_that_cannot_be_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        nn.list_sites(MODELS[name][0].clone(**options), *inputs())


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_float32_of_any_embeddings_and_of_no_rows(name):
    dense, embeddings = inputs(batch=0)
    model = MODELS[name][0].clone(recipe="bf16")
    init = functools.partial(model.init_with_output, jax.random.key(0))
    out, _ = jax.eval_shape(init, dense, embeddings.astype(jnp.bfloat16))
    assert (out.shape, out.dtype) == ((0, 2) if name == "mmoe" else (0,), jnp.float32)
    assert model.compute_dtype == jnp.bfloat16
