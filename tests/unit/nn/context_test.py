"""Recipes of single sites, given from outside of a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from loka_jax import nn
from loka_jax.recipe import RECIPES
from tests import support
from tests.unit.nn.probing_test import Model

INITIALIZED = "fp8_tensorwise_delayed:initialized"
PATHS = ("dense", "norm_dense", "flax/Fp8DotGeneral_0")


def _recipes(model, x):
    return {site.path: site.recipe for site in nn.list_sites(model, x)}


@pytest.mark.parametrize("path", PATHS)
def test_one_site_follows_another_recipe(path):
    x = support.normal(64, 48)
    model = Model("bf16")
    variables = model.init(jax.random.key(0), x)
    plain = model.apply(variables, x)
    with nn.overriding({path: "fp8_tensorwise"}):
        assert _recipes(model, x) == {p: "bf16" for p in PATHS} | {
            path: "fp8_tensorwise"
        }
        changed = model.apply(variables, x)
    assert 20 < support.sqnr_db(plain, changed) < 45
    with nn.overriding({path: RECIPES["bf16"]}):
        np.testing.assert_array_equal(model.apply(variables, x), plain)
    assert set(_recipes(model, x).values()) == {"bf16"}


def test_a_path_without_a_site_is_refused():
    with pytest.raises(ValueError, match="no site was called at nowhere, there"):
        with nn.overriding({"there": "bf16", "nowhere": "bf16", "dense": "bf16"}):
            _recipes(Model(), jnp.zeros((16, 48)))


def test_an_error_inside_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        with nn.overriding({"there": "bf16"}):
            1 / 0  # noqa: B018


class Own(linen.Module):
    """A model of one's own, whose recipe no attribute of that name tells."""

    precision: str

    @linen.compact
    def __call__(self, x):
        return nn.Mlp((64, 32), recipe=self.precision)(x)


def test_a_planned_model_initializes_the_scales_of_sites_deep_inside():
    x, delayed = support.normal(32, 48), "fp8_tensorwise_delayed"
    variables = Own(delayed).init(jax.random.key(0), x)
    plain, expected = (Own(r).apply(variables, x) for r in (delayed, INITIALIZED))
    assert jnp.any(plain != expected)
    planned = nn.Planned(Own(delayed)).with_initialized_scales()
    np.testing.assert_array_equal(planned.apply(variables, x), expected)
    for model in (planned, nn.Planned(planned)):
        sites = nn.list_sites(model, x)
        assert sites and all(site.plan.recipe.scales_initialized for site in sites)


def test_captured_operands_are_those_of_the_products():
    x, model = support.normal(40, 48), Model()
    with nn.probing(nn.Capture(max_rows=16)):
        variables = model.init(jax.random.key(0), x)

        def loss(variables):
            return jnp.sum(model.apply(variables, x) ** 2)

        seen = jax.grad(loss)(variables)[nn.PROBE]
    dense, rows = seen["dense"]["stats"], np.arange(16) * 40 // 16  # spread evenly
    np.testing.assert_array_equal(dense.lhs, x[rows])
    np.testing.assert_array_equal(dense.rhs, variables["params"]["dense"]["kernel"])
    g = 2 * model.apply({"params": variables["params"]}, x)
    last = seen["flax"]["Fp8DotGeneral_0"]["stats"]
    np.testing.assert_allclose(last.g, g[rows], rtol=1e-5)
