"""A chain of sites: its equation, its parts of a plan, and wide layers in one."""

import functools

import jax
import numpy as np
import pytest
from flax import linen

from loka_jax import nn
from loka_jax.nn import group as groups
from loka_jax.nn import mlp as mlp_lib
from loka_jax.ops.device import HOPPER
from loka_jax.site import Choice
from tests import support
from tests.support import stand_ins
from tests.support.nn import (
    ACTIVATIONS,
    DELAYED,
    FACTORS,
    factor_of,
    gradients,
    initialized,
    normalized,
    record_calls,
    rounded,
    scales_of,
    states,
    stored_table,
)
from tests.support.recipes import recipe_of

X = support.normal(32, 48)
RMS, LAYER = nn.NormParameters("rms", use_scale=False), nn.NormParameters("layer")


def equation(mlp, variables, x, train=False):
    """Returns what the MLP computes, in float64."""
    params, stats = variables["params"], variables.get("batch_stats", {})
    input_norm = mlp.input_norm.norm if mlp.input_norm else "none"
    x = normalized(x, input_norm, params.get("input_norm"))
    for i in range(len(mlp.features)):
        dense = params[f"dense_{i}"]
        x = x @ dense["kernel"] + dense.get("bias", 0.0)
        if mlp.ends_linear and i == len(mlp.features) - 1:
            return x
        of_batch = None if train else stats.get(f"norm_{i}")
        x = normalized(x, mlp.norm, params.get(f"norm_{i}"), of_batch)
        x = ACTIVATIONS[mlp.activation](x)
    return x


@pytest.mark.parametrize(
    "options, with_bias",
    [
        ({}, ["dense_0", "dense_1"]),
        ({"use_bias": False, "ends_linear": True, "activation": "swish"}, []),
        ({"norm": "layer", "ends_linear": True}, ["dense_1", "norm_0"]),
        ({"norm": "layer", "use_bias": False, "input_norm": RMS}, []),
        ({"norm": "rms", "activation": "gelu", "ends_linear": True}, ["dense_1"]),
        (
            {"norm": "block", "activation": "swish", "input_norm": LAYER},
            ["input_norm"],
        ),
        ({"norm": "batch"}, ["norm_0", "norm_1"]),
        ({"norm": "batch", "use_bias": False, "activation": "none"}, []),
    ],
    ids=range(8),
)
def test_in_float32_an_mlp_follows_its_equation(options, with_bias):
    mlp = nn.Mlp((24, 16), recipe="f32", **options)
    x = support.normal(2, 6, 272) + 0.5  # more than a block
    variables = initialized(mlp, x)
    params = variables["params"]
    assert sorted(name for name in params if "bias" in params[name]) == with_bias

    @jax.jit
    def run(variables, x):
        y, updated = mlp.apply(variables, x, train=True, mutable=["batch_stats"])
        return y, updated, mlp.apply(variables, x)

    trained, updated, y = run(variables, x)
    for found, train in ((trained, True), (y, False)):
        expected = equation(mlp, variables, x, train=train)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    for path, new in jax.tree_util.tree_leaves_with_path(updated):
        assert np.all(new != functools.reduce(lambda t, k: t[k.key], path, variables))


def test_dropout_drops_after_every_layer_in_training_only():
    mlp = nn.Mlp((64, 48), recipe="f32", norm="batch", dropout_rate=0.25)
    variables, rates = initialized(mlp, X), []

    def record(call, args, kwargs, context):
        if isinstance(context.module, nn.Dropout):
            rates.append((context.module.rate, args[0].shape))
            return args[0]
        return call(*args, **kwargs)

    rngs = {"dropout": jax.random.key(1)}
    train = functools.partial(mlp.apply, train=True, mutable=["batch_stats"])
    with linen.intercept_methods(record):
        jax.eval_shape(functools.partial(train, rngs=rngs), variables, X)
        jax.eval_shape(mlp.apply, variables, X)
    assert rates == [(0.25, (32, 64)), (0.25, (32, 48))]


@pytest.mark.parametrize("implementation, recipe", [(None, "f32"), ("group", "bf16")])
def test_dropout_keeps_its_share_and_divides_by_it(implementation, recipe):
    options = dict(recipe=recipe, implementation=implementation, dropout_rate=0.25)
    one, rngs = nn.Mlp((64,), **options), {"dropout": jax.random.key(1)}
    variables = initialized(one, X)
    dropped = jax.jit(functools.partial(one.apply, train=True, rngs=rngs))(variables, X)
    plain, kept = np.float32(equation(one, variables, X)), dropped != 0
    expected = np.where(kept, plain / 0.75, 0)
    # Of operands in bfloat16, whose products cancel.
    rtol = 1e-4 if recipe == "f32" else 2.0**-5
    np.testing.assert_allclose(np.float32(dropped), expected, rtol=rtol, atol=rtol)
    assert 0.7 < np.mean(kept) / np.mean(plain != 0) < 0.8


# Chains of kernels.


def test_on_a_hopper_gpu_fp8_goes_from_layer_to_layer():
    mlp = nn.Mlp((48, 64, 20, 16), recipe="fp8_rowwise_bf16_drhs", norm="layer")
    with nn.site_context(device=stand_ins.HOPPER):
        sites = nn.list_sites(mlp, jax.ShapeDtypeStruct((65, 32), "float32"))
        dropping = nn.list_sites(mlp.clone(dropout_rate=0.5), X)
    first, second, third, fourth = sites
    # The first is given an array; 20 columns are not for FP8, nor what follows them.
    assert first.runs["fwd"] == "pallas fp8 e4m3 rowwise"
    assert second.runs["fwd"] == "pallas fp8 e4m3 tensorwise x rowwise"
    assert third.why_not_fused.startswith("n=20")
    assert fourth.why_not_fused.startswith("k=20")
    assert [site.follows for site in sites] == [False, True, True, True]
    assert not any(site.follows for site in dropping)  # what training drops


def test_a_linear_end_reads_the_fp8_that_the_layer_before_hands_on():
    mlp = nn.Mlp((48, 64), recipe="fp8_rowwise", norm="layer", ends_linear=True)
    with nn.site_context(device=stand_ins.HOPPER):
        first, second = nn.list_sites(mlp, X)
        dropping = nn.list_sites(mlp.clone(dropout_rate=0.5), X, train=True)
    assert (first.spec.out, second.spec.fp8_in) == ("fp8", "tensorwise")
    assert [(s.spec.out, s.spec.fp8_in) for s in dropping] == [("compute", None)] * 2
    assert second.runs["fwd"].startswith("xla fp8")
    assert (second.spec.norm, second.spec.activation) == ("none", "none")


# Wide layers as one operation.

WIDE = nn.Mlp(
    (groups.WIDE, 32, 64),
    recipe=DELAYED,
    norm="block",
    activation="hard_swish",
    ends_linear=True,
)
SET = WIDE.clone(recipe=recipe_of(f"{DELAYED}:initialized"), implementation="group")


@pytest.fixture
def calls(monkeypatch):
    return record_calls(monkeypatch, (mlp_lib, "run_group"))


def lengths(calls):
    return [len(plans) for _, (_, plans, *_) in calls]


def count_calls(calls, mlp, x=X, rngs=None, **options):
    """Returns the layers of the operations that run an MLP."""
    calls.clear()
    rngs = jax.random.key(0) if rngs is None else rngs
    jax.eval_shape(functools.partial(mlp.init, rngs, **options), x)
    return lengths(calls)


def test_in_bfloat16_one_operation_computes_what_its_layers_do(calls):
    mlp = WIDE.clone(recipe="bf16", norm="layer", activation="swish", input_norm=LAYER)
    x, g = rounded(2, 16, 48), rounded(2, 16, 64, seed=1)
    variables = initialized(mlp, x)

    @jax.jit
    def both(variables, x, g):
        theirs = gradients(mlp, variables, x, g)
        assert not calls
        return theirs, gradients(mlp.clone(implementation="group"), variables, x, g)

    theirs, ours = both(variables, x, g)
    assert lengths(calls) == [3]
    for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        # Roundings to bfloat16 of z, y and their gradients, at each of three layers.
        assert np.linalg.norm(a - b) <= 2.0**-6 * np.linalg.norm(b)


def test_delayed_layers_of_one_operation_have_states_of_their_own(calls):
    x = rounded(32, 48)
    mlp = SET.clone(features=(groups.WIDE, 32), norm="none", activation="relu")
    variables = initialized(mlp, x, table=stored_table())
    calls.clear()
    _, found, _ = gradients(mlp, variables, x, rounded(32, 32, seed=1, scale=1e-3))
    assert lengths(calls) == [2]
    first, second = map(scales_of, states(found))
    assert first[0, 1] == factor_of(np.abs(x).max())
    for scales, i in ((first, 0), (second, 1)):
        kernel = variables["params"][f"dense_{i}"]["kernel"]
        assert scales[1, 1] == factor_of(np.abs(kernel).max())
        np.testing.assert_array_equal(scales[:, 2], FACTORS)
    assert first[2, 1] != second[2, 1] and first[0, 1] != second[0, 1]


def test_sites_of_one_operation_are_those_of_its_layers():
    sites, others = (
        nn.list_sites(m, X) for m in (SET, SET.clone(implementation="xla"))
    )
    for site, other in zip(sites, others, strict=True):
        for name in ("path", "spec", "follows", "recipe", "group"):
            assert getattr(site, name) == getattr(other, name)
        assert site.in_group and not other.in_group and site.why_not_fused is None
        assert site.runs == {k: f"{text}, tails" for k, text in other.runs.items()}


@pytest.mark.parametrize(
    "widths, changes, columns, last",
    [
        # The last layer has more than half of the work, or less than a sixteenth.
        ((1024, 64), {}, 48, f"{DELAYED}/bf16/{DELAYED}"),
        ((1024, 64, 64), {}, 48, "bf16"),
        ((1024, 64, 64), {"norm": "block"}, 48, DELAYED),
        ((1024, 64, 64), {"recipe": "f32"}, 48, "f32"),
        # Exactly a sixteenth, and a little more.
        ((1920, 64, 160), {}, 16, "bf16"),
        ((1024, 64, 96), {}, 16, f"{DELAYED}/bf16/{DELAYED}"),
    ],
)
def test_a_small_last_layer_without_a_norm_is_in_bfloat16(
    widths, changes, columns, last
):
    mlp = SET if last not in ("f32", "bf16") else WIDE
    mlp = mlp.clone(features=widths, norm="none", ends_linear=False)
    sites = nn.list_sites(mlp.clone(**changes), X[:, :columns])
    assert sites[-1].recipe == last
    assert {site.recipe for site in sites[:-1]} == {changes.get("recipe", DELAYED)}


NARROW = {"features": (64, 1024, 40, 32), "norm": "none", "activation": "relu"}


@pytest.mark.parametrize(
    "changes, found",
    [
        ({}, [3]),
        ({"dropout_rate": 0.5}, [3]),
        ({"norm": "batch"}, []),
        ({"recipe": DELAYED}, []),  # its scales are not set
        ({"recipe": "fp8_rowwise"}, []),
        ({"implementation": "xla"}, []),
        # Not served in FP8: 13 features, and 40 that a layer makes.
        (
            {"features": (64, 1024, 40, 32), "norm": "none", "activation": "relu"},
            [1, 1],
        ),
    ],
    ids=range(7),
)
def test_layers_that_are_served_run_as_one_operation(changes, found, calls):
    columns = 13 if 40 in changes.get("features", ()) else 48
    assert count_calls(calls, SET.clone(**changes), X[:, :columns]) == found


def test_dropout_is_served_and_neither_probe_nor_few_rows(calls):
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    dropping = SET.clone(dropout_rate=0.5)
    assert count_calls(calls, dropping, rngs=rngs, train=True) == [3]
    with nn.probing(nn.ProbeConfig()):
        assert not count_calls(calls, SET)
    assert not count_calls(calls, SET, X[:24])


@pytest.mark.parametrize(
    "width, norm, device, found",
    [
        (1024, "block", HOPPER, [3]),
        (1008, "block", HOPPER, []),
        (1024, "block", None, []),
        (1024, "layer", HOPPER, [3]),
    ],
)
def test_wide_layers_run_as_one_operation_where_kernels_of_tails_do(
    width, norm, device, found, calls, monkeypatch
):
    monkeypatch.setattr(groups.triton, "why_not_installed", lambda: None)
    mlp = SET.clone(implementation=None, norm=norm, features=(width, 64, 32))
    with nn.site_context(device=device):
        assert count_calls(calls, mlp) == found


def test_the_plan_of_a_site_decides(calls):
    with nn.overriding({"dense_1": Choice.parse("xla fp8_rowwise")}):
        assert count_calls(calls, SET) == [1, 1]
    with nn.overriding({"dense_1": "bf16"}):
        assert count_calls(calls, SET) == [3]
    in_group = Choice.parse(f"group {DELAYED}").with_initialized_scales()
    with nn.overriding({"dense_0": in_group, "dense_1": in_group}):
        assert count_calls(calls, SET.clone(implementation=None)) == [2]
