"""`fm_lcb` and its parts against numpy in float64."""

import chex
import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from loka_jax.ops.fm_lcb import compress, fm_lcb, product
from tests import support

B, N, D, K, L = 5, 12, 8, 3, 4


def operands(dtype=jnp.float32, batch=B):
    weight = support.normal(N, K + L, seed=1) / N**0.5
    return support.normal(batch, N, D, dtype=dtype), weight


def plain(x, weight):
    """Returns FM and LCB of `X (X^T Y)` and `W_L^T X`, one example after the other."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    fm = np.stack([x_i @ (x_i.T @ weight[:, :K]) for x_i in x])
    return fm, np.stack([weight[:, K:].T @ x_i for x_i in x])


def plain_gradients(x, weight, dfm, dlcb):
    """Returns the gradients in float64, by the rule of each product."""
    args = (np.asarray(a, np.float64) for a in (x, weight, dfm, dlcb))
    x, weight, dfm, dlcb = args
    dx, dweight = np.zeros_like(x), np.zeros_like(weight)
    for x_i, dfm_i, dlcb_i, dx_i in zip(x, dfm, dlcb, dx, strict=True):
        p = x_i.T @ weight[:, :K]
        dp = x_i.T @ dfm_i  # [d, k]
        dx_i += dfm_i @ p.T + weight[:, :K] @ dp.T + weight[:, K:] @ dlcb_i
        dweight += np.concatenate([x_i @ dp, x_i @ dlcb_i.T], axis=1)
    return dx, dweight


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
    out, pull = jax.vjp(lambda x, w: fm_lcb(x, w, k=K), *args)
    chex.assert_type(out, dtype)
    bounds = plain(*map(np.abs, args))
    for found, exact, bound in zip(out, plain(*args), bounds, strict=True):
        assert_close(found, exact, bound, roundings)
    g = (
        support.normal(B, N, K, seed=2, dtype=dtype),
        support.normal(B, L, D, seed=3, dtype=dtype),
    )
    dx, dweight = pull(g)
    chex.assert_type([dx, dweight], [dtype, jnp.float32])
    exact = plain_gradients(*args, *g)
    bounds = plain_gradients(*map(np.abs, (*args, *g)))
    # The gradient of x is also a sum of two rounded products.
    assert_close(dx, exact[0], bounds[0], 2 * roundings)
    assert_close(dweight, exact[1], bounds[1], roundings)


def test_gradients_agree_with_differences():
    run = lambda x, w: fm_lcb(jnp.asarray(x), jnp.asarray(w), k=K)  # noqa: E731
    jax.test_util.check_grads(run, operands(batch=2), 1, modes=["rev"], rtol=1e-2)


def test_the_gradient_of_a_weight_is_not_rounded_to_bfloat16():
    args = operands(jnp.bfloat16)
    _, pull = jax.vjp(compress, *args)
    _, dweight = pull(jnp.ones((B, K + L, D), jnp.bfloat16))
    assert np.any(dweight != dweight.astype(jnp.bfloat16).astype(jnp.float32))


def test_products_are_those_of_each_example():
    lhs, rhs = support.normal(3, 4, 5), support.normal(3, 5, 6, seed=1)
    expected = np.stack([a @ b for a, b in zip(lhs, rhs, strict=True)])
    chex.assert_trees_all_close(product(lhs, rhs), expected, atol=1e-5)


def test_under_shard_map_the_gradient_of_the_weight_is_summed():
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    x, weight = operands(batch=16)

    def gradients(x, weight):
        def loss(x, weight):
            return sum(jnp.sum(part**2) for part in fm_lcb(x, weight, k=K))

        return jax.grad(loss, argnums=(0, 1))(x, weight)

    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((8,), ("data",), axis_types=auto)
    specs = dict(in_specs=(P("data"), P()), out_specs=(P("data"), P()))
    step = jax.jit(jax.shard_map(gradients, mesh=mesh, **specs))
    expected = gradients(x, weight)
    largest = max(float(np.abs(g).max()) for g in expected)
    chex.assert_trees_all_close(
        step(x, weight), expected, atol=1e-5 * largest, rtol=1e-5
    )
