"""The tap of a site: its product passes, its observer sees the backward pass."""

import dataclasses

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

    def observe(self, stats, lhs, rhs, g, scales, axis_names):
        """Returns the sums of a batch."""
        assert axis_names == ("data",)
        given = stats, lhs, rhs, g, scales[0], scales[1]
        return jnp.stack([jnp.sum(x) for x in given])


def test_the_gradient_of_the_statistics_is_what_the_observer_sees():
    assert isinstance(Sums(), Observer)
    out, lhs, rhs = jnp.full((2, 5), 3.0), jnp.full((2, 3), 7.0), jnp.full((3, 5), 11.0)
    scales, g = (jnp.float32(13), jnp.float32(17), None), jnp.full((2, 5), 19.0)
    run = lambda out, lhs, rhs, stats: tap(  # noqa: E731
        Sums(), ("data",), out, lhs, rhs, scales, stats
    )
    y, pull = jax.vjp(run, out, lhs, rhs, jnp.full(6, 2.0))
    dout, dlhs, drhs, stats = pull(g)
    np.testing.assert_array_equal([y, dout], [out, g])
    assert not dlhs.any() and not drhs.any()
    np.testing.assert_array_equal(stats, [12, 42, 165, 190, 13, 17])
