"""What Probe sees of the sites of Flax modules, inside a jitted step."""

import functools

import chex
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from loka_jax import nn
from loka_jax.nn import OVERWRITE_WITH_GRADIENT, PROBE, ProbeConfig
from loka_jax.recipe import INITIALIZED
from tests import support

CONFIG = ProbeConfig()


class Model(linen.Module):
    """A site of each kind."""

    recipe: str = "f32"
    axis_names: tuple[str, ...] = ()

    @linen.compact
    def __call__(self, x):
        """Returns one number a row."""
        dense = functools.partial(nn.Dense, recipe=self.recipe)
        x = dense(32, name="dense", axis_names=self.axis_names)(x)
        x = nn.NormDense(
            16,
            recipe=self.recipe,
            norm="layer",
            activation="swish",
            axis_names=self.axis_names,
            name="norm_dense",
        )(x)
        op = functools.partial(
            nn.Fp8DotGeneral, recipe=self.recipe, axis_names=self.axis_names
        )
        return linen.Dense(16, dtype=x.dtype, dot_general_cls=op, name="flax")(x)


def _loss(variables, x, model, weights=1.0):
    return jnp.sum(weights * model.apply(variables, x).astype(jnp.float32) ** 2)


def _init(model, x):
    with nn.probing(CONFIG):
        return model.init(jax.random.key(0), x)


@functools.partial(jax.jit, static_argnames=("model", "is_probed"))
def _gradients(variables, x, model, is_probed=True):
    if not is_probed:
        variables = {k: v for k, v in variables.items() if k != PROBE}
        return jax.value_and_grad(_loss)(variables, x, model)
    with nn.probing(CONFIG):
        return jax.value_and_grad(_loss)(variables, x, model)


def _learn(variables, batches, model):
    for x in batches:
        _, grads = _gradients(variables, x, model)
        stats = nn.merge_stats(variables[PROBE], grads[PROBE], CONFIG)
        variables = variables | {PROBE: stats}
    return variables


@pytest.mark.parametrize(
    "recipe",
    support.slow_except(
        ["f32", "fp8_tensorwise_delayed", "fp8_rowwise"], "fp8_tensorwise_delayed"
    ),
)
def test_probing_changes_nothing_else(recipe):
    model, x = Model(recipe), support.normal(64, 48)
    variables = _init(model, x)
    loss, grads = _gradients(variables, x, model)
    plain_loss, plain = _gradients(variables, x, model, is_probed=False)
    assert loss == plain_loss
    del grads[PROBE]
    chex.assert_trees_all_close(grads, plain, rtol=1e-5, atol=1e-6)
    assert PROBE not in Model(recipe).init(jax.random.key(0), x)


def test_what_is_learned_are_the_operands_of_every_product():
    model, batches = Model(), [support.normal(64, 48, seed=i) for i in range(3)]
    variables = _init(model, batches[0])
    stats = _learn(variables, batches, model)[PROBE]
    rows = np.concatenate(batches).astype(np.float64)
    lhs = stats["dense"]["stats"].lhs
    np.testing.assert_allclose(lhs.moments.mean, rows.mean(0), atol=1e-5)
    covariance = np.cov(rows, rowvar=False)
    np.testing.assert_allclose(lhs.moments.covariance[0], covariance, atol=1e-4)
    np.testing.assert_allclose(lhs.tails.amax, np.abs(rows).max(), rtol=1e-6)

    # The weight, and the gradient of a product: as a bias added to it would have it.
    params = variables["params"]
    for path, kernel in (
        ("dense", params["dense"]["kernel"]),
        ("norm_dense", params["norm_dense"]["kernel"]),
    ):
        mean = stats[path]["stats"].rhs.normal.mean
        np.testing.assert_allclose(mean, kernel, rtol=1e-4, atol=1e-6)
    g = np.concatenate(
        [2 * np.asarray(model.apply(variables, x), np.float64) for x in batches]
    )
    of_g = stats["flax"]["Fp8DotGeneral_0"]["stats"].g
    np.testing.assert_allclose(of_g.moments.mean, g.mean(0), atol=1e-4)
    np.testing.assert_allclose(
        of_g.moments.covariance[0], np.cov(g, rowvar=False), atol=1e-3
    )


@pytest.mark.slow
def test_the_gradient_of_a_product_before_its_norm():
    x, w = support.normal(40, 8), support.normal(8, 16, seed=1)
    module = nn.NormDense(16, recipe="f32", norm="layer", activation="gelu")
    variables = _init(module, x)
    params = variables["params"] | {"kernel": w}
    variables = variables | {"params": params}
    _, grads = _gradients(variables, x, module)

    def after_product(z):
        y = linen.LayerNorm().apply({"params": params["norm"]}, z)
        return jnp.sum(jax.nn.gelu(y) ** 2)

    g = jax.grad(after_product)(jnp.dot(x, w, precision="highest"))
    moments = grads[PROBE]["stats"].g.moments
    np.testing.assert_allclose(moments.mean, g.mean(0), atol=1e-3)
    np.testing.assert_allclose(
        moments.scatter[0], (g - g.mean(0)[None]).T @ (g - g.mean(0)[None]), atol=5e-2
    )


@pytest.mark.slow
def test_rows_over_devices_are_one_batch():
    model, x = Model(axis_names=("data",)), support.normal(64, 48)
    variables = _init(Model(), x)
    mesh = Mesh(np.asarray(jax.devices()[:8]), ("data",))

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    def spread(variables, x):
        with nn.probing(CONFIG):
            return jax.grad(_loss)(variables, x, model)[PROBE]

    stats = jax.jit(spread)(variables, x)
    expected = _gradients(variables, x, Model())[1][PROBE]
    chex.assert_trees_all_close(stats, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_a_batch_that_is_not_finite_adds_nothing(value):
    model, x = Model(), support.normal(64, 48)
    variables = _learn(_init(model, x), [x], model)
    bad = x.at[3, 4].set(value)
    _, grads = _gradients(variables, bad, model)
    after = nn.merge_stats(variables[PROBE], grads[PROBE], CONFIG)
    for path in ("dense", "norm_dense"):
        old, new = variables[PROBE][path]["stats"], after[path]["stats"]
        chex.assert_trees_all_equal((new.lhs, new.g), (old.lhs, old.g))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(after))


@pytest.mark.slow
def test_delayed_scales_tell_how_far_they_are_off():
    model, x = Model("fp8_tensorwise_delayed"), support.normal(64, 48)
    variables = _init(model, x)
    _, grads = _gradients(variables, x, model)
    first = grads[PROBE]["dense"]["stats"].lhs.tails.amax_ratio
    assert 0.5 <= first <= 1.0  # without a history the scale is this batch's
    state = {OVERWRITE_WITH_GRADIENT: grads[OVERWRITE_WITH_GRADIENT]}
    model = Model("fp8_tensorwise_delayed" + INITIALIZED)
    _, grads = _gradients(variables | state, 8 * x, model)
    tails = grads[PROBE]["dense"]["stats"].lhs.tails
    assert 2 < tails.amax_ratio <= 8 and tails.saturation_rate > 0


def test_few_of_many_rows_are_looked_at():
    config = ProbeConfig(max_rows=16)
    module, x = nn.Dense(16, recipe="f32"), support.normal(100, 16)
    with nn.probing(config):
        variables = module.init(jax.random.key(0), x)
        grads = jax.grad(_loss)(variables, x, module)
    moments = grads[PROBE]["stats"].lhs.moments
    np.testing.assert_allclose(moments.count, 16)
    np.testing.assert_allclose(
        moments.mean, x[np.arange(16) * 100 // 16].mean(0), atol=1e-5
    )


@pytest.mark.parametrize(
    "options, match",
    [({"max_rows": 1}, "max-rows 1 must"), ({"momentum": 1.5}, "momentum 1.5 must")],
)
def test_options_out_of_range_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        ProbeConfig(**options)


@pytest.mark.slow
def test_both_operands_of_a_batched_product_are_rows():
    class Pairs(linen.Module):
        @linen.compact
        def __call__(self, x):
            numbers = (((2,), (2,)), ((0,), (0,)))
            return nn.Fp8DotGeneral(name="pairs")(x, x, numbers)

    model, x = Pairs(), support.normal(20, 6, 16)
    x = jnp.asarray(x).reshape(20, 6, 16)
    with nn.probing(CONFIG):
        variables = model.init(jax.random.key(0), x)
        out, pull = jax.vjp(lambda v: model.apply(v, x), variables)
        seen = pull(jnp.ones_like(out))[0][PROBE]["pairs"]["stats"]
    np.testing.assert_allclose(out, jnp.einsum("bik,bjk->bij", x, x), rtol=1e-5)
    rows = np.asarray(x).reshape(120, 16)
    for operand in (seen.lhs, seen.rhs):
        np.testing.assert_allclose(operand.moments.count, 120)
        covariance = np.cov(rows, rowvar=False)
        np.testing.assert_allclose(
            operand.moments.covariance[0], covariance, rtol=1e-3, atol=1e-4
        )
    np.testing.assert_allclose(seen.g.moments.mean, np.ones(6), rtol=1e-6)
    stats = nn.merge_stats(variables[PROBE], {"pairs": {"stats": seen}}, CONFIG)
    np.testing.assert_allclose(stats["pairs"]["stats"].rhs.moments.count, 120)
