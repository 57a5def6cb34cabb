"""Monitors of divergence against NumPy in float64, and what models show of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from loka_jax import fp8, jagged, nn
from loka_jax.nn import PROBE
from loka_jax.probe import monitors
from loka_jax.probe.monitors import FIELDS
from loka_jax.probe.operands import operands_of
from loka_jax.probe.site import ErrorsAlone, errors_of
from tests.support import E4M3

M, K, N = 40, 24, 8  # rows, half of them on each of two devices
SCALE = 2.0**-6  # stored, of lhs
OBSERVER = ErrorsAlone(recipes=())
close = functools.partial(np.testing.assert_allclose, rtol=1e-5)


def kurtosis(x):
    x = np.float64(x)[np.any(x != 0, axis=1)]
    rows = np.mean(x**4, axis=1) / np.mean(x**2, axis=1) ** 2
    return np.mean(rows), np.max(rows)


def rms(x):
    return np.sqrt(np.mean(np.float64(x) ** 2))


def operands():
    """Returns operands with outliers, rows of zeros, and gradients that are small."""
    rng = np.random.default_rng(0)
    lhs, rhs, g = (rng.standard_normal(s) for s in ((M, K), (K, N), (M, N)))
    lhs[3], lhs[7, 2], lhs[8, :4] = 0, 90.0, 1e-6
    g = 1e-15 * g * np.logspace(-9, 0, M)[:, None]
    return [np.float32(x) for x in (lhs, rhs, g)]


@jax.jit
def of_two_devices(lhs, rhs, g):
    @functools.partial(jax.vmap, axis_name="data", out_axes=None)
    def seen(lhs, g):
        told = operands_of(lhs, rhs, g, (SCALE, None, None), ("data",))
        return monitors.of_product(told, jnp.zeros(()), ("data",))

    return seen(*(x.reshape(2, M // 2, -1) for x in (lhs, g)))


def test_monitors_of_a_product_are_those_of_all_rows_on_all_devices():
    lhs, rhs, g = operands()
    found = monitors.read(np.asarray(of_two_devices(lhs, rhs, g)))
    for name, x in (("lhs", lhs), ("g", g)):
        close((found[f"{name}_kurtosis"], found[f"{name}_worst_kurtosis"]), kurtosis(x))
    assert found["lhs_worst_kurtosis"] > K / 2 > found["lhs_kurtosis"]
    close(found["out_rms"], rms(np.float64(lhs) @ rhs))
    scales = SCALE, float(fp8.compute_scale_inv(np.abs(g).max(), E4M3))
    for name, x, scale_inv in zip(("lhs", "g"), (lhs, g), scales, strict=True):
        data = np.float32(fp8.cast(jnp.asarray(x), jnp.float32(scale_inv), E4M3).data)
        zeros = np.mean((data == 0) & (x != 0))
        clipped = np.mean(np.abs(np.float64(x)) > scale_inv * fp8.fp8_max(E4M3))
        close((found[f"{name}_zeros"], found[f"{name}_saturated"]), (zeros, clipped))
        assert zeros > 0 and (clipped > 0) == (name == "lhs")
    assert "largest_logit" not in found and "growth" not in found  # of one step


def test_of_many_rows_some_are_seen_others_at_each_step():
    rows = normal(3072, 8)
    rows[::3] = np.eye(8, dtype=np.float32)[0]
    seen = jax.jit(monitors.of_product)
    told = operands_of(rows, np.ones((8, 2), np.float32), rows)
    first, later = (monitors.read(np.asarray(seen(told, x))) for x in (0.0, 0.5))
    assert first["lhs_kurtosis"] == first["g_kurtosis"] == 8
    close(later["lhs_kurtosis"], kurtosis(rows[1::3])[0])


def test_what_is_not_finite_is_seen():
    lhs, rhs, g = operands()
    lhs[2, 1], g[5, 0] = np.nan, np.inf
    found = monitors.read(np.asarray(of_two_devices(lhs, rhs, g)))
    for name in ("lhs_kurtosis", "lhs_worst_kurtosis", "g_kurtosis", "out_rms"):
        assert not np.isfinite(found[name]), name


def test_steps_are_kept_and_several_uses_of_a_site_are_their_mean():
    rows = np.arange(1.0, 5.0)

    def of_a_step(value):
        return monitors.of_attention(jnp.full(3, value), jnp.float32(value))

    of_a_step, merge = map(jax.jit, (of_a_step, monitors.merge))
    seen = monitors.empty_monitors()
    for value in rows:
        seen = merge(seen, of_a_step(value) + of_a_step(2 * value))
    seen = merge(seen, monitors.empty_monitors())  # nothing was observed
    seen = merge(seen, of_a_step(np.nan))  # a step that changes nothing
    sizes = seen[:, FIELDS.index("out_rms")]
    assert len(sizes) == monitors.OBSERVATIONS and not np.any(sizes[:-4])
    close(sizes[-4:], 1.5 * rows)
    found = monitors.read(np.asarray(seen))
    assert {*found} == {"out_rms", "largest_logit", "growth"}
    close(found["growth"], np.polyfit(range(4), np.log(rows), 1)[0])


def test_growth_is_the_slope_of_logarithms_without_what_was_not_seen():
    sizes = np.exp(0.25 * np.arange(9.0))
    sizes[[0, 3, 5]] = 0.0, np.nan, np.inf
    close(monitors.growth_of(sizes), 0.25)
    assert np.isnan(monitors.growth_of(np.float64([0, 1])))


class Attention(linen.Module):
    """Attentions of both kinds on the columns of a product."""

    @linen.compact
    def __call__(self, x):
        x = nn.SelfAttention(2, recipe="f32", name="all")(x[:, None])[:, 0]
        q, k, v = (x.reshape(-1, 2, 8) * (1 + i) for i in range(3))
        visible = jagged.visibility(jnp.array((0, 8)), 8, jagged.CAUSAL)
        return nn.attend(q, k, v, visible, length=4, recipe="f32")


def shown(model, x):
    """Returns a model's parameters and output, and what monitors show of its sites."""

    @jax.jit
    def run(x):
        with nn.probing(OBSERVER):
            variables = model.init(jax.random.key(0), x)

            def loss(stats):
                out = model.apply(variables | {PROBE: stats}, x)
                return jnp.sum(out**2), out

            stats, out = jax.grad(loss, has_aux=True)(variables[PROBE])
        stats = nn.merge_stats(variables[PROBE], stats, OBSERVER)
        return variables["params"], out, stats

    params, out, stats = run(x)
    seen = {path: errors_of(x).monitors for path, x in nn.by_path(stats).items()}
    return params, out, {x: monitors.read(np.asarray(own)) for x, own in seen.items()}


def normal(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def test_a_linen_model_shows_its_sites_and_attentions():
    x = normal(8, 16)
    params, out, seen = shown(Attention(), x)
    assert {*seen} == {"all", "all/qkv", "all/out", "scores"}
    close(seen["all/qkv"]["lhs_kurtosis"], kurtosis(x)[0])
    kernel = params["all"]["qkv"]["kernel"]
    close(seen["all/qkv"]["out_rms"], rms(np.float64(x) @ np.float64(kernel)))
    # Of the one vector that each example has.
    q, k, _ = np.split(np.float64(x) @ np.float64(kernel), 3, axis=1)
    scores = np.sum((q * k).reshape(8, 2, 8), axis=2) / np.sqrt(8)
    close(seen["all"]["largest_logit"], np.abs(scores).max(), rtol=1e-4)
    close(seen["scores"]["out_rms"], rms(out))
    assert "lhs_kurtosis" not in seen["all"]


def test_a_bound_of_logits_is_above_them_and_met_by_rows_alike():
    q, k = normal(8, 2, 4), 3 * normal(8, 2, 4, seed=2)
    largest = np.max(np.abs(np.einsum("ihd,jhd->hij", q, k))) / 2
    bound = float(monitors.bound_of_logits(q, k, 0.5))
    assert largest <= bound < 4 * largest
    squares = np.sum(np.float64(q) ** 2, axis=2)
    close(monitors.bound_of_logits(q, q, -0.5), squares.max() / 2)


def test_an_nnx_model_shows_its_sites():
    x, model = normal(16, 32), nnx.Linear(32, 16, rngs=nnx.Rngs(0))
    kernel = np.float64(model.kernel[...])
    model = nn.convert(model, recipe="f32")
    with nn.probing(OBSERVER):
        model(x)
        wrt = nnx.DiffState(0, nn.ProbeStats)
        gradient = nnx.grad(lambda m, x: jnp.sum(m(x) ** 2), argnums=wrt)
        (seen,) = jax.tree.leaves(
            gradient(model, x), is_leaf=lambda x: hasattr(x, "monitors")
        )
    found = monitors.read(np.asarray(seen.monitors))
    out = np.float64(x) @ kernel
    close(found["out_rms"], rms(out))
    close(found["g_kurtosis"], kurtosis(2 * out)[0], rtol=1e-4)
    close(found["lhs_worst_kurtosis"], kurtosis(x)[1])


@pytest.mark.parametrize("size", [0, 3])
def test_a_site_without_rows_or_with_zeros_alone_shows_no_kurtosis(size):
    zeros = jnp.zeros((size, K)), jnp.ones((K, N)), jnp.zeros((size, N))
    seen = jax.jit(lambda *x: monitors.of_product(operands_of(*x), 0.0))(*zeros)
    assert not monitors.read(np.asarray(seen))
