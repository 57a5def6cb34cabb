"""The tap of a site: its product passes, its observer sees the backward pass."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from loka_jax.ops.tap import Observer, tap


@dataclasses.dataclass(frozen=True)
class Sums:
    """An observer whose statistics are sums of what it was given."""

    def init(self, m, k, n):
        """Returns no sums yet."""
        return jnp.zeros(6)

    def observe(self, stats, operands, axis_names):
        """Returns the sums of a batch."""
        assert axis_names == ("data",)
        lhs, rhs, g, amaxes, scales = operands
        given = stats, lhs, rhs, g, amaxes, scales
        return jnp.stack([jnp.sum(x) for x in given])


@jax.jit
def run(*arrays):
    """Returns the product and its pulled back gradients, on one device of an axis."""
    *arrays, g = arrays
    scales = jnp.float32(13), jnp.float32(17), None

    @functools.partial(jax.vmap, axis_name="data", axis_size=1, out_axes=0)
    def on_device(_):
        observed = functools.partial(tap, Sums(), ("data",))
        seen = lambda out, lhs, rhs, stats: observed(out, lhs, rhs, scales, stats)  # noqa: E731
        y, pull = jax.vjp(seen, *arrays)
        return y, *pull(g)

    return jax.tree.map(lambda x: x[0], on_device(jnp.zeros(1)))


def test_the_gradient_of_the_statistics_is_what_the_observer_sees():
    assert isinstance(Sums(), Observer)
    out, lhs, rhs = jnp.full((2, 5), 3.0), jnp.full((2, 3), 7.0), jnp.full((3, 5), 11.0)
    g = jnp.full((2, 5), 19.0)
    y, dout, dlhs, drhs, stats = run(out, lhs, rhs, jnp.full(6, 2.0), g)
    np.testing.assert_array_equal([y, dout], [out, g])
    assert not dlhs.any() and not drhs.any()
    np.testing.assert_array_equal(stats, [12, 42, 165, 190, 7 + 11 + 19, 13 + 17])
