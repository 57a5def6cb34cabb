"""Wukong's interactions of embeddings: compression, and factorization machine.

    P^T = W^T X          [k + l, d]    W = [Y | W_L], shared by all examples
    fm  = X P_k          [n, k]        P_k = X^T Y, of the first k rows of P^T
    lcb = W_L^T X        [l, d]        the last l rows of P^T

Letters: B examples, X the n embeddings of an example, of dimension d.

Pallas kernels run both passes where they can, see `plan_fm_lcb`. XLA computes
`fm = (X X^T) Y` in inference; in training, X and W as one product of each example. Both
are its fastest of six forms at n = 64, d = 128 and n = 96, d = 160 on an H200
(`experiments/bench/fm_lcb.py`).

The backward kernel also adds the gradient of a residual, see `ops/residual.py`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax import checked
from loka_jax.mapped import by_kernel, equally_varying
from loka_jax.ops import residual
from loka_jax.ops.device import Device
from loka_jax.ops.residual import Residual
from loka_jax.recipe import Role


class FmLcbPlan(NamedTuple):
    """What runs `fm_lcb`: a Pallas kernel or XLA, for either pass. Static under jit.

    Attributes:
        why_not_forward: why XLA runs the forward pass; None for a kernel.
    """

    why_not_forward: str | None
    why_not_backward: str | None
    interpret: Any = None

    @property
    def is_by_xla(self) -> bool:
        """True if no kernel runs."""
        return None not in (self.why_not_forward, self.why_not_backward)

    def why_not(self, role: Role) -> str | None:
        """Returns why XLA runs a role; None for a kernel."""
        return self.why_not_forward if role == "fwd" else self.why_not_backward

    def why_not_residual(self, counts: tuple[int, ...]) -> str | None:
        """Returns why the backward pass cannot add the gradient of a residual."""
        if self.why_not_backward is not None:
            return self.why_not_backward
        from loka_jax.pallas.fm_lcb_backward import why_not_added

        return why_not_added(counts)


BY_XLA = FmLcbPlan("provider 'xla'", "provider 'xla'")


def plan_fm_lcb(
    x: jax.Array | jax.ShapeDtypeStruct, m: int, k: int, device: Device
) -> FmLcbPlan:
    """Returns which passes of `fm_lcb` run by kernels on a device."""
    reason = device.why_not_pallas
    if reason is None and x.dtype != jnp.bfloat16:
        reason = f"embeddings in {x.dtype}"
    if reason is not None:
        return FmLcbPlan(reason, reason)
    # With Mosaic GPU, which a CPU has no use for.
    from loka_jax.pallas import fm_lcb as kernel
    from loka_jax.pallas import fm_lcb_backward as backward_kernel

    batch, n, d = x.shape
    problem = kernel.Problem(batch=batch, n=n, d=d, k=k, m=m)
    forward = kernel.why_not(problem) or checked.why_wrong("fm_lcb")
    backward = backward_kernel.why_not(problem)
    backward = backward or checked.why_wrong("fm_lcb_backward")
    return FmLcbPlan(forward, backward, device.interpret)


def fm_lcb(
    x: Float[Array, "B n d"],
    weight: Float[Array, "n m"],
    *,
    k: int,
    plan: FmLcbPlan = BY_XLA,
) -> tuple[Float[Array, "B n k"], Float[Array, "B l d"]]:
    """Returns `X (X^T Y)` and `W_L^T X` of each example, from one product with X.

    Differentiable. Sums are float32; results, the gradient of x, `P^T` or `X X^T` and
    their gradients are rounded to x's dtype, the gradient of the weight is in its own.

    References:
        Wukong, arXiv 2403.02545, sections 3.4 and 3.5.
    """
    out: Any = _fm_lcb(_Static(k, plan), *equally_varying(x, weight))
    return out[:2]


def fm_lcb_residual(
    x: Float[Array, "B n d"],
    weight: Float[Array, "n m"],
    *,
    k: int,
    counts: tuple[int, ...],
    plan: FmLcbPlan = BY_XLA,
) -> tuple[Float[Array, "B n k"], Float[Array, "B l d"], Residual]:
    """Returns the results of `fm_lcb`, and x as a residual of parts of these sizes.

    The gradient that the residual gets is added to that of x; the kernel rounds their
    sum only.

    Args:
        counts: embeddings of the parts, n in all.
        plan: of `plan_fm_lcb`; kernels serve what its `why_not_residual` does not name.
    """
    x, weight = equally_varying(x, weight)
    out: Any = _fm_lcb(_Static(k, plan, counts), x, weight)
    return *out[:2], residual.beside(x, out[2])


def compress(
    x: Float[Array, "B n d"], weight: Float[Array, "n m"]
) -> Float[Array, "B m d"]:
    """Returns `W^T X`: m linear combinations of the n embeddings of each example.

    The result and the gradient of x have x's dtype, the gradient of the weight its own.
    """
    return _compress(*equally_varying(x, weight))


def product(
    lhs: Float[Array, "B m k"], rhs: Float[Array, "B k n"]
) -> Float[Array, "B m n"]:
    """Returns `lhs @ rhs` of each example, summed in float32, in their dtype."""
    return _einsum("bmk,bkn->bmn", lhs, rhs)


class _Static(NamedTuple):
    """The static arguments: columns of Y, the plan, and sizes of a residual's parts."""

    k: int
    plan: FmLcbPlan
    counts: tuple[int, ...] = ()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fm_lcb(static: _Static, x, weight) -> tuple[Any, ...]:
    (k, plan, counts), weight = static, weight.astype(x.dtype)
    rows = residual.cut(x, counts)
    if plan.why_not_forward is None:
        from loka_jax.pallas.fm_lcb import fm_lcb as kernel

        run = functools.partial(kernel, k=k, interpret=plan.interpret)
        return *by_kernel(run, x, weight), rows
    gram = _einsum("bnd,bmd->bnm", x, x)
    lcb = _einsum("nl,bnd->bld", weight[:, k:], x)
    return _einsum("bnm,mk->bnk", gram, weight[:, :k]), lcb, rows


def _fm_lcb_fwd(static: _Static, x, weight):
    if static.plan.is_by_xla:
        # The backward pass computes P^T as well: XLA keeps it.
        out = _by_weights(static.k, x, _one_each(x, weight))
        return (*out, residual.cut(x, static.counts)), (x, weight)
    return _fm_lcb(static, x, weight), (x, weight)


def _fm_lcb_bwd(static: _Static, operands, gradients):
    (k, plan, _), (x, weight), (*gradients, drows) = static, operands, gradients
    if plan.why_not_backward is None:
        from loka_jax.pallas.fm_lcb_backward import fm_lcb_backward

        run = functools.partial(fm_lcb_backward, interpret=plan.interpret)
        dx, dweight = by_kernel(run, x, weight.astype(x.dtype), *gradients, drows)
        return dx, dweight.astype(weight.dtype)
    weights = _one_each(x, weight)
    _, pull = jax.vjp(functools.partial(_by_weights, k), x, weights)
    dx, dweights = pull(tuple(gradients))
    if drows:
        dx += jnp.concatenate(drows, axis=1)
    return dx, jnp.sum(dweights, axis=0, dtype=weight.dtype)


_fm_lcb.defvjp(_fm_lcb_fwd, _fm_lcb_bwd)


def _one_each(x, weight):
    """Returns the weight for each example: batched products are faster than one."""
    return jnp.broadcast_to(weight.astype(x.dtype), (x.shape[0], *weight.shape))


def _by_weights(k, x, weights):
    """Returns FM and LCB with a weight of each example's own."""
    p = _einsum("bnm,bnd->bmd", weights, x)
    return _einsum("bnd,bkd->bnk", x, p[:, :k]), p[:, k:]


@jax.custom_vjp
def _compress(x, weight):
    return _einsum("nm,bnd->bmd", weight.astype(x.dtype), x)


def _compress_fwd(x, weight):
    return _compress(x, weight), (x, weight)


def _compress_bwd(operands, g):
    x, weight = operands
    dx = _einsum("nm,bmd->bnd", weight.astype(x.dtype), g)
    # JAX would round it to x's dtype.
    return dx, _einsum("bnd,bmd->nm", x, g, weight.dtype)


_compress.defvjp(_compress_fwd, _compress_bwd)


def _einsum(
    subscripts: str, a: Array, b: Array, out_dtype: DTypeLike | None = None
) -> Array:
    """Returns an einsum, summed in float32; by default in a's dtype."""
    # GPUs would multiply float32 in TF32.
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dtype = out_dtype or a.dtype
    return jnp.einsum(
        subscripts, a, b, precision=precision, preferred_element_type=dtype
    )
