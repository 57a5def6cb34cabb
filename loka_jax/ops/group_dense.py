"""A dense layer of a group: its product, and the tail that follows it.

    forward     z = x W    y = drop(activation(gamma norm(z + b + residual) + beta))
    backward    dz from the summands of dy    dW = x^T dz    dx = dz W^T

The tail's steps have one of the orders of `normed`.

The tail writes y in the forms in which it is read, and keeps normalized rows, in E4M3
where the error of the gradient allows it; of relu the signs of y are enough.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from loka_jax import fp8
from loka_jax.fp8 import E4M3
from loka_jax.group import Dense
from loka_jax.normed import Epilogue, NormVectors, bounded_scale_inv
from loka_jax.ops.group_sites import GroupSite, LayerArrays, cast, weight
from loka_jax.tails import (
    Dropout,
    Forms,
    NormTailGradients,
    Scale,
    Scaled,
    TailResiduals,
    Tails,
    Written,
)
from loka_jax.xla.matmul import cut
from loka_jax.xla.tails import decode, in_bf16

_RELU = Epilogue("none", "relu")


class Read(NamedTuple):
    """How a value is read.

    Attributes:
        want: the forms, with the scale of the FP8 form from earlier steps.
        reader: the first site that reads it, or None.
    """

    want: Forms
    reader: GroupSite | None


class Pulled(NamedTuple):
    """The results of the backward pass of a dense layer.

    Attributes:
        x: the gradient of what it reads.
        residual: summands of the gradient of its residual.
        layer: the gradients of its parameters.
        amaxes: of lhs, rhs and g of its product.
    """

    x: Scaled
    residual: list[Scaled]
    layer: LayerArrays
    amaxes: list[tuple[Array | None, Array | None, Array | None]]


class KeptDense(NamedTuple):
    """What the backward pass reads; residuals are None where nothing follows."""

    lhs: Written | None
    rhs: Written | None
    residuals: TailResiduals | None


class DenseStep(NamedTuple):
    """A dense layer.

    Attributes:
        sites: of its product, none of a norm alone.
        shape: of its result.
        dropout: of its result; None for none.
    """

    tails: Tails
    layer: Dense
    sites: list[tuple[GroupSite, ...]]
    shape: tuple[int, int]
    dropout: Dropout | None

    @property
    def site(self) -> GroupSite | None:
        """The site of its product."""
        return self.sites[0][0] if self.sites else None

    @property
    def is_linear(self) -> bool:
        """True if nothing but a sum follows the product."""
        return self.is_plain and self.dropout is None

    @property
    def is_plain(self) -> bool:
        """True if backward needs no activation's argument."""
        norm = self.layer.norm
        return norm.norm == norm.activation == "none" and not norm.multiplies

    def forward(
        self,
        x: Written,
        residual: Written | None,
        arrays: LayerArrays,
        read: Read,
        *,
        keep: bool,
    ) -> tuple[Written, KeptDense]:
        """Returns the layer's result, and what backward reads.

        Args:
            read: how the result is read.
        """
        want = read.want
        vectors = NormVectors(*arrays[1:])
        site, rhs = self.site, None
        if site is None:
            assert x.bf16 is not None
            z = Scaled(x.bf16)
        else:
            rhs = weight(self.tails, site, arrays.kernels[0], keep=keep)
            handed = None
            if not keep and residual is None and self._may_hand_on:
                has_relu = self.layer.norm == _RELU
                handed = site.hand_on(x, rhs, want, arrays.bias, has_relu=has_relu)
            if handed is not None:
                return handed, KeptDense(None, None, None)
            z = site.multiply("fwd", x, rhs)
        summands = [z]
        if residual is not None:
            assert residual.bf16 is not None
            summands.append(Scaled(residual.bf16))
        if self.is_linear and want.fp8 is None and not want.padded:
            y, residuals = _linear_end(summands, arrays.bias, want), None
        else:
            y, residuals = self._tail(summands, vectors, read, keep=keep)
        lhs = None if site is None else x
        return y, KeptDense(lhs, rhs, residuals)

    @property
    def _may_hand_on(self) -> bool:
        """True if the product of an inference can write the result itself."""
        norm = self.layer.norm
        return norm.norm == "none" and norm.activation in ("none", "relu")

    def _tail(
        self, summands: list[Scaled], vectors: NormVectors, read: Read, *, keep: bool
    ) -> tuple[Written, TailResiduals | None]:
        epilogue = self.layer.norm
        keeps_y = epilogue == _RELU
        xhat = None
        if keep and not self.is_plain and not keeps_y:
            # In FP8 where the error of the gradient allows it.
            near = self.site or read.reader
            is_fp8 = near is not None and near.products.recipe.dlhs is not None
            xhat = E4M3 if is_fp8 else jnp.bfloat16
        y, residuals = self.tails.norm_tail(
            *(summands, vectors, self.dropout),
            epilogue=epilogue,
            want=self._bounded(read.want, vectors),
            xhat=xhat,
        )
        if self.is_plain and not self.is_linear:
            residuals = TailResiduals()  # dropout draws again
        if keeps_y:
            kept = y.bf16 if y.fp8 is None else y.fp8  # of relu signs are enough
            assert kept is not None
            residuals = TailResiduals(kept, None)
        return y, residuals

    def _bounded(self, want: Forms, vectors: NormVectors) -> Forms:
        """Returns the forms of the result, under its bound where a norm gives one."""
        norm = self.layer.norm
        ends_in_norm = self.layer.residual is None or not (
            norm.adds_last or norm.multiplies
        )
        if norm.norm == "none" or want.fp8 is None or not ends_in_norm:
            return want
        if jnp.dtype(want.fp8) != jnp.dtype(E4M3):
            return want
        # A power of two, so that the next product is exact in bfloat16.
        bound = bounded_scale_inv(norm, self.shape[1], vectors.gamma, vectors.beta)
        if self.dropout is not None and not norm.acts_first:
            bound = bound / (1 - self.dropout.rate)
        scale_inv = Scale.of(fp8.power_of_two_up(bound))
        return dataclasses.replace(want, scale_inv=scale_inv)

    def backward(
        self,
        d: Sequence[Any],
        kept: KeptDense,
        arrays: LayerArrays,
        *,
        to_fp8: bool,
    ) -> Pulled:
        """Returns the gradients of what the layer reads and of its parameters."""
        out = self._gradient(d, kept.residuals, NormVectors(*arrays[1:]))
        g, dvectors, dsum = out
        of_residual = [*d]
        if dsum is not None:
            of_residual = [Scaled(dsum)]
        elif not self.is_linear and not self.layer.norm.adds_last:
            of_residual = [] if g.bf16 is None else [Scaled(g.bf16)]
        if self.site is None:
            assert g.bf16 is not None
            dx = Scaled(g.bf16)
            return Pulled(dx, of_residual, LayerArrays((), *dvectors), [])
        site, lhs, rhs = self.site, kept.lhs, kept.rhs
        assert lhs is not None and rhs is not None
        multiply = site.multiply_to_fp8 if to_fp8 else site.multiply
        return Pulled(
            x=multiply("dlhs", g, rhs),
            residual=of_residual,
            layer=LayerArrays((site.weight_gradient(lhs, g),), *dvectors),
            amaxes=[(lhs.amaxes, rhs.amaxes, g.amaxes)],
        )

    def _gradient(
        self, d: Sequence[Any], residuals: TailResiduals | None, vectors: NormVectors
    ) -> NormTailGradients:
        """Returns the gradients of the product, of the vectors and of a residual."""
        want = Forms(shape=self.shape)
        if self.site is not None:
            want = self.site.forms("g", keep=True)
        sums_first = self.layer.norm.order == "sum_norm_act" and not self.is_linear
        if self.layer.residual is not None and sums_first:
            want = dataclasses.replace(want, bf16=True)
        if residuals is None and vectors.bias is not None and want.fp8 is not None:
            residuals = TailResiduals()  # the pass that casts has the sums for the bias
        if residuals is not None:
            return self.tails.norm_tail_backward(
                *(d, residuals, vectors, self.dropout),
                epilogue=self.layer.norm,
                want=want,
            )
        z = d[0] if len(d) == 1 else Scaled(functools.reduce(jnp.add, map(decode, d)))
        dbias = None
        if vectors.bias is not None:
            dbias = jnp.sum(cut(decode(z), want.shape_of(z.data)), axis=0)
        dz = cast(self.tails, z, want)
        return NormTailGradients(dz, NormVectors(dbias))


def _linear_end(summands: list[Scaled], bias: Array | None, want: Forms) -> Written:
    """Returns a last product; XLA joins a bias and a residual with what reads it.

    A bfloat16 bias becomes part of an FP8 product, which saves a pass over the result.
    """
    first, *others = summands
    shape = want.shape_of(first.data)
    if not others and (bias is None or first.scales):
        out = cut(in_bf16(first), shape)
        return Written(out if bias is None else out + bias.astype(out.dtype)[None, :])
    out = functools.reduce(jnp.add, (cut(decode(x), shape) for x in summands))
    out = out if bias is None else out + bias[None, :]
    return Written(out.astype(jnp.bfloat16))
