"""An MLP whose wide layers run as one operation."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import nn
from loka_jax.models import Dcnv2, Dhen, Dlrm, Wukong
from loka_jax.nn import OVERWRITE_WITH_GRADIENT
from loka_jax.ops import crossed_stack, wide_stack
from loka_jax.ops.device import HOPPER
from loka_jax.probe.site import ProbeConfig
from loka_jax.site import Choice
from tests import support

DELAYED = "fp8_tensorwise_delayed"
WIDE = nn.Mlp(
    (wide_stack.WIDE, 32, 64),
    recipe=DELAYED,
    norm="block",
    activation="hard_swish",
    ends_linear=True,
)


def test_an_mlp_without_layers_is_refused():
    with pytest.raises(ValueError, match="name no layer"):
        nn.Mlp(()).init(jax.random.key(0), jnp.ones((4, 8)))


@pytest.fixture
def calls(monkeypatch):
    """Returns a list that has the layers of each call of `wide_stack`."""
    found, run = [], wide_stack.wide_stack

    def counted(x, layers, *args, **kwargs):
        found.append(len(layers))
        return run(x, layers, *args, **kwargs)

    monkeypatch.setattr(wide_stack, "wide_stack", counted)
    return found


def _x(k=48):
    return support.normal(32, k, dtype=jnp.bfloat16)


def _trained(module, variables, x):
    """Returns the loss of a model, and the gradients of its variables."""

    def loss(variables):
        return jnp.mean(module.apply(variables, x).astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss)(variables)


def _initialized(module, x):
    """Returns variables whose delayed scales are set, and the model that says so."""
    variables = module.init(jax.random.key(0), x)
    _, grads = _trained(module, variables, x)
    states = grads[OVERWRITE_WITH_GRADIENT]
    set_ = module.clone(recipe=f"{module.recipe}:initialized")
    return {**variables, OVERWRITE_WITH_GRADIENT: states}, set_


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"input_norm": "rms"},
        # Of which the last layer is no small part.
        {
            "features": (wide_stack.WIDE, 32, 256),
            **{"norm": "none", "activation": "relu", "ends_linear": False},
        },
        {"norm": "layer", "activation": "swish"},
    ],
)
def test_wide_layers_whose_scales_are_set_run_as_one_operation(changes, calls):
    x = _x()
    variables, by_layers = _initialized(WIDE.clone(**changes), x)
    fused = by_layers.clone(fused=True)
    chex.assert_trees_all_equal_shapes(fused.init(jax.random.key(0), x), variables)
    calls.clear()
    theirs = _trained(by_layers, variables, x)
    assert not calls
    ours = _trained(fused, variables, x)
    assert calls == [3]
    chex.assert_trees_all_equal_structs(ours, theirs)
    for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        # The quantization error of E4M3, 2.6e-2, in each layer, both ways.
        assert np.linalg.norm(a - b) <= 6 * 2.6e-2 * np.linalg.norm(b)
    sites, others = (nn.list_sites(module, x) for module in (fused, by_layers))
    for site, other in zip(sites, others, strict=True):
        assert (site.path, site.spec, site.follows) == (
            *(other.path, other.spec, other.follows),
        )
        runs, recipe = other.runs, other.recipe
        if site.path == "dense_2" and fused.norm == "none":
            runs, recipe = runs | {"dlhs": "xla bf16"}, f"{DELAYED}/bf16/{DELAYED}"
        assert site.recipe == recipe
        assert site.runs == {k: f"{text}, tails" for k, text in runs.items()}
        assert site.why_not_fused is None


@pytest.mark.parametrize(
    ("widths", "changes", "last"),
    [
        # The last layer has more than half of the work, or less than a sixteenth.
        ((wide_stack.WIDE, 64), {}, f"{DELAYED}/bf16/{DELAYED}"),
        ((wide_stack.WIDE, 64, 64), {}, "bf16"),
        ((wide_stack.WIDE, 64, 64), {"norm": "block"}, DELAYED),
        ((wide_stack.WIDE, 64, 64), {"fused": False}, DELAYED),
        ((wide_stack.WIDE, 64, 64), {"recipe": "f32"}, "f32"),
    ],
)
def test_a_small_last_layer_without_a_norm_is_in_bfloat16(widths, changes, last):
    mlp = WIDE.clone(features=widths, norm="none", ends_linear=False, fused=True)
    mlp, x = mlp.clone(**changes), _x()
    states = mlp.init(jax.random.key(0), x).get(OVERWRITE_WITH_GRADIENT, {})
    assert (f"dense_{len(widths) - 1}" in states) == (DELAYED in last)
    if mlp.recipe == DELAYED:
        mlp = mlp.clone(recipe=f"{DELAYED}:initialized")
    sites = nn.list_sites(mlp, x)
    assert sites[-1].recipe == last
    assert {site.recipe for site in sites[:-1]} == {changes.get("recipe", DELAYED)}


def test_a_choice_takes_a_small_last_layer_to_fp8():
    mlp = WIDE.clone(features=(wide_stack.WIDE, 64, 64), norm="none", fused=True)
    with nn.overriding({"dense_2": Choice.parse(f"xla {DELAYED}")}):
        sites = nn.list_sites(mlp, _x())
    assert [site.recipe for site in sites] == [DELAYED] * 3


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("widths", [(wide_stack.WIDE, 64), (64, 64)])
def test_the_norm_of_the_input_is_over_whole_rows(widths, fused):
    mlp = WIDE.clone(features=widths, recipe="bf16", fused=fused)
    x = 3 * _x(272)  # more than a block
    variables = mlp.init(jax.random.key(0), x)
    wide = x.astype(jnp.float32)
    rms = jnp.sqrt(jnp.mean(wide**2, axis=1, keepdims=True) + 1e-6)
    normed = (wide / rms).astype(x.dtype)
    ours, theirs = (
        _trained(module, variables, rows)
        for module, rows in ((mlp.clone(input_norm="rms"), x), (mlp, normed))
    )
    for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        assert np.linalg.norm(a - b) <= 2.0**-7 * np.linalg.norm(b)


def test_in_bfloat16_the_same_passes_run(calls):
    mlp, x = WIDE.clone(recipe="bf16"), _x()
    variables = mlp.init(jax.random.key(0), x)
    theirs = _trained(mlp, variables, x)
    ours = _trained(mlp.clone(fused=True), variables, x)
    assert calls == [3]
    for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        assert np.linalg.norm(a - b) <= 2.0**-6 * np.linalg.norm(b)


def test_what_is_not_served_runs_site_by_site(calls):
    x = _x()
    variables, by_layers = _initialized(WIDE, x)
    calls.clear()
    fused = by_layers.clone(fused=True)
    refused = {
        "narrow": fused.clone(features=(512, 64)),
        "batch norm": fused.clone(norm="batch"),
        "not set": WIDE.clone(fused=True),
        "rowwise": fused.clone(recipe="fp8_rowwise"),
        "by xla": fused.clone(implementation="xla"),
    }
    for module in refused.values():
        jax.eval_shape(module.init, jax.random.key(0), x)
    dropout = fused.clone(dropout_rate=0.5)
    rngs = {"dropout": jax.random.key(1)}
    dropout.apply(variables, x, train=True, rngs=rngs)
    with nn.probing(ProbeConfig()):
        jax.eval_shape(fused.init, jax.random.key(0), x)
    jax.eval_shape(fused.init, jax.random.key(0), _x()[:24])  # rows
    assert not calls
    chex.assert_trees_all_equal(
        refused["by xla"].apply(variables, x), by_layers.apply(variables, x)
    )
    dropout.apply(variables, x)  # in inference nothing is dropped
    assert calls == [3]


def test_layers_beside_those_that_are_served_run_by_themselves(calls):
    mlp = nn.Mlp(
        (64, wide_stack.WIDE, 40, 32), recipe=f"{DELAYED}:initialized", fused=True
    )
    x = _x(13)
    variables = mlp.init(jax.random.key(0), x)
    calls.clear()
    y = mlp.apply(variables, x)
    assert calls == [1]  # 13 features, and 40, are no multiple of 16
    assert y.shape == (32, 32)


def test_the_plan_of_a_site_decides(calls):
    fused = WIDE.clone(recipe=f"{DELAYED}:initialized", fused=True)
    by_rows = {"dense_1": Choice.parse("xla fp8_rowwise")}
    with nn.overriding(by_rows):
        jax.eval_shape(fused.init, jax.random.key(0), _x())
    assert calls == [1]  # of dense_0; dense_2 is narrow
    calls.clear()
    with nn.overriding({"dense_1": "bf16"}):
        jax.eval_shape(fused.init, jax.random.key(0), _x())
    assert calls == [3]
    calls.clear()
    by_kernels = {"dense_2": Choice.parse(f"pallas {DELAYED}:initialized")}
    with nn.overriding(by_kernels), nn.site_context(device=HOPPER):
        mlp = fused.clone(features=(wide_stack.WIDE, 64, 64), norm="none")
        sites = nn.list_sites(mlp.clone(ends_linear=False), _x())
    assert calls == [2] and sites[2].plan.choice == by_kernels["dense_2"]


MODELS = {
    "wukong": (Wukong(fmb_mlp=(1024, 32), num_layers=2), 2),
    "dhen": (Dhen(dot_mlp=(1024,), num_layers=2), 3),  # the top MLP reads 64 x 16
    "dcnv2": (Dcnv2(num_cross_layers=1, deep_mlp=(1024, 32)), 1),
    "dlrm": (Dlrm(top_mlp=(1024, 32)), 1),
}


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_models_fuse_wide_layers_if_asked(name, is_fused, calls):
    model, count = MODELS[name]
    model = model.clone(recipe="bf16", norm="block", fused_wide=is_fused)
    features = support.normal(32, 16), support.normal(32, 16, 16, seed=1)
    jax.eval_shape(model.init, jax.random.key(0), *features)
    assert len(calls) == count * is_fused


STACKED = Dcnv2(
    num_cross_layers=2,
    cross_rank=32,
    deep_mlp=(1024, 32),
    structure="stacked",
    recipe=f"{DELAYED}:initialized",
    fused_wide=True,
)


@pytest.mark.parametrize(
    "changes, count",
    [
        ({}, 1),
        ({"recipe": "bf16"}, 0),  # XLA's cross layers
        ({"structure": "parallel"}, 0),
        ({"deep_mlp": (64, 32)}, 0),  # narrow
        ({"dropout_rate": 0.5}, 0),
        ({"norm": "batch"}, 0),
    ],
    ids=str,
)
def test_a_cross_network_and_the_wide_layers_that_read_it_are_one_operation(
    changes, count, monkeypatch
):
    found, run = [], crossed_stack.crossed_stack

    def counted(*args, **kwargs):
        found.append(args)
        return run(*args, **kwargs)

    monkeypatch.setattr(crossed_stack, "crossed_stack", counted)
    model = STACKED.clone(**changes)
    features = support.normal(32, 16), support.normal(32, 3, 16, seed=1)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}

    def initialized(*features):
        return model.init(keys, *features, train=True)

    shapes = jax.eval_shape(initialized, *features)
    assert len(found) == count
    found.clear()
    one_by_one = model.clone(fused_wide=False)
    with_names = jax.eval_shape(one_by_one.init, keys, *features)
    chex.assert_trees_all_equal_shapes(shapes["params"], with_names["params"])
    sites = [[s.path for s in nn.list_sites(m, *features)] for m in (model, one_by_one)]
    assert sites[0] == sites[1]
