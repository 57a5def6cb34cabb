"""What Wukong's FM and LCB kernels are checked on: against float32 by XLA.

More examples than two rounds of CTAs, and slabs of rows that overlap.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loka_jax.measure.check_families import BF16, Case, normal
from loka_jax.ops import fm_lcb as fm_lcb_ops
from loka_jax.pallas import fm_lcb, fm_lcb_backward

# P, S and X X^T are rounded to bfloat16, and values lie some deviations off their mean.
_FM_LCB = 2.0**-6
_BATCH, _N, _D, _K, _M = 269, 80, 64, 32, 64


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
