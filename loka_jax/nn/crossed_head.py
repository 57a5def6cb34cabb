"""A head over a cross network and the layers beside it, all one operation."""

import dataclasses

from flax import linen
from jax import Array
from jaxtyping import Float

from loka_jax.nn.dense import Dense, dense_parameters, planned, run_planned
from loka_jax.nn.sites import announce
from loka_jax.ops import crossed_stack
from loka_jax.ops.run_site import SiteArrays
from loka_jax.site import SiteSpec


class CrossedHead(Dense):
    """A `Dense` of one feature, of the same parameters and the same site.

    The cross network's features are multiplied where they are made and never written.
    """

    @linen.compact
    def __call__(self, beside: crossed_stack.CrossedBeside) -> Float[Array, "m 1"]:
        """Returns `[x', y] @ kernel + bias`, see `ops.crossed_stack`.

        Args:
            beside: what `Mlp` returns beside a cross network.

        Raises:
            ValueError: if it has another number of features than one.
        """
        if self.features != 1:
            raise ValueError(f"CrossedHead has one feature, not {self.features}.")
        (m, k), n = beside.crossed.shape, beside.plans[-1].spec.n
        plan = planned(self, SiteSpec(m=m, k=k + n, n=1))
        announce(self, plan)
        kernel, bias = dense_parameters(self, k + n)
        dots, y = crossed_stack.crossed_beside(beside, kernel[:k, 0])
        of_layers = dataclasses.replace(plan, spec=SiteSpec(m=m, k=n, n=1))
        product = run_planned(self, of_layers, SiteArrays(y, kernel[k:]))
        assert isinstance(product, Array)
        out = dots[:, None] + product
        return out if bias is None else out + bias[None, :]
