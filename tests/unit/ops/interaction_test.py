"""`dot_features` against numpy in float64, and where it chooses Triton."""

import functools

import chex
import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from loka_jax.ops import interaction
from loka_jax.ops.interaction import dot_features
from loka_jax.triton import launch
from tests import support

# (B, F, D); of one field without a bottom vector there are no pairs.
SIZES = [(4, 1, 8), (4, 2, 8), (3, 6, 5), (5, 26, 16)]

has_bottom = pytest.mark.parametrize("has_bottom", [True, False])


def operands(batch, fields, dim, has_bottom, dtype=jnp.float32):
    bottom = support.normal(batch, dim, dtype=dtype) if has_bottom else None
    return bottom, support.normal(batch, fields, dim, seed=1, dtype=dtype)


def vectors(bottom, embeddings):
    parts = [] if bottom is None else [bottom[:, None]]
    return np.concatenate([*parts, embeddings], axis=1)


def plain(bottom, embeddings, multiple):
    """Returns the features in float64, one pair after the other."""
    z = vectors(bottom, embeddings).astype(np.float64)
    n = z.shape[1]
    pairs = [np.sum(z[:, i] * z[:, j], 1) for i in range(n) for j in range(i)]
    parts = [] if bottom is None else list(z[:, 0].T)
    features = np.array(parts + pairs).reshape(-1, len(z)).T
    return np.pad(features, ((0, 0), (0, -features.shape[1] % multiple)))


def plain_gradients(bottom, embeddings, g):
    """Returns the gradients in float64, one pair after the other."""
    z, g = vectors(bottom, embeddings).astype(np.float64), np.asarray(g, np.float64)
    dz, k = np.zeros_like(z), 0 if bottom is None else z.shape[2]
    for i in range(z.shape[1]):
        for j in range(i):
            dz[:, i] += g[:, k, None] * z[:, j]
            dz[:, j] += g[:, k, None] * z[:, i]
            k += 1
    if bottom is None:
        return None, dz
    return dz[:, 0] + g[:, : z.shape[2]], dz[:, 1:]


def assert_close(x, exact, magnitude, terms):
    """Asserts equality up to sums of `terms` products, then at most two casts."""
    cast = 2.0**-8 if x.dtype == jnp.bfloat16 else 2.0**-24
    bound = support.sum_error(terms, magnitude) + 2 * cast * magnitude
    assert np.all(np.abs(np.asarray(x, np.float64) - exact) <= bound)


def magnitudes(*args):
    return jax.tree.map(np.abs, args)


@has_bottom
@pytest.mark.parametrize("dtype, multiple", [(jnp.float32, 1), (jnp.bfloat16, 16)])
@pytest.mark.parametrize("sizes", SIZES)
def test_features_and_gradients_are_those_of_the_pairs(
    sizes, dtype, multiple, has_bottom
):
    args = operands(*sizes, has_bottom, dtype)
    run = functools.partial(dot_features, multiple=multiple)
    out, vjp = jax.jit(functools.partial(jax.vjp, run))(*args)
    exact = plain(*args, multiple)
    chex.assert_shape(out, exact.shape)
    chex.assert_type(out, dtype)
    assert_close(out, exact, plain(*magnitudes(*args), multiple), terms=sizes[2])
    g = support.normal(*out.shape, seed=2, dtype=dtype)
    gradients = jax.jit(vjp)(g)
    exact = plain_gradients(*args, g)
    bounds = plain_gradients(*magnitudes(*args, g))
    for gradient, wanted, bound in zip(gradients, exact, bounds, strict=True):
        if wanted is not None:
            chex.assert_type(gradient, dtype)
            assert_close(gradient, wanted, bound, terms=sizes[1] + 1)


@has_bottom
def test_gradients_agree_with_differences(has_bottom):
    args = operands(2, 3, 4, has_bottom)
    run = lambda *args: dot_features(*jax.tree.map(jnp.asarray, args))  # noqa: E731
    jax.test_util.check_grads(run, args, 1, modes=["rev"], rtol=1e-2)


@has_bottom
def test_bfloat16_is_rounded_as_in_operations_of_their_own(has_bottom):
    bottom, embeddings = args = operands(32, 26, 16, has_bottom, jnp.bfloat16)
    z = jnp.asarray(vectors(*args))
    gram = jnp.einsum("bnd,bmd->bnm", z, z, preferred_element_type=z.dtype)
    rows, cols = np.tril_indices(z.shape[1], -1)
    parts = ([bottom] if has_bottom else []) + [gram[:, rows, cols]]
    features = jnp.concatenate(parts, axis=1)
    out, vjp = jax.vjp(functools.partial(dot_features, multiple=1), *args)
    chex.assert_trees_all_equal(out, features)

    lead = 16 if has_bottom else 0
    g = support.normal(*out.shape, seed=2, dtype=jnp.bfloat16)
    lower = jnp.zeros_like(gram).at[:, rows, cols].set(g[:, lead:])
    symmetric = lower + lower.swapaxes(1, 2)
    dz = jnp.einsum("bnm,bmd->bnd", symmetric, z, preferred_element_type=z.dtype)
    expected = (dz[:, 0] + g[:, :lead], dz[:, 1:]) if has_bottom else (None, dz)
    chex.assert_trees_all_equal(vjp(g), expected)


# Features and gradients sum at most 8 products of normal values.
SUM_ERROR = 2 * support.sum_error(8, 40)


def features_and_gradients(bottom, embeddings, g):
    out, vjp = jax.vjp(dot_features, bottom, embeddings)
    return out, vjp(g)


@has_bottom
def test_a_batched_axis_is_one_more_of_the_batch(has_bottom):
    args = *operands(6, 3, 8, has_bottom), support.normal(6, 16, seed=2)
    single = features_and_gradients(*args)
    parts = jax.tree.map(lambda x: x.reshape(2, 3, *x.shape[1:]), args)
    batched = jax.jit(jax.vmap(features_and_gradients))(*parts)
    joined = jax.tree.map(lambda x: x.reshape(6, *x.shape[2:]), batched)
    chex.assert_trees_all_close(joined, single, atol=SUM_ERROR)


@has_bottom
def test_under_shard_map_all_devices_do_what_one_would(has_bottom):
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    args = *operands(16, 3, 8, has_bottom), support.normal(16, 16, seed=2)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((8,), ("data",), axis_types=auto)
    rows = dict(in_specs=P("data"), out_specs=P("data"))
    step = jax.jit(jax.shard_map(features_and_gradients, mesh=mesh, **rows))
    single = features_and_gradients(*args)
    chex.assert_trees_all_close(step(*args), single, atol=SUM_ERROR)


def test_dtypes_must_agree():
    bottom, embeddings = operands(4, 3, 8, True)
    with pytest.raises(ValueError, match="differ"):
        dot_features(bottom.astype(jnp.bfloat16), embeddings)


# The choice.


@pytest.fixture
def chosen(monkeypatch):
    """Returns a function that returns the provider of `dot_features` by default."""
    monkeypatch.setattr(launch, "why_not_here", lambda: None)

    def chosen(*args):
        launched = []

        def by_kernel(run, bottom, embeddings):
            launched.append(run)
            return jnp.zeros((len(embeddings), 1))

        monkeypatch.setattr(interaction, "by_kernel", by_kernel)
        dot_features(*args)
        return "triton" if launched else "xla"

    return chosen


@pytest.mark.parametrize(
    "sizes, dtype, expected",
    [
        ((4, 26, 16), jnp.bfloat16, "triton"),
        ((4, 26, 16), jnp.float32, "xla"),
        ((4, 64, 16), jnp.bfloat16, "xla"),
    ],
)
def test_triton_runs_what_it_serves(chosen, sizes, dtype, expected):
    assert chosen(*operands(*sizes, True, dtype)) == expected


def test_xla_runs_where_triton_does_not(chosen, monkeypatch):
    monkeypatch.setattr(launch, "why_not_here", lambda: "no Hopper GPU")
    assert chosen(*operands(4, 26, 16, True, jnp.bfloat16)) == "xla"


def test_triton_says_why_it_cannot_run(monkeypatch):
    run = functools.partial(dot_features, implementation="triton")
    with pytest.raises(ValueError, match="float32 is not bfloat16"):
        run(*operands(4, 3, 8, True))
    monkeypatch.setattr(launch, "why_not_installed", lambda: "it is missing")
    with pytest.raises(ValueError, match="cannot run: it is missing"):
        run(*operands(4, 3, 8, True, jnp.bfloat16))
