"""A cross network within a group: products, and a tail in one pass a layer, each way.

Features are those of the first layer times a factor, `x_l = x0 * s_l`, s_0 = 1:

    forward     z = x_l V U                          s' = s_l + z + b    x' = x0 * s'
    backward    d_l = dh V^T    dh = u U^T           u = x0 * (d_L + ... + d_{l+1})
                dU = (x V)^T u  dV = x^T dh          dx0 = sum over l of d_l * s_l

Rows of x are examples; a layer of full rank has one kernel W in place of V and U. What
lies between the products is memory bandwidth: at 3,456 features and rank 512 a pass
takes as long as a product. So a tail reads x0 and the products of all layers so far,
whose scales it applies, and writes nothing but what the next product reads. Nothing is
read and written again to add to it; one pass at the end makes dx0.

Where the first product reads x0 in E4M3, so do the tails: the network is that of the
rounded features. What only tails read, z and d, leaves its product in FP8, z in E4M3
and d in the format of gradients.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax.ops.group_sites import GroupSite, LayerArrays, cast, weight
from loka_jax.tails import (
    CrossTail,
    Forms,
    Outer,
    Scaled,
    Tails,
    Written,
)

# A value for each product of each layer.
type ByProduct[T] = tuple[tuple[T, ...], ...]


class KeptCross(NamedTuple):
    """What the backward pass reads of the forward pass.

    Attributes:
        x0: of the first layer, as the tails read it.
        lhs, rhs: the operands of each layer's products.
        z: the product that ends each layer.
    """

    x0: Scaled
    lhs: ByProduct[Written]
    rhs: ByProduct[Written]
    z: tuple[Scaled, ...]


def propagate(
    tails: Tails,
    sites: Sequence[tuple[GroupSite, ...]],
    x: Written,
    layers: Sequence[LayerArrays],
    *,
    want: Forms,
    head: Float[Array, "n"] | None,
    keep: bool,
) -> tuple[CrossTail, KeptCross]:
    """Returns the features after the last layer, and what backward reads.

    Args:
        sites: of each layer.
        x: the features of the first layer, as its product reads them.
        layers: the parameters.
        want: the forms of the result.
        head: weights of which to return the dots, too; None for none.
        keep: for the backward pass, too.
    """
    x0, shape = _factor(x), sites[0][0].shape("lhs")
    all_lhs, all_rhs, all_z = [], [], []
    bias = jnp.ones(shape[1:], jnp.float32)
    for i, (own, layer) in enumerate(zip(sites, layers, strict=True)):
        lhs, rhs, z = _products(tails, own, x, layer, keep=keep)
        all_lhs.append(lhs)
        all_rhs.append(rhs)
        all_z.append(z)
        bias = bias if layer.bias is None else bias + layer.bias
        if i + 1 < len(sites):
            forms = sites[i + 1][0].forms("lhs", keep=keep)
            x = tails.cross_tail(all_z, x0, bias, want=forms).y
    out = tails.cross_tail(all_z, x0, bias, head, want=want)
    return out, KeptCross(x0, tuple(all_lhs), tuple(all_rhs), tuple(all_z))


def _factor(x: Written) -> Scaled:
    """Returns the features of the first layer in the shortest form of them."""
    if x.fp8 is not None:
        return x.contracting(1)
    assert x.bf16 is not None
    return Scaled(x.bf16)


def _products(
    tails: Tails,
    own: tuple[GroupSite, ...],
    x: Written,
    layer: LayerArrays,
    *,
    keep: bool,
):
    """Returns the operands of a layer's products, and the last product."""
    weights = tuple(
        weight(tails, site, kernel, keep=keep)
        for site, kernel in zip(own, layer.kernels, strict=True)
    )
    operands = [x]
    for site, following, rhs in zip(own, own[1:], weights, strict=False):
        want = following.forms("lhs", keep=keep)
        h = None if keep else site.hand_on(operands[-1], rhs, want)
        if h is None:
            h = cast(tails, site.multiply("fwd", operands[-1], rhs), want)
        operands.append(h)
    z = own[-1].multiply_to_fp8("fwd", operands[-1], weights[-1])
    return tuple(operands), weights, z


class CrossPulled(NamedTuple):
    """The results of the backward pass of a cross network.

    Attributes:
        x0: the gradients of the parts of x0.
        head: that of a head; None without one.
        layers: those of the parameters.
        amaxes: of lhs, rhs and g of each product.
    """

    x0: tuple[Array, ...]
    head: Array | None
    layers: tuple[LayerArrays, ...]
    amaxes: list[tuple[Array | None, Array | None, Array | None]]


def pull_back(
    tails: Tails,
    sites: Sequence[tuple[GroupSite, ...]],
    kept: KeptCross,
    layers: Sequence[LayerArrays],
    d: list[Scaled | Outer],
    others: list[Scaled | Outer],
    parts: Sequence[jax.ShapeDtypeStruct],
) -> CrossPulled:
    """Returns the gradients of x0 and a head, and of the layers, and amaxes.

    Args:
        sites: of each layer.
        kept: of the forward pass.
        layers: the parameters; only biases are read.
        d: summands of the gradient of the features after the last layer; of a head an
            outer product, whose row is its weights.
        others: further summands of the gradient of x0.
        parts: the types of the arrays of which x0 is joined.
    """
    summands, by_layer, gradients, amaxes = [*d], [d], [], []
    each = zip(sites, kept.lhs, kept.rhs, layers, strict=True)
    for own, lhs, rhs, layer in reversed([*each]):
        want = own[-1].forms("g", keep=True)
        has_bias = layer.bias is not None
        out = tails.cross_tail(summands, kept.x0, want=want, has_row_sum=has_bias)
        kernels, product, measured = _gradients(tails, own, lhs, rhs, out.y)
        gradients.append(LayerArrays(kernels, out.row_sum))
        amaxes = measured + amaxes
        summands = [*summands, product]
        by_layer = [[product], *by_layer]
    by_layer[0] += others
    has_head = any(isinstance(x, Outer) for x in d)
    dx0, dhead = tails.cross_gradient(
        *(by_layer, kept.z, [layer.bias for layer in layers]),
        kept.x0 if has_head else None,
        parts=parts,
        shape=sites[0][0].shape("lhs"),
    )
    return CrossPulled(dx0, dhead, tuple(reversed(gradients)), amaxes)


def _gradients(
    tails: Tails,
    own: tuple[GroupSite, ...],
    lhs: tuple[Written, ...],
    rhs: tuple[Written, ...],
    g: Written,
):
    """Returns the gradients of a layer's kernels and of its features, and amaxes.

    Args:
        own: the sites of the layer.
        lhs, rhs: the operands of its products.
        g: the gradient of the last product, in the forms that products read.
    """
    kernels, amaxes = [], []
    for j in reversed(range(len(own))):
        kernels.append(own[j].weight_gradient(lhs[j], g))
        amaxes.append((lhs[j].amaxes, rhs[j].amaxes, g.amaxes))
        if j:
            dh = own[j].multiply("dlhs", g, rhs[j])
            g = cast(tails, dh, own[j - 1].forms("g", keep=True))
    d = own[0].multiply_to_fp8("dlhs", g, rhs[0])
    return tuple(reversed(kernels)), d, amaxes[::-1]
