import inspect
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from loka_jax import nn
from tests import support


def rms_by_blocks(x, block, epsilon=1e-6):
    """Returns `x` with every block of the last dim at unit mean square, in float64."""
    x = np.asarray(x, np.float64)
    parts = [
        x[..., i : i + block]
        / np.sqrt(np.mean(x[..., i : i + block] ** 2, -1, keepdims=True) + epsilon)
        for i in range(0, x.shape[-1], block)
    ]
    return np.concatenate(parts, -1)


@pytest.mark.parametrize("n", [256, 512, 700, 100])
def test_block_norm_scales_every_block_to_unit_mean_square(n):
    x = support.normal(4, n) * 10.0 ** support.normal(1, n, seed=1)
    y = nn.BlockNorm().apply({}, x)
    chex.assert_trees_all_close(y, rms_by_blocks(x, 256), rtol=1e-5)


def test_block_norm_of_a_stack_of_rows():
    x = support.normal(2, 3, 96)
    y = nn.BlockNorm(block=32).apply({}, x)
    chex.assert_trees_all_close(y, rms_by_blocks(x, 32), rtol=1e-5)


def test_an_outlier_rescales_its_own_block_only():
    x = support.normal(1, 512)
    y = nn.BlockNorm().apply({}, x)
    with_outlier = nn.BlockNorm().apply({}, x.at[0, 3].set(1e4))
    chex.assert_trees_all_equal(with_outlier[:, 256:], y[:, 256:])
    assert np.abs(with_outlier[0, :256]).argmax() == 3
    assert np.median(np.abs(with_outlier[0, :256])) < 1e-2


def test_block_norm_has_no_parameters():
    assert not nn.BlockNorm().init(jax.random.key(0), jnp.ones((2, 8)))


def test_block_norm_of_zeros_is_zero():
    y = nn.BlockNorm().apply({}, jnp.zeros((2, 8)))
    chex.assert_trees_all_equal(y, jnp.zeros((2, 8)))


def test_block_norm_takes_statistics_of_bfloat16_in_float32():
    x = 300 * support.normal(4, 512, dtype=jnp.bfloat16)
    y = nn.BlockNorm().apply({}, x)
    chex.assert_type(y, jnp.bfloat16)
    expected = rms_by_blocks(x.astype(jnp.float32), 256)
    np.testing.assert_allclose(np.asarray(y, np.float32), expected, rtol=2**-8)


class Normalized(linen.Module):
    norm: str
    train: bool = False
    use_scale: bool = True

    @linen.compact
    def __call__(self, x):
        options = dict(train=self.train, use_scale=self.use_scale)
        return nn.normalize(x, self.norm, **options, name="norm")


def layer(x):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def batch(x):
    return (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "norm, reference",
    [
        ("none", lambda x: x),
        ("layer", layer),
        ("rms", lambda x: rms_by_blocks(x, 96)),
        ("block", lambda x: rms_by_blocks(x, 256)),
        ("batch", batch),
    ],
)
def test_norms_by_name(norm, reference, dtype):
    x = (3 * support.normal(64, 96) + 1).astype(dtype)
    module = Normalized(norm, train=True)
    y, variables = module.init_with_output(jax.random.key(0), x)
    assert y.dtype == dtype
    expected = reference(np.asarray(x).astype(np.float64))
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        np.asarray(y, np.float64), expected, rtol=2 * eps, atol=10 * max(eps, 1e-6)
    )
    assert set(variables.get("params", {}).get("norm", {})) == {
        "layer": {"scale", "bias"},
        "rms": {"scale"},
        "batch": {"scale", "bias"},
    }.get(norm, set())


@pytest.mark.parametrize("norm", ["layer", "rms", "batch"])
def test_a_norm_without_a_learned_scale_is_the_norm_at_its_start(norm):
    x = support.normal(64, 96)
    scaled = Normalized(norm, train=True)
    plain = scaled.clone(use_scale=False)
    y, variables = plain.init_with_output(jax.random.key(0), x)
    assert "scale" not in variables.get("params", {}).get("norm", {})
    chex.assert_trees_all_equal(y, scaled.init_with_output(jax.random.key(0), x)[0])


def test_batch_norm_keeps_running_moments_for_evaluation():
    x = 3 * support.normal(64, 8) + 1
    variables = Normalized("batch").init(jax.random.key(0), x)
    _, updated = Normalized("batch", train=True).apply(
        variables, x, mutable=["batch_stats"]
    )
    mean = updated["batch_stats"]["norm"]["mean"]
    chex.assert_trees_all_close(mean, 0.1 * x.mean(0), rtol=1e-5)
    y = Normalized("batch").apply(variables | updated, x)
    var = updated["batch_stats"]["norm"]["var"]
    expected = (x - mean[None]) / jnp.sqrt(var + 1e-5)[None]
    chex.assert_trees_all_close(y, expected, rtol=1e-4, atol=1e-5)


def test_block_norm_takes_no_rows():
    assert nn.BlockNorm(block=32).apply({}, jnp.ones((0, 96))).shape == (0, 96)


def test_an_unknown_norm_is_refused():
    # Unwrapped: in tests the type checker would refuse it first.
    unchecked = inspect.unwrap(nn.normalize)
    with pytest.raises(ValueError, match="unknown norm 'lyer': use layer"):
        unchecked(jnp.ones((2, 2)), "lyer", train=False)


@pytest.mark.parametrize(
    "module, attribute, value, choices",
    [
        (nn.Mlp, "norm", "layernorm", "none, layer, rms, block, batch"),
        (nn.Mlp, "activation", "tanh", "none, relu, swish, hard_swish, gelu"),
        (nn.Mlp, "implementation", "cuda", "xla, pallas, triton, None"),
        (nn.Mlp, "input_norm", "layer", "none, rms"),
        (nn.NormDense, "norm", "batch", "none, layer, rms, block"),
        (nn.NormDense, "activation", "tanh", "none, relu, swish, hard_swish, gelu"),
        (nn.NormDense, "out", "bf16", "compute, fp8, both"),
        (nn.NormDense, "implementation", "cuda", "xla, pallas, triton, None"),
        (nn.CrossNet, "implementation", "pallas", "xla, None"),
    ],
)
def test_an_unknown_attribute_of_a_module_is_refused(
    without_type_checks, module, attribute, value, choices
):
    size = (32,) if module is nn.Mlp else 32
    said = f"unknown {attribute} '{value}': use {choices}."
    with pytest.raises(ValueError, match=re.escape(said)):
        module(size, **{attribute: value}).init(jax.random.key(0), jnp.ones((16, 32)))


@pytest.mark.parametrize(
    "name, value",
    [("none", -1.0), ("relu", 0.0), ("hard_swish", -1 / 3), ("swish", -0.26894)],
)
def test_activations_by_name_at_minus_one(name, value):
    y = nn.activation(name)(jnp.float32([-1]))
    chex.assert_trees_all_close(y, jnp.float32([value]), atol=1e-5)
