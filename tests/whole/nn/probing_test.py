"""What Probe sees of the sites of Flax modules, and what the sites do meanwhile."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from loka_jax import maxima, nn
from loka_jax.nn import PROBE, ProbeConfig
from tests.support.nn import (
    DELAYED,
    FACTORS,
    initialized,
    record_taps,
    rounded,
    stored_table,
)
from tests.support.recipes import recipe_of

ROWS, K, N = 40, 16, 8
CONFIG = ProbeConfig(max_rows=16)
LOOKED_AT = np.arange(16) * ROWS // 16  # spread evenly


class Model(linen.Module):
    recipe: str = "f32"

    @linen.compact
    def __call__(self, x):
        x = nn.Dense(32, recipe=self.recipe, name="dense")(x)
        options = dict(norm="none", activation="swish", name="norm_dense")
        x = nn.NormDense(48, recipe=self.recipe, **options)(x)
        product = functools.partial(nn.Fp8DotGeneral, recipe=self.recipe)
        return linen.Dense(16, dtype=x.dtype, dot_general_cls=product, name="flax")(x)


def seen(module, monkeypatch, x, table=None):
    """Returns what Probe is shown of a model's sites."""
    taps = record_taps(monkeypatch)
    with nn.probing(ProbeConfig()):
        variables = initialized(module, x, table=table)
    taps.clear()

    @jax.jit
    def run(variables, x):
        with nn.probing(ProbeConfig()):
            module.apply(variables, x)
        return [*taps]

    return run(variables, x)


def test_probe_is_shown_each_product_without_what_follows_it(monkeypatch):
    found = seen(Model(), monkeypatch, rounded(ROWS, 64))
    assert len(found) == 3
    for out, lhs, rhs, scales in found:
        np.testing.assert_allclose(out, lhs @ rhs, rtol=1e-4, atol=1e-4)
        assert scales == (None, None, None)


@pytest.mark.parametrize(
    "recipe, expected",
    [
        # Nothing is stored of an operand without an amax, unless that is promised.
        (DELAYED, (FACTORS[0], 0, FACTORS[2])),
        (
            recipe_of(f"{DELAYED}:initialized"),
            (FACTORS[0], maxima.SMALLEST, FACTORS[2]),
        ),
    ],
)
def test_probe_is_shown_the_factors_that_operands_are_cast_with(
    recipe, expected, monkeypatch
):
    table = stored_table()
    table[1] = 0
    found = seen(Model(recipe), monkeypatch, rounded(ROWS, 64), table)
    for *_, scales in found:
        np.testing.assert_array_equal(np.stack(scales), expected)


def _loss(variables, x, module):
    return jnp.sum(module.apply(variables, x).astype(jnp.float32) ** 2)


@pytest.fixture(scope="module")
def step():
    """Returns a layer's variables, and a step that returns gradients and statistics."""
    layer = nn.Dense(N, recipe="f32")
    with nn.probing(CONFIG):
        variables = initialized(layer, np.zeros((ROWS, K), np.float32))

    @jax.jit
    def run(variables, x):
        params = {"params": variables["params"]}
        plain = jax.value_and_grad(_loss)(params, x, layer)
        with nn.probing(CONFIG):
            loss, grads = jax.value_and_grad(_loss)(variables, x, layer)
        stats = grads.pop(PROBE)
        merged = nn.merge_stats(variables[PROBE], stats, CONFIG)
        return plain, (loss, grads), merged

    return variables, run


def test_statistics_are_those_of_the_rows_that_are_looked_at(step):
    variables, run = step
    batches = [rounded(ROWS, K, seed=i) + i for i in range(2)]
    for x in batches:
        plain, observed, stats = run(variables, x)
        chex.assert_trees_all_close(observed, plain, rtol=1e-5, atol=1e-5)
        variables = variables | {PROBE: stats}
    seen, params = nn.by_path(variables[PROBE])[""], variables["params"]
    rows = np.concatenate([x[LOOKED_AT] for x in batches]).astype(np.float64)
    assert seen.lhs.moments.count == len(rows)
    np.testing.assert_allclose(seen.lhs.moments.mean, rows.mean(0), atol=1e-5)
    covariance = np.cov(rows, rowvar=False)
    np.testing.assert_allclose(seen.lhs.moments.covariance[0], covariance, atol=1e-4)
    np.testing.assert_allclose(seen.rhs.normal.mean, params["kernel"], rtol=1e-4)
    g = 2 * (rows @ params["kernel"].astype(np.float64) + params["bias"])
    np.testing.assert_allclose(seen.g.moments.mean, g.mean(0), rtol=1e-4, atol=1e-4)


class Stacked(linen.Module):
    """Layers whose parameters a scan stacks, each of them two by vmap."""

    @linen.compact
    def __call__(self, x):
        class Block(linen.Module):
            @linen.compact
            def __call__(self, x):
                return jnp.tanh(linen.Dense(K, name="dense")(x))

        class Step(linen.Module):
            @linen.compact
            def __call__(self, x, _):
                y = linen.vmap(Block, **axes)(name="two")(jnp.stack([x, x + 1]))
                return jnp.mean(y, axis=0), None

        axes = dict(variable_axes={"params": 0}, split_rngs={"params": True})
        return linen.scan(Step, length=3, **axes)(name="steps")(x, None)[0]


def test_statistics_of_stacked_layers_are_those_of_each():
    model = nn.convert(Stacked(), recipe="f32")
    with nn.probing(CONFIG):
        variables = initialized(model, np.zeros((ROWS, K), np.float32))
    batches = [rounded(ROWS, K, seed=i) + i for i in range(2)]

    @jax.jit
    def run(variables, x):
        with nn.probing(CONFIG):
            stats = jax.grad(_loss)(variables, x, model)[PROBE]
        return nn.merge_stats(variables[PROBE], stats, CONFIG)

    for x in batches:
        variables = variables | {PROBE: run(variables, x)}
    (seen,) = nn.by_path(variables[PROBE]).values()
    assert seen.lhs.moments.count.tolist() == [[2 * len(LOOKED_AT)] * 2] * 3
    dense = variables["params"]["steps"]["two"]["dense"]
    rows = np.concatenate([x[LOOKED_AT] for x in batches])
    for i in range(3):
        each = np.stack([rows, rows + 1])
        for j, own in enumerate(each):
            layer = jax.tree.map(lambda x, place=(i, j): x[place], seen)
            moments, kernel = layer.lhs.moments, dense["kernel"][i, j]
            np.testing.assert_allclose(moments.mean, own.mean(0), atol=1e-5)
            covariance = np.cov(own, rowvar=False)
            np.testing.assert_allclose(moments.covariance[0], covariance, atol=1e-4)
            np.testing.assert_allclose(layer.rhs.normal.mean, kernel, rtol=1e-4)
        outs = np.tanh(each @ dense["kernel"][i] + dense["bias"][i][:, None])
        rows = outs.mean(0)


def test_a_batch_that_is_not_finite_adds_nothing(step):
    variables, run = step
    x = rounded(ROWS, K)
    before = run(variables, x)[2]
    bad = x.copy()
    bad[LOOKED_AT[3], 4] = np.inf
    after = run(variables | {PROBE: before}, bad)[2]
    old, new = (nn.by_path(stats)[""] for stats in (before, after))
    chex.assert_trees_all_equal((new.lhs, new.g), (old.lhs, old.g))
    chex.assert_tree_all_finite(after)


def test_captured_operands_are_those_of_the_products():
    x, model = rounded(ROWS, 64), Model()
    with nn.probing(nn.Capture(max_rows=16)):
        variables = initialized(model, x)
        loss = jax.jit(jax.grad(functools.partial(_loss, module=model)))
        seen = nn.by_path(loss(variables, x)[PROBE])
    assert list(seen) == ["dense", "flax/Fp8DotGeneral_0", "norm_dense"]
    params = [variables["params"][name] for name in ("dense", "norm_dense", "flax")]

    @jax.jit
    def operands(params, x):
        dense, norm_dense, flax = params
        a = x @ dense["kernel"] + dense["bias"][None]

        def rest(z):
            b = jax.nn.swish(z)
            y = b @ flax["kernel"] + flax["bias"][None]
            return jnp.sum(y**2), (b, y)

        g, (b, y) = jax.grad(rest, has_aux=True)(a @ norm_dense["kernel"])
        return (x, g @ norm_dense["kernel"].T), (a, g), (b, 2 * y)

    paths = "dense", "norm_dense", "flax/Fp8DotGeneral_0"
    expected = operands(params, x)
    for path, layer, (lhs, g) in zip(paths, params, expected, strict=True):
        kept = seen[path].operands
        np.testing.assert_array_equal(kept.rhs, layer["kernel"])
        for found, rows in ((kept.lhs, lhs), (kept.g, g)):
            np.testing.assert_allclose(found, rows[LOOKED_AT], rtol=1e-3, atol=1e-3)
    assert set(initialized(model, x)) == {"params"}  # without Probe no statistics
