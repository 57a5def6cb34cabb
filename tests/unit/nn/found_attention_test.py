"""Softmax attention in programs that others wrote."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from loka_jax import nn, triton
from loka_jax.nn import run_whole
from loka_jax.ops.device import HOPPER
from tests.support.nn import rounded

B, T, H, D = 2, 128, 2, 16
Q, K, V = (rounded(B, T, H, D, seed=seed) for seed in range(3))
attention = jax.nn.dot_product_attention
SEEN = np.tri(T, dtype=bool)[None, None]
WINDOW = SEEN & ~np.tri(T, k=-9, dtype=bool)


def by_flax(q, k, v):
    return linen.dot_product_attention(q, k, v)


def causal(q, k, v):
    return linen.dot_product_attention(
        q, k, v, mask=linen.make_causal_mask(q[..., 0, 0])
    )


def with_constant(q, k, v):
    return linen.dot_product_attention(q, k, v, mask=WINDOW)


def padded(q, k, v):
    scores = jnp.einsum("bihd,bjhd->bhij", q, k) * 0.3
    scores = jnp.where(v[:, None, None, :, 0, 0] > -1, scores, -1e9)
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores), v)


def by_bias(q, k, v):
    """As Hugging Face's models."""
    seen = v[:, :, 0, 0] > -1
    low = jnp.full(seen.shape, jnp.finfo(jnp.float32).min)
    bias = jax.lax.select(seen, jnp.zeros(seen.shape), low)[:, None, None]
    return linen.dot_product_attention(q, k, v, bias=bias)


def written_out(q, k, v):
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    scores = (q @ k.swapaxes(-1, -2) / D).astype(jnp.float32)
    exp = jnp.exp(scores - scores.max(-1, keepdims=True))
    return ((exp / exp.sum(-1, keepdims=True)).astype(v.dtype) @ v).swapaxes(1, 2)


def one_head(q, k, v):
    q, k, v = q[:, :, 0], k[:, :, 0], v[:, :, 0]
    shares = jax.nn.softmax(0.5 * jnp.einsum("bic,bjc->bij", q, k))
    return jnp.einsum("bjc,bij->bic", v, shares)


def three_dims(q, k, v):
    return jax.vmap(lambda *x: jax.vmap(by_flax)(*(y[:, None] for y in x)))(
        *(x[None] for x in (q, k, v))
    )


def by_jax(q, k, v):
    return attention(q, k, v)


def by_jax_causal(q, k, v):
    return attention(q, k, v, is_causal=True)


def by_jax_masked(q, k, v):
    return attention(q, k, v, mask=WINDOW)


def one_example(q, k, v):
    return attention(q[0], k[0], v[0])


CAUSAL = [causal, by_jax_causal]
MASKED = [with_constant, padded, by_jax_masked, by_bias]
FOUND = [
    *CAUSAL,
    *MASKED,
    by_flax,
    written_out,
    one_head,
    three_dims,
    by_jax,
    one_example,
]


def attended(function, change=lambda shares: shares):
    """Attention of which a function of the scores is taken."""

    def attention(q, k, v):
        shares = function(jnp.einsum("bihd,bjhd->bhij", q, k))
        return jnp.einsum("bhij,bjhd->bihd", change(shares), v)

    return attention


@jax.jit
def _less_seen(scores, share):
    return scores - (1 - share) * 1e9


def by_position(q, k, v):
    """As T5: what is added is no mask, though some of it is far below 0."""
    bias = jnp.where(v[:, :, 0, 0] > -1, v[:, :, 0, 1], -1e9)[:, None, None]
    return linen.dot_product_attention(q, k, v, bias=bias)


def returns_shares(q, k, v):
    shares = jax.nn.softmax(jnp.einsum("bihd,bjhd->bhij", q, k))
    return jnp.einsum("bhij,bjhd->bihd", shares, v), jnp.sum(shares[:, 0])


NOT_FOUND = [
    attended(jax.nn.relu),
    attended(functools.partial(jax.nn.softmax, axis=-2)),
    attended(jax.nn.softmax, lambda x: x / 2),
    attended(jax.nn.softmax, lambda x: x.swapaxes(-1, -2)),
    attended(lambda x: jax.nn.softmax(jnp.where(SEEN, x, 0.0))),
    attended(lambda x: jax.nn.softmax(x + jnp.sum(x))),
    attended(lambda x: jax.nn.softmax(_less_seen(x, jnp.cos(x[:1, :1])))),
    attended(lambda x: jax.nn.softmax(jnp.tanh(x))),
    returns_shares,
    by_position,
]


@pytest.fixture
def served(monkeypatch):
    """Lets XLA run what cuDNN runs on a GPU; returns the masks that it was given."""
    masks = []

    def by_xla(q, k, v, *, mask, scale, is_causal, implementation):
        assert implementation == "cudnn"
        masks.append("causal" if is_causal else mask)
        mask = SEEN if is_causal else mask
        assert mask is None or mask.shape[2:] == (q.shape[1], k.shape[1])
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        scores = scale * jnp.einsum("bihd,bjhd->bhij", q, k)
        scores = scores if mask is None else jnp.where(mask, scores, -1e30)
        out = jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores), v)
        return out.astype(jnp.bfloat16)

    monkeypatch.setattr(run_whole, "local_device", lambda: HOPPER)
    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    monkeypatch.setattr(run_whole, "_why_not_by_cudnn", lambda *shapes: None)
    return masks


def model(function, parameters, q, k, v):
    """Products, and the attention of their results."""
    return function(jnp.tanh(q @ parameters["q"]), k, jnp.tanh(v @ parameters["v"]))


def runs_of(function, dtype="float32", **options):
    """Returns what runs a model's products of data, and why they are left."""

    def run(parameters, q, k, v):
        return model(function, parameters, q, k, v)

    parameters = {name: jnp.ones((D, D), dtype) for name in "qv"}
    arrays = (jnp.asarray(x, dtype) for x in (Q, K, V))
    sites = nn.list_sites(
        nn.convert(run, recipe="bf16", **options), parameters, *arrays
    )
    sites = [site for site in sites if site.path not in ("q", "v")]
    return [site.runs_by for site in sites], [site.left for site in sites]


@pytest.mark.parametrize("function", FOUND)
def test_attention_computes_what_it_did(served, function):
    run = functools.partial(model, function)
    parameters = {name: rounded(D, D, seed=i, scale=0.3) for i, name in enumerate("qv")}

    def of(f):
        loss = lambda p, *x: jnp.mean(f(p, *x).astype(jnp.float32) ** 2)  # noqa: E731
        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3))

    def call(parameters, *x):
        return run(parameters, *x)

    models = call, nn.convert(call, recipe="bf16")
    exact, ours = jax.jit(lambda *x: [of(f)(*x) for f in models])(parameters, Q, K, V)
    for x, y in zip(*map(jax.tree.leaves, (exact, ours)), strict=True):
        assert np.linalg.norm(x - y) < 2.0**-6 * np.linalg.norm(x)
    (mask,) = served
    assert isinstance(mask, str) == (function in CAUSAL)
    assert (mask is not None) == (function in (*CAUSAL, *MASKED))
    assert runs_of(function) == (["cudnn attention"] * 2, [None] * 2)


@pytest.mark.parametrize("function", NOT_FOUND)
def test_what_is_no_attention_runs_as_written(served, function):
    _, left = runs_of(function)
    assert {*left} == {"a product of data and data"} and not served


def test_attention_that_cudnn_does_not_serve_says_why(served, monkeypatch):
    assert runs_of(by_flax, skip="*")[1] == ["a product of data and data"] * 2
    few = lambda q, k, v: by_flax(q[:, :32], k, v)  # noqa: E731
    assert "32 queries" in runs_of(few)[1][0]
    exactly = functools.partial(linen.dot_product_attention, precision="highest")
    assert "in precision" in runs_of(exactly)[1][0]
    with triton.left_out():
        assert "JAX exports" in runs_of(by_flax)[1][0]
    monkeypatch.undo()
    assert "no Hopper GPU" in runs_of(by_flax)[1][0]

    def missing(*operands, **options):
        raise RuntimeError("cuDNN not found.\nAnd more.")

    monkeypatch.setattr(run_whole, "local_device", lambda: HOPPER)
    monkeypatch.setattr(jax.nn, "dot_product_attention", missing)
    assert runs_of(by_flax)[1][0].endswith("attention: cuDNN not found.")
