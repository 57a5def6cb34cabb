"""The norm of joined embeddings plus a residual, against nn.BlockNorm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import nn
from loka_jax.models import Dhen, Wukong
from loka_jax.ops import joined_norm as operation
from loka_jax.ops import residual
from loka_jax.ops.joined_norm import joined_norm
from tests import support
from tests.support.triton import interpreted, on_gpu

__all__ = ["interpreted", "on_gpu"]

# Embeddings of the parts, and d: of one tile of columns, and of part of one.
CASES = [((3, 5), 16), ((7,), 40), ((2, 3, 4), 160)]
cases = pytest.mark.parametrize("counts, d", CASES, ids=str)
in_parts = pytest.mark.parametrize("in_parts", [False, True], ids=["whole", "parts"])


def _operands(counts, d, dtype):
    """Returns parts, x and the gradient of the result, of 11 examples."""
    parts = tuple(
        support.normal(11, count, d, seed=i, dtype=dtype)
        for i, count in enumerate(counts)
    )
    x, dy = (support.normal(11, sum(counts), d, seed=i, dtype=dtype) for i in (8, 9))
    return parts, x, dy


def _results(run, parts, x, dy):
    y, pull = jax.vjp(run, parts, x)
    return y, pull(dy)


def _assert_close(ours, theirs, limit):
    for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        assert np.linalg.norm(a - b) <= limit * np.linalg.norm(b)


@cases
def test_it_is_a_block_norm_of_the_sum(counts, d):
    parts, x, dy = _operands(counts, d, jnp.float32)

    def expected(parts, x):
        return nn.BlockNorm().apply({}, jnp.concatenate(parts, axis=1) + x)

    ours = _results(joined_norm, parts, x, dy)
    _assert_close(ours, _results(expected, parts, x, dy), 1e-5)


def _assert_triton_gives_the_results_of_xla(counts, d, *, in_parts=False):
    operands = _operands(counts, d, jnp.bfloat16)

    def run(provider, in_parts=False):
        def joined(parts, x):
            x = residual.beside(x, residual.cut(x, counts)) if in_parts else x
            return joined_norm(parts, x, implementation=provider)

        return _results(joined, *operands)

    ours, theirs = run("triton", in_parts), run("xla")
    # Float32 operations in another order flip few roundings to bfloat16.
    _assert_close(ours, theirs, 2.0**-12)


@cases
@in_parts
@pytest.mark.usefixtures("interpreted")
def test_triton_gives_the_results_of_xla(counts, d, in_parts, monkeypatch):
    # The interpreter takes no tracers.
    monkeypatch.setattr(operation, "by_kernel", lambda run, *operands: run(*operands))
    _assert_triton_gives_the_results_of_xla(counts, d, in_parts=in_parts)


@cases
@in_parts
@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
def test_triton_gives_the_results_of_xla_on_a_gpu(counts, d, in_parts):
    _assert_triton_gives_the_results_of_xla(counts, d, in_parts=in_parts)


@cases
def test_a_residual_in_parts_has_the_same_gradient(counts, d):
    parts, x, dy = _operands(counts, d, jnp.bfloat16)

    def joined(parts, x):
        return joined_norm(parts, residual.beside(x, residual.cut(x, counts)))

    ours, theirs = (_results(run, parts, x, dy) for run in (joined, joined_norm))
    for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        assert np.array_equal(a, b)


def test_what_does_not_fit_is_refused():
    parts, x, _ = _operands((3, 5), 16, jnp.float32)
    with pytest.raises(ValueError, match="do not make up x"):
        joined_norm(parts[:1], x)
    wide = jnp.zeros((2, 3, 512))
    with pytest.raises(ValueError, match="d=512 is above 256"):
        joined_norm((wide,), wide)
    with pytest.raises(ValueError, match="float32 is not bfloat16"):
        joined_norm(parts, x, implementation="triton")


MODELS = [
    Wukong(num_layers=2, fmb_mlp=(32,)),
    Dhen(num_layers=1, dot_mlp=(32,)),
    Dhen(num_layers=1, dot_mlp=(32,), dot=16, cross=16, linear=16, ensemble="sum"),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: type(m).__name__)
def test_models_give_the_same_by_it(model):
    model = model.clone(recipe="f32", norm="block")
    features = support.normal(16, 13), support.normal(16, 11, 16, seed=1)
    variables = model.init(jax.random.key(0), *features)

    def run(model):
        def loss(variables):
            return jnp.mean(model.apply(variables, *features) ** 2)

        return jax.value_and_grad(loss)(variables)

    _assert_close(run(model.clone(fused_wide=True)), run(model), 1e-4)
