"""`fm_lcb` and its parts against numpy in float64, its kernels against XLA."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.ops import fm_lcb as ops
from loka_jax.ops.device import HOPPER, Device
from loka_jax.ops.fm_lcb import compress, fm_lcb, plan_fm_lcb
from tests import support
from tests.support import oracle

B, N, D, K, L = 5, 12, 8, 3, 4


def operands(dtype=jnp.float32, batch=B):
    weight = support.normal(N, K + L, seed=1) / N**0.5
    return support.normal(batch, N, D, dtype=dtype), weight


def plain(x, weight):
    """Returns FM and LCB in float64."""
    return oracle.fm_lcb(*oracle.in_float64((x, weight)), K)


def plain_gradients(*operands):
    """Returns the gradients of x and the weight in float64."""
    by_fm, by_lcb, *parts = oracle.fm_lcb_gradients(*oracle.in_float64(operands))
    return by_fm + by_lcb, np.concatenate(parts, axis=1)


def assert_close(x, exact, magnitude, roundings):
    """Asserts equality up to float32 sums, and some roundings of values on the way.

    `magnitude` is the result of the operands' absolute values.
    """
    chex.assert_equal_shape([x, exact])
    bound = support.sum_error(2 * N * D * B, magnitude) + roundings * magnitude
    assert np.all(np.abs(np.asarray(x, np.float64) - exact) <= bound)


# An operand in bfloat16 differs by half an ulp; at most four are rounded one after the
# other: the weight, P, dP and the result.
@pytest.mark.parametrize(
    "dtype, roundings", [(jnp.float32, 0.0), (jnp.bfloat16, 4.1 * 2.0**-9)]
)
def test_results_and_gradients_are_those_of_the_equations(dtype, roundings):
    args = operands(dtype)
    shapes = (B, N, K), (B, L, D)
    g = [support.normal(*x, seed=i, dtype=dtype) for i, x in enumerate(shapes, 2)]

    @jax.jit
    def both_ways(*args):
        out, pull = jax.vjp(lambda x, w: fm_lcb(x, w, k=K), *args)
        return fm_lcb(*args, k=K), out, pull(tuple(g))

    inference, out, (dx, dweight) = both_ways(*args)
    chex.assert_type([*out, *inference], dtype)
    bounds = plain(*map(np.abs, args))
    for each in zip(out, inference, plain(*args), bounds, strict=True):
        *found, exact, bound = each
        for x in found:
            assert_close(x, exact, bound, roundings)
    chex.assert_type([dx, dweight], [dtype, jnp.float32])
    exact = plain_gradients(*args, *g)
    bounds = plain_gradients(*map(np.abs, (*args, *g)))
    # The gradient of x is also a sum of two rounded products.
    assert_close(dx, exact[0], bounds[0], 2 * roundings)
    assert_close(dweight, exact[1], bounds[1], roundings)


def test_compressions_and_their_gradients_are_those_of_the_equation():
    x, weight = operands(jnp.bfloat16)
    g = support.normal(B, K + L, D, seed=2, dtype=jnp.bfloat16)
    out, (dx, dweight) = jax.jit(
        lambda x, weight: (compress(x, weight), jax.vjp(compress, x, weight)[1](g))
    )(x, weight)
    x, weight, g = (np.asarray(a, np.float64) for a in (x, weight, g))
    for found, equation, *pair in (
        (out, "nm,bnd->bmd", weight, x),
        (dx, "nm,bmd->bnd", weight, g),
        (dweight, "bnd,bmd->nm", x, g),
    ):
        bound = np.einsum(equation, *map(np.abs, pair))
        # The gradient of the weight is not rounded to bfloat16.
        roundings = 0 if found is dweight else 2.1 * 2.0**-8
        assert_close(found, np.einsum(equation, *pair), bound, roundings)


def test_a_residual_adds_the_gradient_of_its_parts():
    x, weight = operands()
    dy = support.normal(B, N, D, seed=4)

    @jax.jit
    def gradients(x):
        def run(x):
            fm, lcb, rest = ops.fm_lcb_residual(x, weight, k=K, counts=(5, 7))
            return fm, lcb, rest.rows

        (fm, lcb, rows), pull = jax.vjp(run, x)
        alone = jax.vjp(lambda x: fm_lcb(x, weight, k=K), x)[1]((fm, lcb))[0]
        return rows, pull((fm, lcb, (dy[:, :5], dy[:, 5:])))[0], alone

    rows, found, alone = gradients(x)
    chex.assert_trees_all_equal(rows, (x[:, :5], x[:, 5:]))
    np.testing.assert_allclose(found, alone + dy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "n, k, dtype, device, forward, backward",
    [
        (24, 16, "bfloat16", HOPPER, None, None),
        (24, 16, "bfloat16", Device(platform="cpu"), "no Hopper", "no Hopper"),
        (24, 16, "float32", HOPPER, "embeddings in float32", "embeddings in float32"),
        (24, 8, "bfloat16", HOPPER, None, "k=8 is not"),
        (20, 16, "bfloat16", HOPPER, "n=20 is not", "n=20 is not"),
    ],
)
def test_the_plan_says_why_xla_runs_a_pass(n, k, dtype, device, forward, backward):
    plan = plan_fm_lcb(jax.ShapeDtypeStruct((3, n, 16), dtype), 32, k, device)
    for expected, reason in zip((forward, backward), plan, strict=False):
        assert reason is None if expected is None else expected in reason
    if (n, forward, backward) == (24, None, None):
        assert plan.why_not_residual((8, 16)) is None
        assert "are no multiples of 8" in plan.why_not_residual((12, 12))
