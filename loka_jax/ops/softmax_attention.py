"""Softmax attention over jagged rows.

    out_i = sum over j of softmax_j(scale q_i . k_j) v_j

over the keys j that query i sees, see `jagged`. Queries and keys may be other rows.
Kernels run it where they serve it, see `plan_softmax_attention`, and else XLA, both in
blocks of rows that skip what none of them sees. Scores are not stored: the backward
pass computes them again, from the outputs and the logarithm of the sum of the
exponentials of each query.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from loka_jax import checked
from loka_jax.jagged import Visibility
from loka_jax.mapped import by_kernel, equally_varying
from loka_jax.ops.device import Device
from loka_jax.recipe import Role
from loka_jax.xla import jagged_softmax as xla


class SoftmaxPlan(NamedTuple):
    """What runs `softmax_attention`: Pallas kernels or XLA. Static under jit.

    Attributes:
        why_xla: why XLA runs it; None for kernels.
    """

    why_xla: str | None
    interpret: Any = None

    def why_not(self, role: Role) -> str | None:
        """Returns why XLA runs a role; None for a kernel."""
        del role
        return self.why_xla


BY_XLA = SoftmaxPlan("provider 'xla'")


def plan_softmax_attention(
    q: Float[Array, "Q heads d_qk"],
    k: Float[Array, "C heads d_qk"],
    v: Float[Array, "C heads d_v"],
    device: Device,
    *,
    scale: float,
) -> SoftmaxPlan:
    """Returns what runs `softmax_attention` on a device."""
    reason = device.why_not_pallas
    dtypes = {x.dtype.name for x in (q, k, v)}
    if reason is None and dtypes != {"bfloat16"}:
        reason = f"rows in {' and '.join(sorted(dtypes))}"
    if reason is None and not scale > 0:
        reason = f"scores times {scale}, which is not above 0"
    if reason is not None:
        return SoftmaxPlan(reason)
    # With Mosaic GPU, which a CPU has no use for.
    from loka_jax.pallas import jagged_softmax as kernel

    size = kernel.served_size(q.shape[2], v.shape[2])
    problem = kernel.Problem(heads=q.shape[1], size=size, value_size=size)
    reason = kernel.why_not(problem) or checked.why_wrong("jagged_softmax")
    return SoftmaxPlan(reason, device.interpret)


def softmax_attention(
    q: Float[Array, "Q heads d_qk"],
    k: Float[Array, "C heads d_qk"],
    v: Float[Array, "C heads d_v"],
    visible: Visibility,
    *,
    scale: float,
    plan: SoftmaxPlan = BY_XLA,
) -> Float[Array, "Q heads d_v"]:
    """Returns the attention of each query, in the dtype of v; differentiable.

    Sums are float32; the shares and, in the backward pass, the gradient of the scores
    are rounded to the dtype of the rows. A query that sees no key gets zeros and has no
    gradient; rows that are not seen must be finite, as all rows of a block are
    multiplied.

    Args:
        visible: which of the keys each query sees.
        scale: factor of the scores, usually `d_qk ** -0.5`.
        plan: of `plan_softmax_attention`.

    Raises:
        ValueError: if shapes do not match.
    """
    queries, keys = len(visible.sees.first), len(visible.seen_by.first)
    shapes = (queries, *q.shape[1:]), (keys, *q.shape[1:]), (keys, q.shape[1])
    if q.ndim != 3 or shapes != (q.shape, k.shape, v.shape[:2]):
        raise ValueError(
            f"q {q.shape}, k {k.shape} and v {v.shape} must be [{queries}, heads, "
            f"d_qk], [{keys}, heads, d_qk] and [{keys}, heads, d_v]."
        )
    q, k, v, *leaves = equally_varying(q, k, v, *jax.tree.leaves(visible))
    visible, size = jax.tree.unflatten(jax.tree.structure(visible), leaves), v.shape[2]
    if plan.why_xla is None:
        from loka_jax.pallas import jagged_softmax as kernel

        q, k, v = kernel.widened(q, k, v)
    out: Any = _attention(_Static(scale, plan), q, k, v, visible)
    return out[..., :size]


class _Static(NamedTuple):
    scale: float
    plan: SoftmaxPlan

    def run(self, name: str, *operands: Any) -> Any:
        """Returns the results of a pass, `forward` or `backward`."""
        if self.plan.why_xla is not None:
            return getattr(xla, name)(*operands, self.scale)
        from loka_jax.pallas import jagged_softmax as kernel

        how: dict[str, Any] = dict(scale=self.scale, interpret=self.plan.interpret)
        return by_kernel(functools.partial(getattr(kernel, name), **how), *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: _Static, q, k, v, visible: Visibility) -> Any:
    return static.run("forward", q, k, v, visible)[0]


def _attention_fwd(static: _Static, q, k, v, visible):
    out, lse = static.run("forward", q, k, v, visible)
    return out, (q, k, v, visible, out, lse)


def _attention_bwd(static: _Static, residuals, gradient):
    q, k, v, visible, out, lse = residuals
    delta = jnp.sum(gradient.astype(jnp.float32) * out.astype(jnp.float32), -1)
    grads = static.run("backward", q, k, v, gradient, (lse, delta), visible)
    # Integers have gradients of a type of their own.
    none = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), visible)
    return *grads, none


_attention.defvjp(_attention_fwd, _attention_bwd)
