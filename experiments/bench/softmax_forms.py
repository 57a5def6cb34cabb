"""Softmax attention over jagged rows: our kernels, XLA's form, and cuDNN's, padded."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.bench import padded_attention
from experiments.bench.attention_cases import Case, Form, exactly, padded_operands
from loka_jax import jagged
from loka_jax.ops import softmax_attention as ops


def forms(
    case: Case, offsets: jax.Array, operands: Any, *, is_served: bool, tune: bool
) -> dict[str, Form]:
    """Returns the forms of a case, anchors first.

    Args:
        is_served: kernels of Hopper and cuDNN run here.
        tune: also the forward pass with every config worth trying.
    """
    by_xla = _whole(case, offsets, ops.BY_XLA)
    found = {f"xla jagged {w}": Form(run, operands, w) for w, run in by_xla.items()}
    if not is_served:
        return found
    lengths = None if case.lengths == "full" else np.diff(case.offsets())
    cudnn, padded = padded_attention.softmax(lengths), padded_operands(case)
    anchors = {f"cudnn {w}": Form(run, padded, w) for w, run in cudnn.items()}
    wanted = tuple(exactly(by_xla["both"])(*operands))
    ours = _whole(case, offsets, ops.SoftmaxPlan(None))
    kernels = {
        f"pallas {w}": Form(run, operands, w, wanted[: 1 if w == "forward" else 4])
        for w, run in ours.items()
    }
    configs = _configs(case, offsets, operands, wanted[:1]) if tune else {}
    return anchors | found | kernels | configs


def _whole(
    case: Case, offsets: jax.Array, plan: ops.SoftmaxPlan
) -> dict[str, Callable]:
    """Returns the attention forward, and with its gradients."""

    def attention(q, k, v):
        visible = jagged.visibility(offsets, len(q), jagged.CAUSAL)
        how: dict[str, Any] = dict(scale=case.size**-0.5, plan=plan)
        return ops.softmax_attention(q, k, v, visible, **how)

    return padded_attention.both(attention)


def _configs(case: Case, offsets: jax.Array, operands: Any, wanted) -> dict[str, Form]:
    """Returns our forward pass with each config."""
    from loka_jax.pallas import jagged_softmax as kernel

    def run(config, q, k, v, gradient):
        del gradient
        visible = jagged.visibility(offsets, len(q), jagged.CAUSAL)
        return [kernel.forward(q, k, v, visible, case.size**-0.5, config=config)[0]]

    return {
        f"pallas kernel {','.join(map(str, dataclasses.astuple(config)))}": Form(
            *(functools.partial(run, config), operands, "forward", wanted), wall=False
        )
        for config in kernel.search_space(jagged.FORWARD, case.size)
    }
