"""Cross networks: their equation, and when their layers run as one operation."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import nn
from loka_jax.models import Dcnv2
from loka_jax.nn import interaction, mlp
from tests import support
from tests.support.nn import (
    DELAYED,
    factor_of,
    gradients,
    initialized,
    listed,
    record_calls,
    record_taps,
    rounded,
    scales_of,
    states,
    table_of,
)
from tests.support.recipes import recipe_of

SET = recipe_of(f"{DELAYED}:initialized")


@pytest.mark.parametrize(
    "a, b, padded",
    # Up to a multiple of 64 where at most an eighth is zeros, else of 16.
    [(3, 13, 16), (0, 31, 32), (13, 43, 64), (13, 34, 48), (16, 351, 384)],
)
def test_features_are_joined_and_padded_with_zeros(a, b, padded):
    first, second = np.full((3, a), 2, np.float32), np.full((3, b), 5, np.float32)
    y = nn.join_features(first if a else None, jnp.asarray(second))
    zeros = np.zeros((3, padded - a - b), np.float32)
    chex.assert_trees_all_equal(y, np.concatenate([first, second, zeros], axis=1))


def test_a_cross_net_refuses_features_of_three_dims():
    with pytest.raises(ValueError, match=r"takes \[B, k\], not \(4, 3, 16\): reshape"):
        initialized(nn.CrossNet(2, recipe="f32"), jnp.ones((4, 3, 16)))


@pytest.fixture
def calls(monkeypatch):
    return record_calls(monkeypatch, *((x, "run_group") for x in (interaction, mlp)))


def count_calls(calls, module, *args, rngs=None, **options):
    """Returns the number of sites of each operation that a module runs by."""
    calls.clear()
    rngs = rngs or jax.random.key(0)
    jax.eval_shape(lambda *args: module.init(rngs, *args, **options), *args)
    return [len(plans) for _, (_, plans, *_) in calls]


def test_a_fused_cross_net_whose_scales_are_set_runs_as_one_operation(calls):
    by_layers = nn.CrossNet(2, rank=32, recipe=SET)
    x0, g = rounded(32, 64).astype(jnp.bfloat16), rounded(32, 64, seed=1)
    # With which nothing of the fixtures is clipped or flushed.
    table = table_of([2.0**-5, 2.0**-9, 2.0**-5])
    variables = initialized(by_layers, x0, table=table)
    fused = by_layers.clone(implementation="group")
    chex.assert_trees_all_equal(initialized(fused, x0, table=table), variables)
    calls.clear()

    @jax.jit
    def both(variables, x0, g):
        theirs = by_layers.apply(variables, x0)
        assert not calls
        return theirs, *gradients(fused, variables, x0, g)

    theirs, ours, found, _ = both(variables, x0, g)
    assert [name for name, _ in calls] == ["run_group"]
    # Independent roundings to E4M3, whose error is 2.6e-2: in each layer three of ours
    # (x, h, z) and two of theirs.
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    limit = (2 * (3 + 2)) ** 0.5 * 2.6e-2
    assert np.linalg.norm(ours - theirs) <= limit * np.linalg.norm(theirs)
    # The states, in the order of their sites, are those of their own kernels.
    for table, site in zip(states(found), ("u_0", "u_1", "v_0", "v_1"), strict=True):
        kernel = np.abs(variables["params"][site]["kernel"]).max()
        assert scales_of(table)[1, 1] == factor_of(kernel)


def test_sites_of_a_cross_net_tell_what_crosses_and_what_leaves_in_fp8(monkeypatch):
    x0 = jax.ShapeDtypeStruct((32, 64), jnp.bfloat16)
    fused = nn.CrossNet(2, rank=16, recipe=SET, implementation="group")
    sites = listed(fused, x0)
    assert {path: (s.is_crossed, s.in_group) for path, s in sites.items()} == (
        dict.fromkeys(["v_0", "u_0", "v_1", "u_1"], (True, True))
    )
    assert [(s.spec.k, s.spec.n) for s in sites.values()] == [(64, 16), (16, 64)] * 2
    assert [s.fp8_results for s in sites.values()] == [("dlhs",), ("fwd",)] * 2
    assert not any(s.follows for s in sites.values())
    (full, *_) = listed(fused.clone(rank=None), x0).values()
    assert full.fp8_results == ("fwd", "dlhs")
    (plain, *_) = nn.list_sites(fused.clone(implementation="xla"), x0)
    assert plain.is_crossed and not plain.in_group and not plain.fp8_results
    record_taps(monkeypatch)
    with nn.probing(nn.ProbeConfig()):  # sees the layers one by one, which may join
        sites = listed(fused, x0).values()
    assert {(s.is_crossed, s.in_group) for s in sites} == {(True, False)}


FEATURES = support.normal(32, 16), support.normal(32, 3, 16, seed=1)
DCNV2 = Dcnv2(recipe=SET, num_cross_layers=2, deep_mlp=(16,), implementation="group")
STACKED = DCNV2.clone(structure="stacked", cross_rank=32, deep_mlp=(1024, 32))


@pytest.mark.parametrize(
    "model, changes, found",
    [
        # A deep network beside it is a part of the operation if it can.
        (DCNV2, {}, [3]),
        (DCNV2, {"norm": "batch"}, [2]),
        (DCNV2, {"recipe": DELAYED}, []),  # its scales are not set
        (DCNV2, {"implementation": "xla"}, []),
        (STACKED, {}, [6]),
        (STACKED, {"recipe": "bf16"}, [6]),
        # 40 features are not served in FP8.
        (STACKED, {"deep_mlp": (64, 40, 32)}, [4, 1]),
    ],
    ids=range(7),
)
def test_a_cross_network_and_the_layers_beside_or_behind_it_are_one_operation(
    model, changes, found, calls
):
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    model = model.clone(**changes)
    assert count_calls(calls, model, *FEATURES, rngs=rngs, train=True) == found


@pytest.mark.parametrize("model", [DCNV2, STACKED], ids=["beside", "behind"])
def test_as_one_operation_networks_have_the_variables_and_sites_of_their_layers(model):
    one_by_one = model.clone(implementation="xla")
    chex.assert_trees_all_equal(
        initialized(model, *FEATURES), initialized(one_by_one, *FEATURES)
    )
    sites = listed(model, *FEATURES)
    assert list(sites) == list(listed(one_by_one, *FEATURES))
    # All networks are one group, also where they do not run in it.
    others = listed(one_by_one, *FEATURES)
    groups = {site.group for of in (sites, others) for site in of.values()}
    (group,) = groups - {None}
    assert [x.path for x in group.members] == [*sites][:-1]
    assert group.head == (1 if model is DCNV2 else None)


def test_the_head_of_one_operation_adds_the_dots_the_product_and_the_bias(monkeypatch):
    seen, dots, y = [], rounded(32), rounded(32, 16, seed=1)

    def run_group(*args, words):
        seen.append(args[5])
        return jnp.asarray(dots), jnp.asarray(y)

    monkeypatch.setattr(interaction, "run_group", run_group)
    variables = initialized(DCNV2, *FEATURES)
    logits = jax.jit(lambda *args: (DCNV2.apply(*args), seen[-1]))
    found, weights = logits(variables, *FEATURES)
    head = variables["params"]["head"]
    np.testing.assert_array_equal(weights, head["kernel"][:64, 0])
    expected = dots + (y @ head["kernel"][64:])[:, 0] + head["bias"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    site = listed(DCNV2, *FEATURES)["head"].spec
    assert (site.m, site.k, site.n) == (32, 64 + 16, 1)
