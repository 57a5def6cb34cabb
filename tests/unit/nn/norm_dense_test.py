"""Dense, norm and activation as one module, alone and in a chain."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from loka_jax import nn
from loka_jax.nn import OVERWRITE_WITH_GRADIENT, NormDense
from tests import support
from tests.support import stand_ins

DELAYED = "fp8_tensorwise_delayed_bf16_drhs"


def init(module, *args):
    return jax.jit(module.init)(jax.random.key(0), *args)


def randomized(variables):
    """Returns the variables with every parameter moved from where it was."""
    leaves, tree = jax.tree.flatten(variables["params"])
    moved = [p + 0.2 * support.normal(*p.shape, seed=i) for i, p in enumerate(leaves)]
    return variables | {"params": jax.tree.unflatten(tree, moved)}


@pytest.fixture(params=[stand_ins.CPU, stand_ins.HOPPER], ids=["xla", "stand-ins"])
def device(request):
    """Runs a test without a Hopper GPU, and as if there were one."""
    with nn.site_context(device=request.param):
        yield request.param


class Flax(linen.Module):
    """What `NormDense` and `Mlp` compute, of Flax's layers."""

    features: tuple[int, ...]
    norm: str
    activation: str
    dtype: jnp.dtype = jnp.float32

    @linen.compact
    def __call__(self, x):
        for i, features in enumerate(self.features):
            bias = self.norm == "none"
            x = linen.Dense(
                features, use_bias=bias, dtype=self.dtype, name=f"dense_{i}"
            )(x)
            x = nn.normalize(x, self.norm, train=False, name=f"norm_{i}")
            x = nn.activation(self.activation)(x)
        return x


@pytest.mark.parametrize(
    "norm, activation",
    [("none", "relu"), ("layer", "swish"), ("rms", "gelu"), ("block", "hard_swish")],
)
def test_in_float32_a_checkpoint_of_flax_gives_what_flax_gives(norm, activation):
    x = support.normal(8, 32)
    flax = Flax((48,), norm, activation)
    params = randomized(init(flax, x)).get("params")
    layer = NormDense(
        48, recipe="f32", norm=norm, activation=activation, use_bias=norm == "none"
    )
    # The conversion that the docstring promises.
    converted = {**params["dense_0"]}
    if "norm_0" in params:
        converted["norm"] = params["norm_0"]
    chex.assert_trees_all_equal_shapes(init(layer, x)["params"], converted)
    y = layer.apply({"params": converted}, x)
    expected = flax.apply({"params": params}, x)
    chex.assert_trees_all_close(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", ["none", "layer", "rms", "block"])
def test_an_mlp_has_the_parameters_of_dense_layers_and_norms(norm):
    x = jnp.ones((8, 32))
    ours = nn.Mlp((48, 16), norm=norm, activation="swish", recipe="f32")
    flax = Flax((48, 16), norm, "swish")
    # By the same initializers, from the same keys.
    chex.assert_trees_all_equal(init(ours, x), init(flax, x))
    variables = randomized(init(flax, x))
    x = support.normal(8, 32)
    chex.assert_trees_all_close(
        ours.apply(variables, x), flax.apply(variables, x), rtol=1e-4, atol=1e-4
    )


def test_an_mlp_keeps_the_paths_of_its_scaling_states():
    variables = init(nn.Mlp((48, 16), recipe=DELAYED, norm="layer"), jnp.ones((16, 32)))
    states = variables[OVERWRITE_WITH_GRADIENT]
    assert {k: list(v) for k, v in states.items()} == {
        "dense_0": ["fp8_scaling"],
        "dense_1": ["fp8_scaling"],
    }


def test_bias_and_shift_are_different_parameters():
    params = init(NormDense(16, use_bias=True), jnp.ones((8, 32)))["params"]
    assert set(params) == {"kernel", "bias", "norm"}
    assert set(params["norm"]) == {"scale", "bias"}


def test_leading_dims_are_kept(device):
    layer, x = NormDense(16, recipe="bf16"), support.normal(2, 3, 32)
    y, variables = layer.init_with_output(jax.random.key(0), x)
    flat = layer.apply(variables, x.reshape(6, 32))
    chex.assert_trees_all_equal(y, flat.reshape(2, 3, 16))


@pytest.mark.parametrize("recipe", ["fp8_rowwise_bf16_drhs", DELAYED])
def test_a_chain_of_sites_hands_fp8_on(device, recipe):
    class Chain(linen.Module):
        out: str

        @linen.compact
        def __call__(self, x):
            x = NormDense(48, recipe=recipe, activation="swish", out=self.out)(x)
            assert isinstance(x, nn.Activations) == (self.out != "compute")
            return NormDense(32, recipe=recipe, norm="rms", name="last")(x)

    x = support.normal(64, 32)
    variables = randomized(init(Chain("compute"), x))

    gradients = jax.jit(
        lambda v, out: jax.value_and_grad(
            lambda v: jnp.sum(Chain(out).apply(v, x).astype(jnp.float32) ** 3)
        )(v),
        static_argnums=1,
    )
    loss, found = gradients(variables, "fp8")
    expected_loss, expected = gradients(variables, "compute")
    np.testing.assert_allclose(loss, expected_loss, rtol=0.1)
    for e, f in zip(
        jax.tree.leaves(expected["params"]),
        jax.tree.leaves(found["params"]),
        strict=True,
    ):
        assert support.sqnr_db(e, f) > 15


def test_an_mlp_on_a_hopper_gpu_hands_fp8_from_layer_to_layer():
    x = support.normal(65, 32)
    mlp = nn.Mlp((48, 64, 20, 16), recipe="fp8_rowwise_bf16_drhs", norm="layer")
    variables = randomized(init(mlp, x))
    expected = jax.jit(mlp.apply)(variables, x)
    with nn.site_context(device=stand_ins.HOPPER):
        first, second, third, fourth = nn.list_sites(mlp, x)
        y = jax.jit(lambda variables: mlp.apply(variables, x))(variables)
    # The first is given an array; 20 columns are not for FP8, nor what follows them.
    assert first.runs["fwd"] == "pallas fp8 e4m3 rowwise"
    assert second.runs["fwd"] == "pallas fp8 e4m3 tensorwise x rowwise"
    assert third.why_not_fused.startswith("n=20")
    assert fourth.why_not_fused.startswith("k=20")
    assert first.why_not is first.why_not_fused is None
    assert support.sqnr_db(expected, np.asarray(y, np.float64)) > 18


@pytest.mark.parametrize(
    "norm, scaling", [("layer", "tensorwise"), ("none", "rowwise")]
)
def test_a_linear_end_reads_the_fp8_that_the_layer_before_hands_on(norm, scaling):
    x = support.normal(64, 32)
    mlp = nn.Mlp((48, 64), recipe="fp8_rowwise", norm=norm, ends_linear=True)
    variables = randomized(init(mlp, x))

    def gradients(variables):
        loss = lambda v: jnp.sum(mlp.apply(v, x).astype(jnp.float32) ** 2)  # noqa: E731
        return jax.jit(jax.grad(loss))(variables)["params"]

    expected = gradients(variables)
    with nn.site_context(device=stand_ins.HOPPER):
        first, second = nn.list_sites(mlp, x)
        found = gradients(variables)
    assert (first.spec.out, second.spec.fp8_in) == ("fp8", scaling)
    assert second.runs["fwd"].startswith("xla fp8")
    for e, f in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert support.sqnr_db(e, f) > 15


def test_sites_tell_what_runs_and_why_not_a_kernel():
    mlp = nn.Mlp((48, 32), recipe="fp8_tensorwise", norm="layer")
    first, second = nn.list_sites(mlp, jnp.ones((64, 32)))
    assert first.runs["fwd"] == second.runs["fwd"] == "xla fp8 e4m3 tensorwise"
    assert first.path == "dense_0" and first.why_not_fused == "no Hopper GPU"


def test_an_lhs_in_fp8_is_described():
    mlp = nn.Mlp((48, 32), recipe="fp8_tensorwise", norm="layer")
    with nn.site_context(device=stand_ins.HOPPER):
        first, second = nn.list_sites(mlp, jnp.ones((64, 32)))
    assert first.runs["fwd"] == "pallas fp8 e4m3 tensorwise"
    assert second.runs["fwd"] == "pallas fp8 e4m3 tensorwise"


def test_dropout_drops_in_training_only():
    x = support.normal(64, 32)
    mlp = nn.Mlp((48,), recipe="f32", norm="layer", dropout_rate=0.5)
    variables = init(mlp, x)
    plain = nn.Mlp((48,), recipe="f32", norm="layer").apply(variables, x)
    chex.assert_trees_all_equal(mlp.apply(variables, x), plain)
    rngs = {"dropout": jax.random.key(1)}
    dropped = mlp.apply(variables, x, train=True, rngs=rngs)
    kept = dropped != 0
    chex.assert_trees_all_close(dropped, jnp.where(kept, 2 * plain, 0), rtol=1e-6)
    assert 0.4 < jnp.mean(kept) / jnp.mean(plain != 0) < 0.6


@pytest.mark.parametrize("dropout_rate", [0.0, 0.5])
def test_batch_norm_keeps_its_running_moments(dropout_rate):
    x = support.normal(64, 32)
    mlp = nn.Mlp((48,), recipe="bf16", norm="batch", dropout_rate=dropout_rate)
    variables = init(mlp, x)
    rngs = {"dropout": jax.random.key(1)}
    _, updated = mlp.apply(variables, x, train=True, rngs=rngs, mutable=["batch_stats"])
    before = variables["batch_stats"]["norm_0"]["mean"]
    assert np.all(np.asarray(updated["batch_stats"]["norm_0"]["mean"]) != before)


def test_remat_of_a_site_changes_nothing(device):
    x = support.normal(64, 32)

    def gradients(cls):
        layer = cls(48, recipe=DELAYED, activation="relu", name="layer")
        variables = init(layer, x)
        loss = lambda v: jnp.sum(layer.apply(v, x).astype(jnp.float32))  # noqa: E731
        return jax.jit(jax.grad(loss))(variables)

    found, expected = gradients(linen.remat(NormDense)), gradients(NormDense)
    chex.assert_trees_all_close(found, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_rowwise_bf16_drhs"])
@pytest.mark.parametrize("norm", ["none", "layer", "batch"])
def test_an_mlp_without_biases_is_one_whose_biases_are_zero(device, norm, recipe):
    x = support.normal(64, 32)

    def value_and_gradients(use_bias):
        mlp = nn.Mlp((48, 32), recipe=recipe, norm=norm, use_bias=use_bias)
        variables = init(mlp, x)
        loss = lambda v: jnp.sum(mlp.apply(v, x).astype(jnp.float32) ** 2)  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))(variables)

    def kept(path):
        return path[-1].key != "bias"

    loss, gradients = value_and_gradients(False)
    expected_loss, expected = value_and_gradients(True)
    assert loss == expected_loss
    with_paths = jax.tree_util.tree_leaves_with_path
    found = {jax.tree_util.keystr(path): g for path, g in with_paths(gradients)}
    leaves = with_paths(expected)
    wanted = {jax.tree_util.keystr(path): g for path, g in leaves if kept(path)}
    assert len(wanted) < len(leaves)
    chex.assert_trees_all_equal(found, wanted)


def test_a_norm_dense_without_a_shift_has_no_parameter_for_it():
    params = init(NormDense(16, norm_bias=False), jnp.ones((8, 32)))["params"]
    assert set(params["norm"]) == {"scale"}


@pytest.mark.parametrize("norm", ["none", "layer", "batch"])
def test_an_mlp_can_end_linear(device, norm):
    x = support.normal(64, 32)
    mlp = nn.Mlp((48, 16), recipe="bf16", norm=norm, ends_linear=True)
    variables = randomized(init(mlp, x))
    assert "norm_1" not in variables["params"]
    hidden = nn.Mlp((48,), recipe="bf16", norm=norm).apply(variables, x)
    last = nn.Dense(16, recipe="bf16")
    expected = last.apply({"params": variables["params"]["dense_1"]}, hidden)
    y = mlp.apply(variables, x)
    chex.assert_trees_all_close(y, expected, rtol=2**-7, atol=2**-7)
