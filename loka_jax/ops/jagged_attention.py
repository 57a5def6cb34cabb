"""HSTU's attention over jagged rows.

    out_i = sum over j of silu(scale q_i . k_j) / N v_j

over the rows j that row i sees, see `jagged`: no softmax, N a constant. (Zhai et al.,
"Actions Speak Louder than Words", arXiv 2402.17152, section 3.2.)

In FP8 the forward pass rounds q, k, v and silu of the scores to E4M3 as they are, which
keeps all of its bits from 2^-6 to 448: q, k and v are products of normed rows, and a
scale of their own would take another pass over them. The backward pass takes q, k and v
in bfloat16.

Neither pass stores scores: the backward pass computes them again. It is two passes of
its own, one for each direction of the scores, which sum in a fixed order: results do
not differ between runs.

`attend` takes rows that one product has returned as they lie, see `Qkv`: kernels read
q, k and v from its columns, and write their gradients to those of its gradient. Heads
of a size that they do not serve get columns of zeros first, which change no result.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from loka_jax import checked, fp8, jagged
from loka_jax.heads import Heads, Qkv
from loka_jax.jagged import BY_KEY, BY_QUERY, FORWARD, Rule, Visibility
from loka_jax.mapped import by_kernel, equally_varying
from loka_jax.ops.device import Device
from loka_jax.ops.mesh_axes import varying_axes
from loka_jax.probe import monitors
from loka_jax.probe.live_errors import LiveErrors, errors_of_forward
from loka_jax.recipe import Role
from loka_jax.xla import jagged_attention as xla

_OBSERVED_ROWS = 8192  # of a batch, of which errors are measured


class AttentionPlan(NamedTuple):
    """What runs `jagged_attention`: Pallas kernels or XLA. Static under jit.

    Attributes:
        why_xla: why XLA runs it; None for kernels.
        why_not_fp8: why the forward pass is in the dtype of the rows; None for FP8.
    """

    why_xla: str | None
    interpret: Any = None
    why_not_fp8: str | None = "its choice is not FP8"

    @property
    def is_fp8(self) -> bool:
        """Whether the forward pass is in FP8."""
        return self.why_not_fp8 is None

    def why_not(self, role: Role) -> str | None:
        """Returns why XLA runs a role; None for a kernel."""
        del role
        return self.why_xla


BY_XLA = AttentionPlan("provider 'xla'")


def plan_jagged_attention(
    rows: Qkv, device: Device, *, is_fp8: bool = False
) -> AttentionPlan:
    """Returns what runs `jagged_attention` on a device, forward in FP8 if asked for.

    Kernels in FP8 that are wrong on this device leave it to those in bfloat16.
    """
    plan = BY_XLA._replace(why_not_fp8=None) if is_fp8 else BY_XLA
    reason = device.why_not_pallas
    dtypes = {x.dtype.name for x in rows.arrays}
    if reason is None and dtypes != {"bfloat16"}:
        reason = f"rows in {' and '.join(sorted(dtypes))}"
    if reason is not None:
        return plan._replace(why_xla=reason)
    # With Mosaic GPU, which a CPU has no use for.
    from loka_jax.pallas import jagged_attention as kernel

    q, _, v = rows.parts()
    size = kernel.served_size(q.size, v.size)
    problem = kernel.Problem(heads=q.count, size=size, value_size=size)
    reason = kernel.why_not(problem) or checked.why_wrong("jagged_attention")
    if is_fp8 and reason is None:
        plan = plan._replace(why_not_fp8=checked.why_wrong("jagged_attention_fp8"))
    return plan._replace(why_xla=reason, interpret=device.interpret)


def jagged_attention(
    q: Float[Array, "C heads d_qk"],
    k: Float[Array, "C heads d_qk"],
    v: Float[Array, "C heads d_v"],
    offsets: Int32[Array, " B_plus_1"],
    *,
    rule: Rule = jagged.CAUSAL,
    scale: float,
    max_length: int,
    plan: AttentionPlan = BY_XLA,
) -> Float[Array, "C heads d_v"]:
    """Returns HSTU's attention of each sequence, in the dtype of v; differentiable.

    Sums are float32; silu of the scores and, in the backward pass, the gradient of the
    scores are rounded to the dtype of the rows. Rows beyond `offsets[-1]` get zeros and
    have no gradient; they must be finite, as all rows of a block are multiplied.

    Args:
        offsets: sequence b has rows `offsets[b]` to `offsets[b + 1]`, maybe none;
            offsets beyond C are cut to it.
        rule: who sees whom in a sequence; each row all before it by default.
        scale: factor of the scores, usually `d_qk ** -0.5`.
        max_length: N. It limits no length: longer sequences are right as well.

    Raises:
        ValueError: if shapes do not match, or numbers are out of range.
    """
    if q.shape != k.shape or v.shape[:-1] != q.shape[:-1] or q.ndim != 3:
        raise ValueError(
            f"q {q.shape}, k {k.shape} and v {v.shape} must be [C, heads, d_qk], the "
            f"same, and [C, heads, d_v]."
        )
    how: dict[str, Any] = dict(rule=rule, scale=scale, max_length=max_length)
    return attend(Qkv.of(q, k, v), offsets, plan=plan, **how)[1]


def attend(
    rows: Qkv,
    offsets: Int32[Array, " B_plus_1"],
    *,
    rule: Rule = jagged.CAUSAL,
    scale: float,
    max_length: int,
    plan: AttentionPlan = BY_XLA,
) -> tuple[Float[Array, "C _"] | None, Float[Array, "C heads d_v"]]:
    """Returns rows that begin with U, if there is one, and `jagged_attention`.

    Take U from here: its gradient gets its place beside those of V, Q and K. These may
    be the further columns of the rows, whose gradients by way of here do not count.

    Raises:
        ValueError: as of `jagged_attention`.
    """
    _check(offsets, rule, max_length)
    visible = jagged.visibility(offsets, len(rows.arrays[0]), rule)
    given = rows
    if plan.why_xla is None:
        rows = _as_served(rows)
    else:  # XLA joins slices with what writes and reads them
        rows = Qkv.of(*(x.alone() for x in rows.parts()))
    leaves, tree = jax.tree.flatten((rows, visible))
    rows, visible = jax.tree.unflatten(tree, equally_varying(*leaves))
    result: Any = _attention(_Static(scale, max_length, plan), rows, visible)
    u, out = result
    return (given.u if u is None else u), out[..., : given.v_dim]


def _as_served(rows: Qkv) -> Qkv:
    """Returns rows whose heads have a size that kernels serve."""
    from loka_jax.pallas import jagged_attention as kernel

    parts = rows.parts()
    sizes = {x.size for x in parts}
    if sizes == {kernel.served_size(*sizes)}:
        return rows
    return Qkv.of(*kernel.widened(*(x.alone() for x in parts)))


def forward_errors(
    rows: Qkv,
    offsets: Int32[Array, " B_plus_1"],
    *,
    recipes: int,
    **how: Any,
) -> LiveErrors:
    """Returns the errors of the forward pass in FP8, against float32, by XLA.

    They are those of the first rows of the batch, and the same in so many recipes, as
    an attention has the casts of none. In place of the worst row they have the worst
    sequence: a row that sees one key is lost where its score is next to zero. The
    largest score among the monitors is a bound for all rows.
    """

    def result(dtype: Any, plan: AttentionPlan) -> Array:
        some = jax.lax.stop_gradient(
            jax.tree.map(lambda x: x[:_OBSERVED_ROWS].astype(dtype), rows)
        )
        _, out = attend(some, offsets, plan=plan, **how)
        return out.reshape(len(out), -1).astype(jnp.float32)

    first, *_ = rows.arrays
    names = varying_axes(first)
    q, k, _ = (x.alone() for x in rows.parts())
    exact = result(jnp.float32, BY_XLA)
    bound = monitors.bound_of_logits(q, k, how["scale"])
    seen = monitors.of_attention(exact, bound, names)
    in_fp8 = result(first.dtype, BY_XLA._replace(why_not_fp8=None))
    examples = jagged.sequence_of(offsets, jnp.arange(len(exact), dtype=jnp.int32))
    count = len(offsets) - 1
    return errors_of_forward(exact, in_fp8, examples, count, recipes, seen, names)


def _check(offsets, rule: Rule, max_length: int) -> None:
    if offsets.ndim != 1 or len(offsets) < 2:
        raise ValueError(f"offsets {offsets.shape} must be [B + 1], of a sequence.")
    window, oldest = rule.window, rule.oldest
    if window is not None and window < 1:
        raise ValueError(f"window={window}: it must be at least 1, or None.")
    if oldest < 0 or (oldest and window is None):
        raise ValueError(f"oldest={oldest}: it must be at least 0, and has a window.")
    if max_length < 1:
        raise ValueError(f"max_length={max_length}: it must be at least 1.")


class _Static(NamedTuple):
    scale: float
    max_length: int
    plan: AttentionPlan

    @property
    def how(self) -> dict[str, Any]:
        """What all passes are given."""
        numbers: dict[str, Any] = dict(scale=self.scale, max_length=self.max_length)
        if self.plan.why_xla is None:
            numbers["interpret"] = self.plan.interpret
        return numbers


def _forward(static: _Static, q: Heads, k: Heads, v: Heads, visible) -> Array:
    if static.plan.why_xla is not None:
        (out,) = xla.attend(FORWARD, (q,), (k, v), visible, **static.how)
        return out
    from loka_jax.pallas import jagged_attention as kernel

    run = functools.partial(kernel.attend, FORWARD, **static.how)
    (out,) = by_kernel(run, (q,), (k, v), visible)
    return out


def _gradients(static: _Static, rows: Qkv, du, gradient, visible) -> Qkv:
    if static.plan.why_xla is not None:
        (q, k, v), g = rows.parts(), Heads.of(gradient)
        (dq,) = xla.attend(BY_QUERY, (q, g), (k, v), visible, **static.how)
        dk, dv = xla.attend(BY_KEY, (k, v), (q, g), visible, **static.how)
        return Qkv.of(dq, dk, dv)
    from loka_jax.pallas import jagged_attention as kernel

    def run(rows, gradient, visible, du):
        return kernel.gradients(rows, gradient, visible, into=du, **static.how)

    return by_kernel(run, rows, gradient, visible, du)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: _Static, rows: Qkv, visible: Visibility) -> Any:
    q, k, v = rows.parts()
    if static.plan.is_fp8:
        q, k, v = (Heads.of(fp8.saturate(x.alone(), fp8.E4M3)) for x in (q, k, v))
    first, *_ = rows.arrays
    whole = first if rows.is_joined else None
    return whole, _forward(static, q, k, v, visible).astype(first.dtype)


def _attention_fwd(static: _Static, rows: Qkv, visible):
    return _attention(static, rows, visible), (rows, visible)


def _attention_bwd(static: _Static, residuals, gradients):
    (rows, visible), (du, gradient) = residuals, gradients
    # Integers have gradients of a type of their own.
    none = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), visible)
    return _gradients(static, rows, du, gradient, visible), none


_attention.defvjp(_attention_fwd, _attention_bwd)
