"""A cross network as one operation: products in FP8, and a tail in one pass each way.

Features are those of the first layer times a factor, `x_l = x0 * s_l`, s_0 = 1:

    forward     z = x_l V U                          s' = s_l + z + b    x' = x0 * s'
    backward    d_l = dh V^T    dh = u U^T           u = x0 * (d_L + ... + d_{l+1})
                dU = (x V)^T u  dV = x^T dh          dx0 = sum over l of d_l * s_l

Rows of x are examples; a layer of full rank has one kernel W in place of V and U. What
lies between the products is memory bandwidth: at 3,456 features and rank 512 a pass
takes as long as a product. So there is one pass a layer each way, the tail. It reads
x0 and the products of all layers so far, whose scales it applies, and writes nothing
but what the next product reads: x' or u in FP8 under scales from earlier steps, with
their amaxes, and for dU and dV transposed, or in bfloat16, as the recipe says. Nothing
is read and written again to add to it; one pass at the end makes dx0.

Where the first product reads x0 in E4M3, so do the tails: the network is that of the
rounded features. What only tails read, z and d, leaves its product in FP8, z in E4M3
and d in the format of gradients. In bfloat16 the same passes run without FP8.

The weights are cast once a step, in both layouts. Sizes that are no multiples of 16 are
padded with zeros by the passes that cast.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax import triton
from loka_jax.fp8 import E4M3
from loka_jax.ops.kernels import equally_varying
from loka_jax.ops.plan import KernelPlan
from loka_jax.ops.tailed_products import Site, Tailed, read_states, why_not_tailed
from loka_jax.scaling import DelayedScaling
from loka_jax.tails import CrossGradients, CrossTail, Forms, Outer, Scaled, Written
from loka_jax.triton import tails

# Of the kernels of a network; the last one casts the weights.
FAMILIES = ("cross_tail", "joined_cast", "norm_tail")

# A value for each product of each layer.
type ByProduct[T] = tuple[tuple[T, ...], ...]


class CrossLayer(NamedTuple):
    """The parameters of a cross layer.

    Attributes:
        kernels: float32 `(V, U)`, of shapes (n, rank) and (rank, n), or `(W,)`.
        bias: float32 `[n]`; None if absent.
    """

    kernels: tuple[Float[Array, "k n"], ...]
    bias: Float[Array, "n"] | None = None


class Crossed(NamedTuple):
    """A cross network and its operands, for an operation that runs it.

    Attributes:
        x0: the features: an array, or two whose columns are joined, and followed by
            zeros up to the size that the plans say.
        layers: the parameters.
        states: of the products, for recipes with delayed scaling, else None.
        plans: of the products.
    """

    x0: tuple[Float[Array, "m _"], ...]
    layers: tuple[CrossLayer, ...]
    states: ByProduct[DelayedScaling | None]
    plans: ByProduct[KernelPlan]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the features."""
        spec = self.plans[0][0].spec
        return spec.m, spec.k


def why_not(plans: ByProduct[KernelPlan]) -> str | None:
    """Returns why these sites do not run as one operation, or None if they do.

    Args:
        plans: of the sites.
    """
    each = [plan for layer in plans for plan in layer]
    choices = {plan.choice for plan in each}
    if len(choices) > 1:
        return f"the sites have {len(choices)} different choices"
    (choice,) = choices
    recipe = choice.recipe
    if choice.is_fp8 and (recipe.fwd is None or recipe.dlhs is None):
        return f"recipe {recipe.name!r} has no FP8 in fwd or dlhs"
    if any(jnp.dtype(cast.dtype) != jnp.dtype(E4M3) for cast in recipe.casts("lhs")):
        return f"recipe {recipe.name!r} reads features in less than E4M3"
    return why_not_tailed(each)


def cross_network(
    crossed: Crossed,
    *,
    axis_names: tuple[str, ...] = (),
    implementation: triton.Implementation | None = None,
) -> Float[Array, "m n"]:
    """Returns the features after the last cross layer, in bfloat16.

    Differentiable in x0 and the layers; gradients have their dtypes. The gradient with
    respect to the states is their values for the next step, as in `matmul`.

    Args:
        crossed: the network.
        axis_names: mesh axes over which rows are spread, under `shard_map`.
        implementation: of the tails: "triton" requires its kernels; "xla"; None is
            Triton if it is installed, the GPU is a Hopper and its kernels support the
            operands, else XLA.

    Raises:
        ValueError: if the plans are not served (see `why_not`), if Triton is required
            and cannot run, or if a state is missing.
    """
    refusal = check(crossed)
    provider = triton.chosen(implementation, refusal, *FAMILIES)
    network = Tailed(crossed.plans, axis_names, provider)
    states = read_states(crossed.plans, crossed.states)
    arrays, tree = jax.tree.flatten((crossed.x0, crossed.layers))
    return _run(network, *jax.tree.unflatten(tree, equally_varying(*arrays)), states)


def check(crossed: Crossed) -> str | None:
    """Returns why Triton does not run the tails of a network, or None if it does.

    Raises:
        ValueError: if the plans are not served (see `why_not`).
    """
    reason = why_not(crossed.plans)
    if reason is not None:
        raise ValueError(f"cross_network: {reason}.")
    specs = [plan.spec for layer in crossed.plans for plan in layer]
    sizes = {(spec.m, spec.n) for spec in specs} | {x.shape for x in crossed.x0}
    refusals = (tails.why_not(m, n) for m, n in sorted(sizes))
    return next(filter(None, refusals), None)


class Kept(NamedTuple):
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(network: Tailed, x0, layers, states):
    return _forward(network, x0, layers, states, keep=False)[0]


def _forward(network: Tailed, x0, layers, states, *, keep: bool = True):
    out, kept = propagate(network, x0, layers, states, reader=None, keep=keep)
    assert out.y.bf16 is not None
    return out.y.bf16, (x0, biases_of(layers), states, kept)


def _backward(network: Tailed, residuals, dy):
    x0, biases, states, kept = residuals
    d, *others = pull_back(network, x0, kept, biases, states, Scaled(dy))
    return d.x0, *others


_run.defvjp(_forward, _backward)


def biases_of(layers: tuple[CrossLayer, ...]) -> tuple[Array | None, ...]:
    """Returns the bias of each layer."""
    return tuple(layer.bias for layer in layers)


def propagate(
    network: Tailed,
    x0: tuple[Array, ...],
    layers: tuple[CrossLayer, ...],
    states: ByProduct[DelayedScaling | None],
    *,
    reader: Site | Float[Array, "n"] | None,
    keep: bool,
) -> tuple[CrossTail, Kept]:
    """Returns the features after the last layer, and what backward reads.

    Args:
        network: the static arguments.
        x0, layers, states: of the network.
        reader: the site that reads the features, or the weights of a head, which only
            leaves its dots; None for bfloat16.
        keep: for the backward pass, too.
    """
    sites = network.sites(states)
    x = _joined(network, x0, sites[0][0], keep=keep)
    factor, readers = _factor(x), (*(own[0] for own in sites[1:]), reader)
    all_lhs, all_rhs, all_z = [], [], []
    summands, bias = (), jnp.ones(sites[0][0].shape("lhs")[1:], jnp.float32)
    out: Any = None
    for i, (own, layer) in enumerate(zip(sites, layers, strict=True)):
        lhs, rhs, z = _products(own, x, layer, keep=keep)
        summands = (*summands, z)
        bias = bias if layer.bias is None else bias + layer.bias
        want, scale_inv, head = Forms(shape=own[0].shape("lhs")), None, None
        following = readers[i]
        if isinstance(following, Site):
            want = following.forms("lhs", keep=keep)
            scale_inv = following.scale_inv("lhs", want)
        elif following is not None:
            want, head = dataclasses.replace(want, bf16=False), following
        out = network.tail(
            "cross_tail",
            *(summands, factor, bias, head),
            static=dict(want=want),
            y_scale_inv=scale_inv,
        )
        x = out.y
        all_lhs.append(lhs)
        all_rhs.append(rhs)
        all_z.append(z)
    return out, Kept(factor, tuple(all_lhs), tuple(all_rhs), tuple(all_z))


def _joined(
    network: Tailed, parts: tuple[Array, ...], reader: Site, *, keep: bool
) -> Written:
    """Returns the features as the first product and the tails read them."""
    want = reader.forms("lhs", keep=keep)
    scale_inv = reader.scale_inv("lhs", want)
    if len(parts) == 1:
        x = Scaled(parts[0].astype(jnp.bfloat16))
        return reader.cast("lhs", x, keep=keep)
    return network.tail(
        "joined_cast", *parts, static=dict(want=want), scale_inv=scale_inv
    )


def _factor(x: Written) -> Scaled:
    """Returns the features of the first layer in the shortest form of them."""
    if x.fp8 is None:
        assert x.bf16 is not None
        return Scaled(x.bf16)
    return Scaled(x.fp8.data, (x.fp8.scale_inv,))


def _products(own: tuple[Site, ...], x: Written, layer: CrossLayer, *, keep: bool):
    """Returns the operands of a layer's products, and the last product."""
    weights = tuple(
        site.weight(kernel, keep=keep)
        for site, kernel in zip(own, layer.kernels, strict=True)
    )
    operands = [x]
    for site, following, weight in zip(own, own[1:], weights, strict=False):
        h = None if keep else site.hand_on(operands[-1], weight, following)
        if h is None:
            product = site.multiply("fwd", operands[-1], weight)
            h = following.cast("lhs", product, keep=keep)
        operands.append(h)
    z = own[-1].multiply_to_fp8("fwd", operands[-1], weights[-1])
    return tuple(operands), weights, z


def pull_back(
    network: Tailed,
    x0: tuple[Array, ...],
    kept: Kept,
    biases: tuple[Array | None, ...],
    states: ByProduct[DelayedScaling | None],
    d: Scaled | Outer,
    other: Scaled | None = None,
) -> tuple[CrossGradients, tuple[CrossLayer, ...], ByProduct[DelayedScaling | None]]:
    """Returns the gradients of x0 and a head, of the layers, and the next states.

    Args:
        network: the static arguments.
        x0: of the network; their types are those of their gradients.
        kept: of the forward pass.
        biases, states: of the layers.
        d: the gradient of the features after the last layer; of a head an outer
            product, whose row is its weights.
        other: a gradient of x0 from elsewhere, to be added.
    """
    sites = network.sites(states)
    summands, all_d, gradients, all_amaxes = (d,), [d], [], []
    layers = zip(sites, kept.lhs, kept.rhs, biases, strict=True)
    for i, (own, lhs, rhs, bias) in reversed(list(enumerate(layers))):
        has_bias = bias is not None
        want = own[-1].forms("g", keep=True)
        out = network.tail(
            "cross_tail",
            *(summands, kept.x0, None, None),
            static=dict(want=want, has_row_sum=has_bias),
            y_scale_inv=own[-1].scale_inv("g", want),
        )
        kernels, d, amaxes = _gradients(own, lhs, rhs, out.y)
        gradients.append(CrossLayer(kernels, out.row_sum))
        all_amaxes.append(amaxes)
        summands = (*summands, d)
        all_d.append(d)
    types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in x0)
    last = tuple(reversed(all_d))
    x = kept.x0 if isinstance(last[-1], Outer) else None
    dx0 = network.tail(
        "cross_gradient",
        *(last, kept.z, biases, other, x),
        static=dict(parts=types, shape=sites[0][0].shape("lhs")),
    )
    next_states = network.next_states(states, tuple(reversed(all_amaxes)))
    return dx0, tuple(reversed(gradients)), next_states


def _gradients(
    own: tuple[Site, ...], lhs: tuple[Written, ...], rhs: tuple[Written, ...], g
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
            g = own[j - 1].cast("g", dh, keep=True)
    d = own[0].multiply_to_fp8("dlhs", g, rhs[0])
    return tuple(reversed(kernels)), d, tuple(reversed(amaxes))
