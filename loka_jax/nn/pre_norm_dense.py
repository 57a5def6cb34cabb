"""A dense layer behind a norm, or beside a residual, as one group."""

import math
from typing import Any

import jax.numpy as jnp
from flax import linen
from jaxtyping import Array, Float

from loka_jax import group as groups
from loka_jax import xla
from loka_jax.group import Group, Member
from loka_jax.nn.dense import Dense, dense_parameters, site_product, with_state
from loka_jax.nn.group import group_plans, joined
from loka_jax.nn.norm_dense import NormParameters
from loka_jax.nn.sites import announce
from loka_jax.normed import NO_VECTORS, Epilogue, NormVectors
from loka_jax.ops.group import run_group
from loka_jax.ops.group_sites import LayerArrays
from loka_jax.site import Provider, SiteSpec


class PreNormDense(Dense):
    """A dense layer, `y = norm(x) W + b + r`, its norm and residual optional.

    Where its group runs as one operation, the pass that casts rows for the product
    normalizes them.

    Attributes:
        norm: the norm, with its parameters; None for none.
        implementation: the provider, as of `Mlp`.
    """

    norm: NormParameters | None = None
    implementation: Provider | None = None

    @linen.compact
    def __call__(
        self,
        inputs: Float[Array, "... k"],
        residual: Float[Array, "... n"] | None = None,
    ) -> Float[Array, "... n"]:
        """Returns y, with a residual r or without."""
        *rows, columns = inputs.shape
        shape = *rows, self.features
        x = inputs.reshape(math.prod(rows), columns)
        r = None if residual is None else residual.reshape(-1, self.features)
        group = self._group(x, r)
        kernel, bias = dense_parameters(self, columns)
        vectors = NO_VECTORS
        if self.norm is not None:
            vectors = NormVectors(None, *self.norm(columns))
        members = [*group.members]
        own = group_plans(group, members, [self.recipe], self.implementation)
        if (plans := joined(group, own)) is None:
            return self._apart(x, r, group, kernel, bias, vectors).reshape(shape)
        announce(self, plans[0], group=group)
        layers: Any = ((LayerArrays((kernel,), bias),),)
        if self.norm is not None:
            layers = ((LayerArrays((), *vectors),), *layers)
        states = (with_state(self, plans[0], kernel)[1],)
        read = ((x,),) if r is None else ((x,), (r,))
        (y,) = run_group(group, plans, read, layers, states)
        return y.reshape(shape)

    def _apart(
        self,
        x: Array,
        residual: Array | None,
        group: Group,
        kernel: Array,
        bias: Array | None,
        vectors: NormVectors,
    ) -> Array:
        """Returns y by a product alone."""
        if self.norm is not None:
            epilogue = Epilogue(self.norm.norm)
            x = xla.norm_activation(x, vectors, epilogue=epilogue).astype(x.dtype)
        y = site_product(self, (x,), kernel, group=group)
        if bias is not None:
            y = (y.astype(jnp.float32) + bias[None, :]).astype(y.dtype)
        return y if residual is None else residual + y

    @linen.nowrap
    def _group(self, x: Array, residual: Array | None) -> Group:
        (m, k), n = x.shape, self.features
        spec = SiteSpec(m=m, k=k, n=n, use_bias=self.use_bias)
        inputs = ((k,),) if residual is None else ((k,), (n,))
        count, layers = len(inputs), ()
        if self.norm is not None:
            norm = Epilogue(self.norm.norm)
            layers = (groups.Dense(reads=0, member=None, norm=norm),)
        product = groups.Dense(
            reads=count if layers else 0,
            member=Member("/".join(self.path), spec),
            norm=Epilogue("none"),
            residual=None if residual is None else 1,
        )
        outputs = (count + len(layers),)
        return Group(rows=m, inputs=inputs, layers=(*layers, product), outputs=outputs)
