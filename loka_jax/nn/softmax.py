"""Softmax attention over jagged rows in Flax modules."""

import functools
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from flax import linen
from jaxtyping import Array, Float, Int32

from loka_jax import jagged
from loka_jax.jagged import Rule, Visibility
from loka_jax.nn.batched import BatchedSite
from loka_jax.nn.context import current
from loka_jax.nn.norms import check_choice
from loka_jax.nn.observed import attention_seen
from loka_jax.ops import softmax_attention as ops
from loka_jax.ops.device import local_device
from loka_jax.probe.monitors import bound_of_logits
from loka_jax.recipe import Recipe
from loka_jax.site import SiteSpec


def jagged_softmax_attention(
    q: Float[Array, "C h d_qk"],
    k: Float[Array, "C h d_qk"],
    v: Float[Array, "C h d_v"],
    offsets: Int32[Array, " B_plus_1"],
    *,
    rule: Rule = jagged.CAUSAL,
    scale: float,
    implementation: Literal["xla"] | None = None,
) -> Float[Array, "C h d_v"]:
    """Returns the softmax attention of each sequence; differentiable.

    Kernels run it where they serve it, in bfloat16, and else XLA.

    Args:
        offsets: sequence b has rows `offsets[b]` to `offsets[b + 1]`.
        rule: who sees whom in a sequence; each row all before it by default,
            `jagged.full(offsets)` for all.
        scale: factor of the scores, usually `d_qk ** -0.5`.
        implementation: "xla" for XLA everywhere.

    Raises:
        ValueError: as of `ops.softmax_attention`.
    """
    visible = jagged.visibility(jnp.asarray(offsets), len(q), rule)
    plan = _plan(q, k, v, scale, implementation)
    return ops.softmax_attention(q, k, v, visible, scale=scale, plan=plan)


def attend(
    q: Float[Array, "Q h d_qk"],
    k: Float[Array, "C h d_qk"],
    v: Float[Array, "C h d_v"],
    visible: Visibility,
    *,
    length: int,
    recipe: str | Recipe,
    implementation: Literal["xla"] | None = None,
) -> Float[Array, "Q h d_v"]:
    """Returns softmax attention, its products as sites `scores` and `values`.

    To be called inside a compact Flax module. The products run in the compute dtype.

    Args:
        visible: which of the keys each query sees.
        length: the mean number of keys of a sequence, for the sizes of the sites.
        implementation: as of `jagged_softmax_attention`.
    """
    (count, heads, size), value_size = q.shape, v.shape[2]
    scale = size**-0.5
    plan = _plan(q, k, v, scale, implementation)
    scores = _Scores(recipe, name="scores")
    scores.announce(heads, SiteSpec(count, size, length), together=plan)
    values = BatchedSite(recipe, name="values")
    values.announce(heads, SiteSpec(count, length, value_size), together=plan)
    out = ops.softmax_attention(q, k, v, visible, scale=scale, plan=plan)
    return scores(out, functools.partial(bound_of_logits, q, k, scale))


def _plan(q, k, v, scale: float, implementation: str | None) -> ops.SoftmaxPlan:
    """Returns what runs attention on the device that sites are planned for."""
    check_choice("implementation", implementation, ("xla", None))
    if implementation == "xla":
        return ops.BY_XLA
    device = current().device or local_device()
    return ops.plan_softmax_attention(q, k, v, device, scale=scale)


class _Scores(BatchedSite):
    """The site of the scores, of which Probe sees a bound, and what is attended."""

    @linen.compact
    def __call__(
        self, out: Float[Array, "Q h d"], bound: Callable[[], Float[Array, ""]]
    ) -> Float[Array, "Q h d"]:
        """Returns `out`."""
        return attention_seen(self, out, bound)


def rotated(
    x: Float[Array, "C h d"], positions: Int32[Array, " C"], most: int
) -> Float[Array, "C h d"]:
    """Returns queries or keys turned by angles that grow with their positions.

    Their products depend on the difference of positions. Of a head of d columns, j and
    j + d/2 are a pair, turned by `position * 10000^(-2j/d)`; d is even.

    Args:
        positions: of rows, from 0 to `most`.

    References:
        Su et al., RoFormer, arXiv 2104.09864.
    """
    half = x.shape[2] // 2
    speeds = 1e4 ** -(jnp.arange(half, dtype=jnp.float32) / half)
    # A table by position stays in the caches; one by row would be read from memory.
    angles = jnp.arange(most + 1, dtype=jnp.float32)[:, None] * speeds[None]
    cosines, sines = (
        jnp.take(table, positions, axis=0, mode="clip")[:, None, None, :]
        for table in (jnp.cos(angles), jnp.sin(angles))
    )
    pairs = x.astype(jnp.float32).reshape(*x.shape[:2], 2, half)
    signs = jnp.array([-1.0, 1.0]).reshape(1, 1, 2, 1)
    turned = pairs * cosines + pairs[:, :, ::-1] * (sines * signs)
    return turned.reshape(x.shape).astype(x.dtype)
