"""A cross network as one operation: products in FP8, and a tail in one pass each way.

    forward     z = x V U                            x' = x0 * (z + b) + x
    backward    g = dL/dx'      u = g * x0           dx0 += g * (z + b)
                dU = (x V)^T u  dh = u U^T           dV = x^T dh     dL/dx = dh V^T + g

Rows of x are examples; a layer of full rank has one kernel W in place of V and U. What
lies between the products is memory bandwidth: at 3,456 features and rank 512 a pass
takes as long as a product. So there is one pass a layer each way, the tail, which
applies the scales of the product before it, and writes what is read next: x' and u in
FP8, as they are and transposed, under scales from earlier steps, with their amaxes. In
bfloat16 the same passes run without these forms.

The weights are cast once a step, in both layouts.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax import triton, xla
from loka_jax.fp8 import Fp8Array
from loka_jax.normed import Epilogue
from loka_jax.ops.kernels import by_triton, equally_varying
from loka_jax.ops.plan import KernelPlan
from loka_jax.ops.products import Products, read_state
from loka_jax.recipe import ROLES, Operand, Role
from loka_jax.scaling import DelayedScaling
from loka_jax.tails import Forms, Scaled, Written
from loka_jax.triton import cross_tail, norm_tail
from loka_jax.xla.tails import decode, write

# The dims that the operands of a role's product contract.
_CONTRACTED: dict[Role, tuple[int, int]] = {
    "fwd": (1, 0),
    "dlhs": (1, 1),
    "drhs": (0, 0),
}
_TRITON = {
    "cross_tail": cross_tail.cross_tail,
    "cross_tail_backward": cross_tail.cross_tail_backward,
    "norm_tail": norm_tail.norm_tail,
}
_CAST = Epilogue("none")


class CrossLayer(NamedTuple):
    """The parameters of a cross layer.

    Attributes:
        kernels: float32 `(V, U)`, of shapes (n, rank) and (rank, n), or `(W,)`.
        bias: float32 `[n]`; None if absent.
    """

    kernels: tuple[Float[Array, "k n"], ...]
    bias: Float[Array, "n"] | None = None


# A value for each product of each layer.
type ByProduct[T] = tuple[tuple[T, ...], ...]


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
    if choice.provider != "xla":
        return f"provider {choice.provider!r}"
    if jnp.dtype(recipe.compute_dtype) != jnp.bfloat16:
        return f"{jnp.dtype(recipe.compute_dtype).name} is not bfloat16"
    if not choice.is_fp8:
        return None
    gemms = [recipe.gemm(role) for role in ROLES]
    casts = [cast for gemm in gemms if gemm for cast in (gemm.first, gemm.second)]
    if None in gemms or any(cast.scaling != "delayed" for cast in casts):
        return f"recipe {recipe.name!r} does not scale every operand by earlier amaxes"
    if not recipe.scales_initialized:
        return "delayed scales are not initialized"
    return next((plan.refusal for plan in each if plan.refusal), None)


def cross_network(
    x0: Float[Array, "m n"],
    layers: tuple[CrossLayer, ...],
    states: ByProduct[DelayedScaling | None],
    *,
    plans: ByProduct[KernelPlan],
    axis_names: tuple[str, ...] = (),
    implementation: triton.Implementation | None = None,
) -> Float[Array, "m n"]:
    """Returns the features after the last cross layer, in bfloat16.

    Differentiable in x0 and the layers; gradients have their dtypes. The gradient with
    respect to `states` is their values for the next step, as in `matmul`.

    Args:
        x0: the features, cast to bfloat16.
        layers: the parameters.
        states: of the products, for recipes with delayed scaling, else None.
        plans: of the products.
        axis_names: mesh axes over which rows are spread, under `shard_map`.
        implementation: of the tails: "triton" requires its kernels; "xla"; None is
            Triton if it is installed, the GPU is a Hopper and its kernels support the
            operands, else XLA.

    Raises:
        ValueError: if the plans are not served (see `why_not`), if Triton is required
            and cannot run, or if a state is missing.
    """
    reason = why_not(plans)
    if reason is not None:
        raise ValueError(f"cross_network: {reason}.")
    sizes = {(plan.spec.m, plan.spec.n) for layer in plans for plan in layer}
    sizes |= {x0.shape}
    refusals = (cross_tail.why_not(m, n) for m, n in sorted(sizes))
    refusal = next(filter(None, refusals), None)
    network = _Network(plans, axis_names, triton.chosen(implementation, refusal))
    states = tuple(
        tuple(read_state(p.choice.recipe, s) for p, s in zip(*both, strict=True))
        for both in zip(plans, states, strict=True)
    )
    arrays, tree = jax.tree.flatten((x0.astype(jnp.bfloat16), layers))
    return _run(network, *jax.tree.unflatten(tree, equally_varying(*arrays)), states)


class _Network(NamedTuple):
    """The static arguments: plans, mesh axes, and the provider of the tails."""

    plans: ByProduct[KernelPlan]
    axis_names: tuple[str, ...]
    implementation: triton.Implementation

    def sites(self, states) -> "ByProduct[_Site]":
        """Returns the sites with their states."""
        return tuple(
            tuple(
                _Site(self, Products.of(plan, self.axis_names), state)
                for plan, state in zip(*both, strict=True)
            )
            for both in zip(self.plans, states, strict=True)
        )

    def tail(self, name: str, *operands, static: dict[str, Any], **scale_inv):
        """Runs a tail by its provider."""
        if self.implementation == "xla":
            return getattr(xla, name)(*operands, **static, **scale_inv)
        run = functools.partial(_TRITON[name], **static)
        return by_triton(lambda x, scale: run(*x, **scale), operands, scale_inv)


class _Site(NamedTuple):
    """A product of the network with the scales of its operands."""

    network: _Network
    products: Products
    state: DelayedScaling | None

    def forms(self, operand: Operand, *, keep: bool) -> Forms:
        """Returns the forms in which an operand is read; for backward too if `keep`."""
        cast = self.products.cast("dlhs" if operand == "g" else "fwd", operand)
        if cast is None:
            return Forms()
        return Forms(bf16=False, fp8=cast.dtype, transposed=keep, amax=keep)

    def scale_inv(self, operand: Operand) -> Array | None:
        """Returns the scale of an operand, from earlier steps."""
        cast = self.products.cast("dlhs" if operand == "g" else "fwd", operand)
        if cast is None:
            return None
        return self.products.stored_scale_inv(operand, cast, self.state)

    def cast(self, operand: Operand, x: Scaled, *, keep: bool) -> Written:
        """Returns an operand from a product, or from bfloat16."""
        want = self.forms(operand, keep=keep)
        if want.fp8 is None:
            return Written(x.data, None, None)
        static = dict(epilogue=_CAST, want=want, keep=False)
        scale_inv = self.scale_inv(operand)
        run = self.network.tail
        return run("norm_tail", x, static=static, y_scale_inv=scale_inv).y

    def weight(self, kernel: Array) -> Written:
        """Returns the operand rhs, in both layouts."""
        want = self.forms("rhs", keep=True)
        return write(kernel.astype(jnp.float32), want, self.scale_inv("rhs"))

    def multiply(self, role: Role, first: Written, second: Written) -> Scaled:
        """Returns the product of a role: bfloat16, of drhs float32."""
        dtype = jnp.float32 if role == "drhs" else jnp.bfloat16
        first_dim, second_dim = _CONTRACTED[role]
        lhs, rhs = _view(first, first_dim), _view(second, second_dim)
        if isinstance(lhs, jax.Array) and isinstance(rhs, jax.Array):
            options = dict(compute_dtype=jnp.bfloat16, out_dtype=dtype)
            return Scaled(xla.high_precision_matmul(lhs, rhs, **options))
        assert isinstance(lhs, Fp8Array) and isinstance(rhs, Fp8Array)
        gemm = self.products.recipe.gemm(role)
        is_fast = gemm is not None and gemm.fast_accumulation
        options = dict(out_dtype=dtype, fast_accumulation=is_fast)
        out = xla.fp8_product(lhs.data, rhs.data, **options)
        return Scaled(out, (lhs.scale_inv, rhs.scale_inv))

    def next_state(self, lhs: Written, rhs: Written, g: Written):
        """Returns the gradient of the state."""
        return self.products.state_after(self.state, lhs.amaxes, rhs.amaxes, g.amaxes)


def _view(x: Written, dim: int) -> Array | Fp8Array:
    """Returns the operand of a product that contracts a dim of a matrix."""
    if x.fp8 is not None:
        return x.fp8.contracting(dim)
    assert x.bf16 is not None
    return x.bf16 if dim == 1 else x.bf16.T


class _Kept(NamedTuple):
    """What the backward pass reads of a layer's forward pass."""

    lhs: tuple[Written, ...]
    rhs: tuple[Written, ...]
    z: Scaled


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(network: _Network, x0, layers, states):
    return _propagate(network, x0, layers, states, keep=False)[0]


def _forward(network: _Network, x0, layers, states):
    y, kept = _propagate(network, x0, layers, states, keep=True)
    biases = tuple(layer.bias for layer in layers)
    return y, (x0, biases, states, kept)


def _propagate(
    network: _Network, x0, layers: tuple[CrossLayer, ...], states, *, keep: bool
) -> tuple[Array, tuple[_Kept, ...]]:
    """Returns the features after the last layer, and what backward reads."""
    sites = network.sites(states)
    x, lhs = x0, sites[0][0].cast("lhs", Scaled(x0), keep=keep)
    kept = []
    for i, (layer, own) in enumerate(zip(layers, sites, strict=True)):
        operands = [lhs]
        weights = [s.weight(w) for s, w in zip(own, layer.kernels, strict=True)]
        z = own[0].multiply("fwd", lhs, weights[0])
        for site, weight in zip(own[1:], weights[1:], strict=True):
            operands.append(site.cast("lhs", z, keep=keep))
            z = site.multiply("fwd", operands[-1], weight)
        want, scale_inv = Forms(), None
        if i + 1 < len(layers):
            following = sites[i + 1][0]
            want = dataclasses.replace(following.forms("lhs", keep=keep), bf16=True)
            scale_inv = following.scale_inv("lhs")
        lhs = network.tail(
            "cross_tail",
            *(z, Scaled(x0), x, layer.bias),
            static=dict(want=want),
            y_scale_inv=scale_inv,
        )
        x = lhs.bf16
        kept.append(_Kept(tuple(operands), tuple(weights), z))
    return x, tuple(kept)


def _backward(network: _Network, residuals, dy):
    x0, biases, states, kept = residuals
    sites = network.sites(states)
    # The gradient of y is d + r.
    d, r, dx0 = Scaled(dy), None, None
    gradients, next_states = [], []
    for i in reversed(range(len(sites))):
        own, (lhs, rhs, z) = sites[i], kept[i]
        # The first layer's x is x0: its gradient g joins g * (z + b).
        is_first = i == 0
        bias = _plus_one(biases[i], z) if is_first else biases[i]
        tail = network.tail(
            "cross_tail_backward",
            *(d, r, Scaled(x0), z, bias, dx0),
            static=dict(want=own[-1].forms("g", keep=True), keep_g=not is_first),
            u_scale_inv=own[-1].scale_inv("g"),
        )
        r, dx0, g = dy if r is None else tail.g, tail.dx0, tail.u
        kernels, layer_states = [], []
        for j in reversed(range(len(own))):
            kernels.append(decode(own[j].multiply("drhs", lhs[j], g)))
            d = own[j].multiply("dlhs", g, rhs[j])
            layer_states.append(own[j].next_state(lhs[j], rhs[j], g))
            if j:
                g = own[j - 1].cast("g", d, keep=True)
        dbias = None if biases[i] is None else tail.dbias
        gradients.append(CrossLayer(tuple(reversed(kernels)), dbias))
        next_states.append(tuple(reversed(layer_states)))
    dx = decode(d) + jnp.asarray(dx0, jnp.float32)
    return dx.astype(dy.dtype), tuple(reversed(gradients)), tuple(reversed(next_states))


_run.defvjp(_forward, _backward)


def _plus_one(bias: Array | None, z: Scaled) -> Array:
    return jnp.ones(z.data.shape[1], jnp.float32) if bias is None else bias + 1
