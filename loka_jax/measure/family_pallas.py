"""What Pallas kernels are checked on: against float32 by XLA.

Attention has examples of many lengths, none and one among them, with all that a mask
has; Wukong's FM and LCB slabs of rows that overlap; both more than two rounds of CTAs.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loka_jax import jagged
from loka_jax.heads import Qkv
from loka_jax.jagged import Rule
from loka_jax.measure.check_families import BF16, Case, normal
from loka_jax.ops import fm_lcb as fm_lcb_ops
from loka_jax.ops import softmax_attention as softmax
from loka_jax.ops.jagged_attention import BY_XLA, AttentionPlan, attend
from loka_jax.pallas import fm_lcb, fm_lcb_backward

# silu of the scores and their gradients are rounded to bfloat16.
_NOISE = 2.0**-6
# delta takes the output as it is rounded, and is subtracted from numbers next to it.
_SOFTMAX_NOISE = 2.0**-4
# Both round silu to E4M3, and may lie a code apart: in a row that sees one key, 1/8 of
# each value, the largest of which are six times their root mean square.
_FP8_NOISE = 0.75
# P, S and X X^T are rounded to bfloat16, and values lie some deviations off their mean.
_FM_LCB = 2.0**-6
_BATCH, _N, _D, _K, _M = 269, 80, 64, 32, 64
_EXAMPLES, _HEADS, _LONGEST, _SPARE = 60, 4, 333, 45
_BY_KERNEL = AttentionPlan(None)
_SOFTMAX_BY_KERNEL = softmax.SoftmaxPlan(None)


def _operands(size: int) -> tuple[Any, ...]:
    lengths = np.linspace(0, _LONGEST, _EXAMPLES).astype(np.int32)
    lengths[1::2] = lengths[1::2][::-1]
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int32)
    shape = (int(offsets[-1]) + _SPARE, _HEADS, size)
    rows = [normal(*shape, seed=i, dtype=BF16) for i in range(4)]
    counts = [np.arange(_EXAMPLES, dtype=np.int32) % n for n in (4, 6)]
    return *rows, offsets, *counts


def _both_ways(plan: AttentionPlan, operands, dtype) -> tuple[Any, ...]:
    """Returns the output and the gradients of U, v, q and k, columns of one array."""
    *rows, offsets, num_contextual, num_candidates = operands
    q, k, v, gradient = (x.astype(dtype) for x in rows)
    heads, size = q.shape[1:]
    rule = Rule(num_contextual, num_candidates, window=200, oldest=7)
    how: dict[str, Any] = dict(scale=size**-0.5, max_length=_LONGEST)

    def attention(uvqk):
        return attend(Qkv((uvqk,), heads, size), offsets, rule=rule, plan=plan, **how)

    columns = [x.reshape(len(x), -1) for x in (gradient, v, q, k)]
    (u, out), pull = jax.vjp(attention, jnp.concatenate(columns, axis=1))
    (gradients,) = pull((u, gradient))
    return tuple(x.astype(BF16) for x in (out, *jnp.split(gradients, 4, axis=1)))


def jagged_attentions() -> list[Case]:
    """Returns a case of each size of heads, forward and backward."""

    def case(size: int) -> Case:
        return Case(
            f"attention of heads of {size}",
            lambda: _operands(size),
            lambda *x: _both_ways(_BY_KERNEL, x, BF16),
            lambda *x: _both_ways(BY_XLA, x, jnp.float32),
            _NOISE,
        )

    return [case(size) for size in (64, 128, 256)]


def _forward(plan: AttentionPlan, operands) -> Any:
    """Returns the output."""
    return _both_ways(plan, operands, BF16)[0]


def fp8_jagged_attentions() -> list[Case]:
    """Returns a case of each size of heads, forward."""

    def case(size: int) -> Case:
        in_fp8 = [plan._replace(why_not_fp8=None) for plan in (_BY_KERNEL, BY_XLA)]
        return Case(
            f"attention in FP8 of heads of {size}",
            lambda: _operands(size),
            lambda *x: _forward(in_fp8[0], x),
            lambda *x: _forward(in_fp8[1], x),
            _FP8_NOISE,
        )

    return [case(size) for size in (64, 128, 256)]


def _softmax_both_ways(plan: softmax.SoftmaxPlan, operands, dtype) -> tuple[Any, ...]:
    """Returns the output and the gradients of q, k and v, of which each has g / 4 more.

    The gradient of a query that sees one key is what rounding leaves of 0.
    """
    *rows, offsets, num_contextual, num_candidates = operands
    q, k, v, gradient = (x.astype(dtype) for x in rows)
    rule = Rule(num_contextual, num_candidates, window=200, oldest=7)
    visible = jagged.visibility(offsets, len(q), rule)

    def attention(q, k, v):
        how: dict[str, Any] = dict(scale=q.shape[2] ** -0.5, plan=plan)
        return softmax.softmax_attention(q, k, v, visible, **how)

    out, pull = jax.vjp(attention, q, k, v)
    grads = (x + gradient / 4 for x in pull(gradient))
    return tuple(x.astype(BF16) for x in (out, *grads))


def jagged_softmaxes() -> list[Case]:
    """Returns a case of each size of heads, forward and backward."""

    def case(size: int) -> Case:
        return Case(
            f"softmax attention of heads of {size}",
            lambda: _operands(size),
            lambda *x: _softmax_both_ways(_SOFTMAX_BY_KERNEL, x, BF16),
            lambda *x: _softmax_both_ways(softmax.BY_XLA, x, jnp.float32),
            _SOFTMAX_NOISE,
        )

    return [case(size) for size in (64, 128, 256)]


def _fm_lcb_operands() -> tuple[Any, Any]:
    weight = normal(_N, _M, seed=1) / np.float32(_N**0.5)
    return normal(_BATCH, _N, _D, dtype=BF16), weight.astype(BF16)


def _fm_lcb_by_xla(x, weight):
    """Returns FM and LCB in float32."""
    x, weight = (v.astype(jnp.float32) for v in (x, weight))
    return fm_lcb_ops.fm_lcb(x, weight, k=_K)


def fm_lcbs() -> list[Case]:
    """Returns the case of the forward pass."""
    ours = lambda x, weight: fm_lcb.fm_lcb(x, weight, _K)  # noqa: E731
    theirs = lambda *x: tuple(y.astype(BF16) for y in _fm_lcb_by_xla(*x))  # noqa: E731
    return [Case("FM and LCB", _fm_lcb_operands, ours, theirs, _FM_LCB)]


def fm_lcbs_backward() -> list[Case]:
    """Returns the case of the backward pass, with a residual in two parts."""

    def draw():
        shapes = (_BATCH, _N, _K), (_BATCH, _M - _K, _D)
        gradients = [normal(*shape, seed=2, dtype=BF16) for shape in shapes]
        added = tuple(normal(_BATCH, n, _D, seed=3, dtype=BF16) for n in (48, 32))
        return *_fm_lcb_operands(), *gradients, added

    def theirs(x, weight, dfm, dlcb, added):
        operands = (v.astype(jnp.float32) for v in (x, weight))
        _, pull = jax.vjp(_fm_lcb_by_xla, *operands)
        dx, dweight = pull(tuple(g.astype(jnp.float32) for g in (dfm, dlcb)))
        dx += jnp.concatenate(added, axis=1).astype(jnp.float32)
        return dx.astype(BF16), dweight

    ours = lambda *x: fm_lcb_backward.fm_lcb_backward(*x)  # noqa: E731
    return [Case("FM and LCB, backward", draw, ours, theirs, _FM_LCB)]
