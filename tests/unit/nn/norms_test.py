"""Norms and activations by name against numpy, with random parameters."""

import re
from typing import get_args

import chex
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import linen

from loka_jax import nn
from tests import support
from tests.support.nn import initialized, normalized, rms_by_blocks


@pytest.mark.parametrize(
    "shape, options",
    [((4, 700), {}), ((3, 100), {}), ((2, 3, 112), {"block": 32, "epsilon": 0.5})],
)
def test_block_norm_scales_every_block_to_unit_mean_square(shape, options):
    module = nn.BlockNorm(**options)
    x = support.normal(*shape) * 10.0 ** np.array(support.normal(*shape, seed=1))
    assert not initialized(module, x)
    y = jax.jit(module.apply)({}, x)
    chex.assert_trees_all_close(y, rms_by_blocks(x, **options), rtol=1e-5)


class Normalized(linen.Module):
    norm: str
    train: bool = False

    @linen.compact
    def __call__(self, x):
        return nn.normalize(x, self.norm, train=self.train, name="norm")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("norm", ["none", "rms", "tanh"])
def test_queries_and_keys_are_bounded_head_by_head(norm, dtype):
    x = (9 * support.normal(6, 2, 8) + 1).astype(dtype)
    module, exact = nn.QkNorm(norm), np.asarray(x, np.float64)
    variables = {"params": {"alpha": jnp.float32(0.3)}} if norm == "tanh" else {}
    rms = np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-6)
    expected = {"none": exact, "rms": exact / rms, "tanh": np.tanh(0.3 * exact)}
    found = jax.jit(module.apply)(variables, x)
    assert found.dtype == dtype
    eps = float(jnp.finfo(dtype).eps)
    found = np.asarray(found, np.float64)
    np.testing.assert_allclose(found, expected[norm], rtol=8 * eps)


def test_bounds_start_at_their_gains():
    class Branch(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = nn.QkNorm("tanh", name="q_norm")(x)
            return nn.normalize(x, "rms", train=False, gain=0.3, name="norm")

    params = Branch().init(jax.random.key(0), jnp.ones((2, 4)))["params"]
    gain = {"norm": {"scale": np.full(4, 0.3, np.float32)}}
    chex.assert_trees_all_equal(params, gain | {"q_norm": {"alpha": np.float32(0.5)}})


def test_an_unknown_bound_is_refused():
    with pytest.raises(ValueError, match="unknown qk_norm 'l2': use none, rms, tanh"):
        nn.QkNorm("l2").init(jax.random.key(0), jnp.ones((2, 4)))


BOTH = ["bias", "scale"]
NAMES = {"none": [], "layer": BOTH, "rms": ["scale"], "block": [], "batch": BOTH}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("norm", NAMES)
def test_norms_by_name(norm, dtype):
    x = (0.01 * support.normal(24, 272) + 0.002).astype(dtype)  # epsilon counts
    module = Normalized(norm, train=True)
    variables = initialized(module, x)
    params = variables.get("params", {}).get("norm", {})
    assert sorted(params) == NAMES[norm]
    y, _ = jax.jit(lambda v, x: module.apply(v, x, mutable=["batch_stats"]))(
        variables, x
    )
    assert y.dtype == dtype
    expected = normalized(np.asarray(x).astype(np.float64), norm, params)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        np.asarray(y, np.float64), expected, rtol=2 * eps, atol=10 * max(eps, 1e-6)
    )


def test_batch_norm_keeps_running_moments_for_evaluation():
    x = 3 * np.array(support.normal(24, 8)) + 1
    module = Normalized("batch")
    variables = initialized(module, x)
    old, params = variables["batch_stats"]["norm"], variables["params"]["norm"]

    @jax.jit
    def run(variables, x):
        train = module.clone(train=True)
        updated = train.apply(variables, x, mutable=["batch_stats"])[1]
        return module.apply(variables, x), updated["batch_stats"]["norm"]

    y, new = run(variables, x)
    expected = (x - old["mean"]) / np.sqrt(old["var"] + 1e-5)
    expected = expected * params["scale"] + params["bias"]
    chex.assert_trees_all_close(y, expected, rtol=1e-4, atol=1e-5)
    for name, of_batch in (("mean", x.mean(0)), ("var", x.var(0))):
        kept = 0.9 * old[name] + 0.1 * of_batch
        chex.assert_trees_all_close(new[name], kept, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "module, attribute, choices",
    [
        (nn.Mlp((32,)), "norm", "none, layer, rms, block, batch"),
        (nn.Mlp((32,)), "activation", ", ".join(get_args(nn.ActivationName))),
        (nn.Mlp((32,)), "implementation", "xla, pallas, triton, group, None"),
        (nn.NormDense(32), "norm", "none, layer, rms, block"),
        (nn.NormDense(32), "out", "compute, fp8, both"),
        (nn.CrossNet(32), "implementation", "xla, group, None"),
    ],
    ids=range(6),
)
def test_an_unknown_attribute_of_a_module_is_refused(
    module, attribute, choices, monkeypatch
):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # refuses first
    said = f"unknown {attribute} 'other': use {choices}."
    with pytest.raises(ValueError, match=re.escape(said)):
        initialized(module.clone(**{attribute: "other"}), jnp.ones((16, 32)))
