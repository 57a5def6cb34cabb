import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import nn
from loka_jax.models import Dcnv2
from loka_jax.nn import OVERWRITE_WITH_GRADIENT
from loka_jax.ops import cross, crossed_stack
from loka_jax.probe.site import ProbeConfig
from tests import support


@pytest.mark.parametrize(
    "a, b, padded",
    # Up to a multiple of 64 where at most an eighth is zeros, else of 16.
    [(3, 13, 16), (1, 16, 32), (0, 31, 32), (13, 43, 64), (13, 42, 64), (13, 34, 48)]
    + [(16, 351, 384), (13, 416, 448), (0, 64, 64), (0, 160, 160)],
)
def test_features_are_joined_and_padded_with_zeros(a, b, padded):
    first, second = support.normal(3, a), support.normal(3, b, seed=1)
    y = nn.join_features(first if a else None, second)
    zeros = jnp.zeros((3, padded - a - b))
    chex.assert_trees_all_equal(y, jnp.concatenate([first, second, zeros], axis=1))


def test_gradients_of_joined_features_are_their_own():
    first, second = support.normal(3, 5), support.normal(3, 8, seed=1)
    g = support.normal(3, 16, seed=2)
    _, pull = jax.vjp(nn.join_features, first, second)
    chex.assert_trees_all_equal(pull(g), (g[:, :5], g[:, 5:13]))


@pytest.mark.parametrize(
    "rank, x, said",
    [
        (None, jnp.ones((4, 3, 16)), r"takes \[B, k\], not \(4, 3, 16\): reshape"),
        (None, jnp.ones(16), r"takes \[B, k\], not \(16,\): reshape"),
        (0, jnp.ones((4, 16)), "rank=0 of a CrossNet must be at least 1"),
        (-1, jnp.ones((4, 16)), "rank=-1 of a CrossNet must be at least 1"),
    ],
)
def test_a_cross_net_refuses_other_features_and_ranks(
    rank, x, said, without_type_checks
):
    with pytest.raises(ValueError, match=said):
        nn.CrossNet(2, rank=rank, recipe="f32").init(jax.random.key(0), x)


@pytest.mark.parametrize("rank", [None, 4])
def test_cross_net_follows_the_equation_of_dcn_v2(rank):
    module = nn.CrossNet(3, rank=rank, recipe="f32")
    x0 = support.normal(5, 16)
    variables = module.init(jax.random.key(0), x0)
    params = jax.tree.map(
        lambda p: np.asarray(support.normal(*p.shape, seed=3), np.float64) / 4,
        variables["params"],
    )
    x = first = np.asarray(x0, np.float64)
    for i in range(3):
        hidden = x if rank is None else x @ params[f"v_{i}"]["kernel"]
        u = params[f"u_{i}"]
        x = first * (hidden @ u["kernel"] + u["bias"]) + x
    params = jax.tree.map(jnp.float32, params)
    y = module.apply({"params": params}, x0)
    chex.assert_trees_all_close(y, x.astype(np.float32), rtol=1e-4, atol=1e-4)


DELAYED = "fp8_tensorwise_delayed"


def _trained(module, variables, x0):
    """Returns the loss of a model, and the gradients of its variables."""

    def loss(variables):
        return jnp.mean(module.apply(variables, x0).astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss)(variables)


def _calls(monkeypatch, module=cross, name="cross_network"):
    """Returns a list that has the arguments of each call of an operation."""
    calls, run = [], getattr(module, name)

    def counted(*args, **kwargs):
        calls.append(args)
        return run(*args, **kwargs)

    monkeypatch.setattr(module, name, counted)
    return calls


@pytest.mark.parametrize("rank, use_bias", [(32, True), (None, False)])
def test_a_fused_cross_net_whose_scales_are_set_runs_as_one_operation(
    rank, use_bias, monkeypatch
):
    first = nn.CrossNet(2, rank=rank, use_bias=use_bias, recipe=DELAYED)
    x0 = support.normal(32, 64, dtype=jnp.bfloat16)
    variables = first.init(jax.random.key(0), x0)
    _, grads = _trained(first, variables, x0)
    states = grads[OVERWRITE_WITH_GRADIENT]
    variables = {**variables, OVERWRITE_WITH_GRADIENT: states}
    by_layers = first.clone(recipe=f"{DELAYED}:initialized")
    fused = by_layers.clone(fused=True)
    chex.assert_trees_all_equal_shapes(fused.init(jax.random.key(0), x0), variables)

    calls = _calls(monkeypatch)
    theirs = _trained(by_layers, variables, x0)
    assert not calls
    ours = _trained(fused, variables, x0)
    assert len(calls) == 1
    chex.assert_trees_all_equal_structs(ours, theirs)
    for x, y in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        # Independent roundings to E4M3, whose error is 2.6e-2: in each layer six of
        # ours (x, h, z; u, dh, d) and four of theirs.
        limit = (2 * (6 + 4)) ** 0.5 * 2.6e-2
        assert np.linalg.norm(x - y) <= limit * np.linalg.norm(y)
    with nn.probing(ProbeConfig()):
        fused.apply(fused.init(jax.random.key(0), x0), x0)
    assert len(calls) == 1
    sites = [[site.path for site in nn.list_sites(m, x0)] for m in (fused, by_layers)]
    assert sites[0] == sites[1]


@pytest.mark.parametrize(
    "recipe, implementation",
    [
        (DELAYED, None),  # its scales are not set
        ("fp8_rowwise", None),
        ("bf16", None),
        (f"{DELAYED}:initialized", "xla"),
    ],
)
def test_layers_of_a_fused_cross_net_that_is_not_served_run_one_by_one(
    recipe, implementation, monkeypatch
):
    by_layers = nn.CrossNet(2, recipe=recipe, implementation=implementation)
    x0 = support.normal(32, 64, dtype=jnp.bfloat16)
    variables = by_layers.init(jax.random.key(0), x0)
    calls = _calls(monkeypatch)
    ours = by_layers.clone(fused=True).apply(variables, x0)
    assert not calls
    chex.assert_trees_all_equal(ours, by_layers.apply(variables, x0))


# Its deep network, which reads the same features, is a part of the operation if it can.
@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("norm, is_beside", [("none", True), ("batch", False)])
def test_dcnv2_fuses_its_cross_network_if_asked(is_fused, norm, is_beside, monkeypatch):
    recipe = f"{DELAYED}:initialized"
    model = Dcnv2(recipe=recipe, num_cross_layers=2, deep_mlp=(16,), norm=norm)
    features = support.normal(32, 16), support.normal(32, 3, 16, seed=1)
    alone = _calls(monkeypatch)
    beside = _calls(monkeypatch, crossed_stack, "crossed_beside")
    fused = model.clone(fused_wide=is_fused)
    jax.eval_shape(fused.init, jax.random.key(0), *features)
    assert len(beside) == (is_fused and is_beside)
    assert len(alone) == (is_fused and not is_beside)


def test_dcnv2_with_both_networks_in_one_operation_computes_the_same(monkeypatch):
    model = Dcnv2(recipe=DELAYED, num_cross_layers=2, deep_mlp=(32, 16))
    # 13 + 35 features, and zeros.
    features = support.normal(32, 13), support.normal(32, 7, 5, seed=1)
    variables = model.init(jax.random.key(0), *features)

    def results(model, variables):
        def loss(variables, *features):
            # Far from the logits: the gradient of the bias is no small difference.
            return jnp.mean((model.apply(variables, *features) - 9) ** 2)

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(variables, *features)

    _, (grads, *_) = results(model, variables)
    states = grads[OVERWRITE_WITH_GRADIENT]
    variables = {**variables, OVERWRITE_WITH_GRADIENT: states}
    by_layers = model.clone(recipe=f"{DELAYED}:initialized")
    theirs = results(by_layers, variables)
    calls = _calls(monkeypatch, crossed_stack, "crossed_beside")
    ours = results(by_layers.clone(fused_wide=True), variables)
    assert len(calls) == 1
    chex.assert_trees_all_equal_structs(ours, theirs)
    for x, y in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        # As many independent roundings to E4M3 as in a cross network by itself, and
        # four of each layer beside it.
        limit = (2 * (6 + 4) + 2 * (4 + 4)) ** 0.5 * 2.6e-2
        assert np.linalg.norm(x - y) <= limit * np.linalg.norm(y)


def test_a_head_of_several_features_is_no_part_of_the_operation():
    beside = nn.CrossedBeside(nn.Crossed((), (), (), ()), (), (), ())
    with pytest.raises(ValueError, match="one feature, not 2"):
        nn.CrossedHead(2).init(jax.random.key(0), beside)


def test_gradients_of_one_operation_over_two_devices_are_those_of_one(monkeypatch):
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    model = Dcnv2(recipe=DELAYED, num_cross_layers=2, deep_mlp=(32, 16))
    features = support.normal(64, 13), support.normal(64, 7, 5, seed=1)
    variables = model.init(jax.random.key(0), *features)

    def gradients(model, variables, *features):
        def loss(variables, *features):
            return jnp.sum(model.apply(variables, *features) ** 2)

        return jax.grad(loss, argnums=(0, 1, 2))(variables, *features)

    states = gradients(model, variables, *features)[0][OVERWRITE_WITH_GRADIENT]
    fused = model.clone(recipe=f"{DELAYED}:initialized", fused_wide=True)

    def run(params, *features):
        variables = {"params": params, OVERWRITE_WITH_GRADIENT: states}
        of_params, *of_features = gradients(fused, variables, *features)
        return of_params["params"], *of_features

    calls = _calls(monkeypatch, crossed_stack, "crossed_beside")
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), axis_types=auto)
    rows = jax.P("data")
    specs = dict(in_specs=(jax.P(), rows, rows), out_specs=(jax.P(), rows, rows))
    spread = jax.jit(jax.shard_map(run, mesh=mesh, **specs))
    ours, theirs = (f(variables["params"], *features) for f in (spread, jax.jit(run)))
    assert len(calls) == 2
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-4)
